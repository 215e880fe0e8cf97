"""Runs a dataset: rows into the state, tries out as batches, results judged and written down.

Each turn does what there is to do and can be done again by the next process: what was begun stands
in the state before it is asked of the service, under a key by which the service knows it again.
"""

import json
import sqlite3
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from bulk import repair
from bulk.errors import DatasetError, InputError, SpecError
from bulk.inputs import Row, Source, row_bytes
from bulk.judge import Judge, flags_of
from bulk.look import Look
from bulk.requests import Requests, text_of
from bulk.spec import Spec
from bulk.state import OpenBatch, Result, State, Try, failures

ROWS = 1000  # put into the state together
BATCH_TRIES = 20_000
BATCH_BYTES = 64 << 20
MAX_BATCHES = 2  # open at once: the engine is not to wait for the next one
LEAST_TRIES = 500  # of a batch while another is open: repairs wait for their like
POLL_S = 0.5
SHOWN_ERRORS = 20
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
COUNTS = ("prompt_tokens", "completion_tokens")
WANTED = ("run", "pause", "cancel")

Batch = dict[str, Any]


class Service(Protocol):
    """What is needed of one; `results` as GET /v1/batches/{id}/results gives it. None: it does not
    know the file, the batch or its rows."""

    def upload(self, path: Path) -> str: ...
    def create(self, file_id: str, endpoint: str, *, key: str, **fields: Any) -> Batch | None: ...
    def batch(self, batch_id: str) -> Batch | None: ...
    def results(
        self, batch_id: str, num_seen: int, *, skip: bool = False
    ) -> tuple[list[dict[str, Any]], bool] | None: ...
    def steer(self, batch_id: str, verb: str) -> Batch: ...  # pause, resume, cancel
    def model(self, name: str) -> dict[str, Any] | None: ...


@dataclass(slots=True)
class Progress:
    """Of all runs of the dataset together; changed by the runner alone."""

    phase: str = "reading"
    total: int = 0  # samples
    delivered: int = 0
    failed: Counter[str] = field(default_factory=Counter)  # by kind, with those refused
    repaired: int = 0  # tries that another one followed
    prompt_tokens: int = 0
    completion_tokens: int = 0
    saved_tokens: int = 0  # of tries that took what another one's answer was
    answered: int = 0  # by the service, and not looked at yet

    @property
    def done(self) -> int:
        return self.delivered + self.failed.total()


