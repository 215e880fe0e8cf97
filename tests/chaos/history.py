"""Clients of a chaos run, and the record of what each asked, heard and when.

A call's outcome is ok, refused (the service said no) or unknown (the connection ended first). Who
does not know asks again with the same Idempotency-Key, as docs/http.md tells clients to.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.chaos.oracle import Ask, Oracle

OK, REFUSED, UNKNOWN = "ok", "refused", "unknown"
PEEK = "peek"
CALL_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One call, from its start to its end by the monotonic clock."""

    client: int
    kind: str  # submit, look, cancel, or peek: a look at another tenant's job
    key: str  # of a submission; the job's id otherwise
    began: float
    ended: float
    outcome: str
    status: int | None = None
    jobs: tuple[tuple[str, str, str], ...] = ()  # of an answer: id, custom_id, state


@dataclass
class History:
    """Everything that clients did. Threads may add."""

    events: list[Event] = field(default_factory=list)
    asks: dict[str, Ask] = field(default_factory=dict)  # by custom_id
    rows: set[str] = field(default_factory=set)  # of these, a batch's, which no 202 names

    @property
    def accepted(self) -> dict[str, str]:
        """Ids of jobs that a 202 named, by custom_id; the first that did."""
        found: dict[str, str] = {}
        for event in self.events:
            if event.kind == "submit" and event.outcome == OK:
                for job_id, custom_id, _ in event.jobs:
                    found.setdefault(custom_id, job_id)
        return found

    def answered(self, kind: str, began: float, ended: float) -> tuple[int, int]:
        """How many calls begun in a time have ended, and how many of them as asked."""
        calls = [e for e in self.events if e.kind == kind and began <= e.began <= ended]
        return len(calls), sum(e.outcome == OK for e in calls)


class Clients:
    """`num` threads that submit, look and now and then cancel, until told to stop or done."""

    def __init__(
        self,
        url: Callable[[], str],
        oracle: Oracle,
        history: History,
        *,
        headers: Sequence[dict[str, str]],  # of each tenant; clients take them in turn
        name: str,
        num_jobs: int,
        tokens: tuple[int, int],
        per_call: int = 10,
        num: int = 3,
        pause_s: float = 0.2,
        cancels: float = 0.02,
        seed: int = 0,
    ) -> None:
        self._url, self._oracle, self.history = url, oracle, history
        self._headers = headers
        self._accepted: list[list[str]] = [[] for _ in headers]  # ids of each tenant
        self._name, self._tokens, self._per_call = name, tokens, per_call
        self._pause_s, self._cancels = pause_s, cancels
        self._left = num_jobs
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._rng = random.Random(seed)
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(num)]
        self._num_keys = 0

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    @property
    def done(self) -> bool:
        """Every job has been accepted."""
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, client: int) -> None:
        rng = random.Random(client)
        mine: list[str] = []
        tenant = client % len(self._headers)
        with httpx.Client(timeout=CALL_S, trust_env=False, headers=self._headers[tenant]) as http:
            while not self._stop.is_set() and (jobs := self._next_jobs(client)):
                key = jobs[0]["custom_id"]
                while not self._stop.is_set():
                    event = self._call(http, client, "submit", key, jobs)
                    if event.outcome == OK:
                        mine += [job_id for job_id, _, _ in event.jobs]
                        self._accepted[tenant] += mine[-len(event.jobs) :]
                        break
                    time.sleep(0.1 + 0.2 * rng.random())
                self._look_and_cancel(http, client, rng, mine)
                others = [ids for i, ids in enumerate(self._accepted) if i != tenant and ids]
                if others:
                    self._call(http, client, PEEK, rng.choice(rng.choice(others)))
                self._stop.wait(self._pause_s * rng.random() * 2)

    def _look_and_cancel(
        self, http: httpx.Client, client: int, rng: random.Random, mine: list[str]
    ) -> None:
        if not mine:
            return
        for job_id in {mine[-1], rng.choice(mine)}:
            self._call(http, client, "look", job_id)
        if rng.random() < self._cancels * self._per_call:
            self._call(http, client, "cancel", rng.choice(mine[-self._per_call :]))

    def _next_jobs(self, client: int) -> list[dict[str, Any]]:
        with self._lock:
            num = min(self._per_call, self._left)
            self._left -= num
            jobs = []
            for _ in range(num):
                self._num_keys += 1
                custom_id = f"{self._name}-{self._num_keys}"
                ask = self._oracle.draw(self._rng, *self._tokens)
                self.history.asks[custom_id] = ask
                jobs.append({
                    "url": "/v1/completions", "custom_id": custom_id, "body": ask.body(),
                    "priority": self._rng.choice([0, 0, 0, 1]),
                } | self._rng.choice([{}, {"max_attempts": 100}]))  # fmt: skip
            return jobs

    def _call(
        self, http: httpx.Client, client: int, kind: str, key: str, jobs: Any = None
    ) -> Event:
        began = time.monotonic()
        status, outcome, found = None, UNKNOWN, ()
        try:
            if kind == "submit":
                reply = http.post(
                    f"{self._url()}/v1/jobs", json=jobs, headers={"Idempotency-Key": key}
                )
            elif kind in ("look", PEEK):
                reply = http.get(f"{self._url()}/v1/jobs/{key}")
            else:
                reply = http.post(f"{self._url()}/v1/jobs/{key}/cancel")
            status = reply.status_code
            outcome = OK if reply.is_success else REFUSED
            if reply.is_success:
                data = reply.json()
                told = data.get("data", [data])
                found = tuple((job["id"], job["custom_id"], job["status"]) for job in told)
        except (httpx.HTTPError, ValueError):
            outcome = UNKNOWN
        event = Event(
            client=client, kind=kind, key=key, began=began, ended=time.monotonic(),
            outcome=outcome, status=status, jobs=found,
        )  # fmt: skip
        self.history.events.append(event)
        return event