class Runner:
    def __init__(
        self,
        spec: Spec,
        folder: Path,
        state: State,
        work: Path,
        *,
        told: Callable[[Progress], None] = lambda progress: None,
        settled: Callable[[], None] = lambda: None,
        pause_s: float = POLL_S,
    ) -> None:
        """Files of the spec are told from `folder`; `work` is for files under way. `settled` is
        called when samples have come to an end. Raises SpecError."""
        self._spec = spec
        self._state = state
        self._work = work
        self.told = told
        self._settled = settled
        self._pause_s = pause_s
        self._requests = Requests(spec)
        self._judge = Judge(spec, folder)
        self._looks: dict[str, Look] = {}  # by the batch's key
        self.progress = Progress()

    def read(self, source: Source) -> None:
        """All rows into the state, from the first that is not there yet. Raises InputError."""
        if self._state.fact("num_rows") is not None:
            return
        rows = source.rows()
        num_read = sum(1 for _ in islice(rows, self._state.num_rows()))
        self._tell(total=num_read * self._spec.samples)
        is_request = source.format == "requests"
        while some := list(islice(rows, ROWS)):
            for row in some:
                self._check(row, source)
            values = [
                (row.number, row.place, row.values["custom_id"] if is_request else None,
                 row_bytes(row.values).decode())
                for row in some
            ]  # fmt: skip
            try:
                rounds = self._spec.repair.rounds
                self._state.add_rows(values, samples=self._spec.samples, rounds=rounds)
            except sqlite3.IntegrityError:
                raise self._double(some) from None
            num_read += len(some)
            self._tell(total=num_read * self._spec.samples)
        self._state.note(num_rows=num_read)

    def run(self, service: Service) -> None:
        """Until all samples have ended, or it is cancelled. Raises DatasetError."""
        self.count()
        for left in self._work.glob("requests-*.jsonl"):  # of a run that died
            left.unlink()
        while True:
            wanted = self._state.fact("wanted") or "run"
            self.steer(service, wanted)
            moved = wanted == "run" and self._begin(service)
            self.progress.answered = 0
            for batch in self._state.open_batches():
                moved = self._follow(service, batch) or moved
            if moved:
                self._settled()
                self._tell()
            elif not self._state.open_batches() and (
                wanted == "cancel" or not self._state.num_planned() or self._limits() is None
            ):
                return
            else:
                time.sleep(self._pause_s)
                self._tell()

    def count(self) -> None:
        """Progress by what the state says."""
        counts = self._state.counts()
        progress = self.progress = Progress("running")
        progress.failed = failures(counts)
        for (state, round_, _), (num, prompt_tokens, completion_tokens) in counts.items():
            progress.total += num if round_ == 0 else 0
            progress.delivered += num if state == "delivered" else 0
            progress.repaired += num if state == "redone" else 0
            progress.prompt_tokens += prompt_tokens
            progress.completion_tokens += completion_tokens
        progress.saved_tokens = self._state.saved_tokens() if self._spec.dedupe else 0

    def _tell(self, total: int | None = None) -> None:
        if total is not None:
            self.progress.total = total
        self.told(self.progress)

    def _check(self, row: Row, source: Source) -> None:
        self._requests.check(row)
        if source.format == "requests":
            url = self._state.fact("url")
            if url is None:
                self._state.note(url=row.values["url"])
            elif row.values["url"] != url:
                raise InputError(f"{row.place}: url must be that of the rows before, {url}")
            return
        for field_ in ("column", "details"):
            name = getattr(self._spec.output, field_)
            if name in row.values:
                raise SpecError(
                    f"output.{field_}: {name!r} is a column of the input ({row.place}): "
                    "give another name"
                )

    def _double(self, rows: list[Row]) -> InputError:
        seen: dict[str, str] = {}
        for row in rows:
            custom_id = row.values["custom_id"]
            earlier = seen.get(custom_id) or self._state.place_of(custom_id)
            if earlier is not None:
                return InputError(f"{row.place}: custom_id {custom_id[:64]!r} is that of {earlier}")
            seen[custom_id] = row.place
        raise AssertionError("no custom_id is there twice")

    # -- out

    def _begin(self, service: Service) -> bool:
        """What can be asked is asked."""
        began = False
        for batch in self._state.open_batches():
            if batch.batch_id is None:
                self._send(service, batch)
                began = True
        while True:
            num_open, num_planned = len(self._state.open_batches()), self._state.num_planned()
            most = MAX_BATCHES if self._spec.limits.tokens is None else 1  # they share what is left
            if num_open >= most or num_planned < (LEAST_TRIES if num_open else 1):
                return began
            if self._limits() is None:
                return began
            self._send(service, self._state.begin_batch(uuid.uuid4().hex, BATCH_TRIES))
            began = True

    def _send(self, service: Service, batch: OpenBatch) -> None:
        url = self._state.fact("url") or self._spec.endpoint
        file_id, is_new = batch.file_id, batch.file_id is None
        if file_id is None:
            path = self._work / f"requests-{batch.number}.jsonl"
            self._state.shorten_batch(batch.number, self._write(path, batch.number))
            file_id = service.upload(path)
            self._state.sent(batch.number, file_id=file_id)
            path.unlink()
        fact = f"fields of batch {batch.key}"
        fields = self._state.fact(fact)  # the same each time: it is created once
        if fields is None:
            left = self._limits()  # nothing is left where a run before this one spent it
            fields = {
                "priority": self._spec.priority,
                **({"dedupe": True} if self._spec.dedupe else {}),
                **({"deadline_s": 1} if left is None else left),
            }
            self._state.note(**{fact: fields})
        sent = service.create(file_id, url, key=batch.key, **fields)
        if sent is not None:
            self._state.sent(batch.number, batch_id=sent["id"])
        elif is_new:
            raise DatasetError("the service does not keep the file that it has taken")
        else:  # of a run before, and gone since
            self._state.drop_batch(batch.number)

    def _limits(self) -> dict[str, Any] | None:
        """What is left of them, as a new batch's fields; None: nothing."""
        limits, fields = self._spec.limits, dict[str, int | float]()
        if limits.tokens is not None:
            spent = self.progress.prompt_tokens + self.progress.completion_tokens
            fields["token_budget"] = limits.tokens - spent
        if limits.deadline_s is not None:
            began = self._state.fact("began_at")
            if began is None:
                began = time.time()
                self._state.note(began_at=began)
            fields["deadline_s"] = int(began + limits.deadline_s - time.time())
        if any(left < 1 for left in fields.values()):
            return None
        if limits.retention_s is not None:
            fields["rows_ttl_s"] = limits.retention_s
        if limits.error_rate is not None:
            fields["max_error_rate"] = limits.error_rate
        return fields

    def _write(self, path: Path, number: int) -> int:
        """How many tries have their line: as many as one file may have bytes."""
        num_tries = num_bytes = 0
        with path.open("wb") as file:
            for each in self._state.asked(number):
                asked = repair.asked(self._spec, self._requests, self._state, each)
                line = {
                    "custom_id": f"{each.row}-{each.sample}-{each.round}", "method": "POST",
                    "url": asked.url, "body": asked.body,
                }  # fmt: skip
                data = json.dumps(line, ensure_ascii=False).encode() + b"\n"
                num_bytes += len(data)
                if num_tries and num_bytes > BATCH_BYTES:
                    break
                file.write(data)
                num_tries += 1
        return num_tries

    def steer(self, service: Service, wanted: str) -> None:
        """Bring the service's batches where they are wanted; once for each change."""
        self.progress.phase = {"run": "running", "pause": "paused", "cancel": "cancelling"}[wanted]
        if (self._state.fact("steered") or "run") == wanted:
            return
        verb = {"run": "resume", "pause": "pause", "cancel": "cancel"}[wanted]
        for batch in self._state.open_batches():
            if batch.batch_id is not None:
                service.steer(batch.batch_id, verb)
            elif wanted == "cancel":
                self._state.drop_batch(batch.number)
        self._state.note(steered=wanted)

    # -- back

    def _follow(self, service: Service, batch: OpenBatch) -> bool:
        """Whether something new was heard of it."""
        if batch.batch_id is None:
            return False
        now = service.batch(batch.batch_id)
        if now is not None and now["status"] == "failed":
            raise self._refused(batch, now)
        ended = now is not None and now["status"] in ENDED
        look = self._looks.setdefault(batch.key, Look())
        page = None if now is None else look.page(service, self._state, batch, ended=ended)
        if now is None or page is None:  # another service, or one that has forgotten it
            self._state.drop_batch(batch.number)
            return True
        lines, done = page
        results = [self._result(line) for line in lines]
        if done:
            heard = {(each.row, each.sample, each.round) for each in results}
            results += list(self._unheard(batch, heard, now["status"]))
        if done and now.get("stop_reason"):
            self._state.note(wanted="cancel")
        new = self._state.record(batch.number, results, done=done) if results or done else []
        for each in new:
            self._add(each)
        if not done:
            self._count_answered(batch, now)
        return bool(new) or done

    def _count_answered(self, batch: OpenBatch, now: Batch) -> None:
        counts = now["request_counts"]
        if counts["total"]:  # else its file is still read
            num_known = counts["total"] - self._state.num_asked(batch.number)
            self.progress.answered += max(0, counts["completed"] + counts["failed"] - num_known)

    def _add(self, result: Result) -> None:
        progress = self.progress
        if result.state == "delivered":
            progress.delivered += 1
        elif result.state == "redone":
            progress.repaired += 1
        else:
            progress.failed[result.kind or result.state] += 1
        progress.prompt_tokens += result.prompt_tokens
        progress.completion_tokens += result.completion_tokens
        progress.saved_tokens += result.details.get("saved_tokens", 0)

    def _unheard(
        self, batch: OpenBatch, heard: set[tuple[int, int, int]], status: str
    ) -> Iterator[Result]:
        """A batch that is cancelled before it has its rows says nothing of them."""
        for each in self._state.asked(batch.number):
            if (each.row, each.sample, each.round) not in heard:
                yield Result(
                    row=each.row, sample=each.sample, round=each.round, state="failed",
                    kind=f"batch_{status}", reason=f"the batch was {status}", details={},
                )  # fmt: skip

    def _refused(self, batch: OpenBatch, now: Batch) -> DatasetError:
        asked = list(islice(self._state.asked(batch.number), 1_000_000))
        said = []
        for error in (now["errors"] or {"data": []})["data"][:SHOWN_ERRORS]:
            line = error["line"]
            where = f"{asked[line - 1].place}: " if line and line <= len(asked) else ""
            said.append(f"{where}{error['message']} ({error['code']})")
        self._state.drop_batch(batch.number)
        return DatasetError("the service refused the requests: " + "; ".join(said))

    def _result(self, line: dict[str, Any]) -> Result:
        row, sample, round_ = map(int, line["custom_id"].split("-"))
        asked = self._state.try_of(row, sample, round_)
        seed = self._requests.seed(asked.values, row, sample, round_)
        details = {"seed": seed, "attempt": line.get("attempt"), **(line.get("timings") or {})}
        if line.get("saved_tokens") is not None:
            details["saved_tokens"] = line["saved_tokens"]
        response, error = line["response"], line["error"]
        if error is not None or response["status_code"] != 200:
            error = error or response["body"]["error"]
            return Result(
                row=row, sample=sample, round=round_, state="failed", kind=error["code"],
                reason=error["message"], details=details,
            )  # fmt: skip
        return self._judged(asked, response["body"], details)

    def _judged(self, asked: Try, body: dict[str, Any], details: dict[str, Any]) -> Result:
        choice, usage = body["choices"][0], body["usage"]
        text = text_of(choice)
        flags = flags_of(text, choice["finish_reason"], choice.get("stop_reason"))
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        details = {
            **details, "finish_reason": choice["finish_reason"], "flags": flags,
            **{name: usage[name] for name in COUNTS}, "cached_tokens": cached,
        }  # fmt: skip
        fault = self._judge(text, asked.values, flags)
        state = "delivered"
        if fault is not None:
            state = "redone" if asked.rounds_left else "invalid"
        kind, reason = fault or (None, None)
        spent = dict.fromkeys(COUNTS, 0) if "saved_tokens" in details else usage
        return Result(
            row=asked.row, sample=asked.sample, round=asked.round, state=state, kind=kind,
            reason=reason, output=text, details=details, prompt_tokens=spent["prompt_tokens"],
            completion_tokens=spent["completion_tokens"],
        )  # fmt: skip
