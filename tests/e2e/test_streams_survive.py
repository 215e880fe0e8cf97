"""A streamed response outlives the processes that make it and tell of it.

Everything is real and killed with SIGKILL: API, worker, Redis's memory. The client comes back with
`starting_after`, as OpenAI's guide says, and hears each event once.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import httpx2
import openai
import pytest
import redis
from sqlalchemy import select, update

from jobs.models import jobs
from tests.chaos.cluster import Cluster

NUM_TOKENS = 60
BODY = {
    "model": "tiny",
    "input": "Tell me of a river.",
    "temperature": 0,
    "max_output_tokens": NUM_TOKENS,
    "extra_body": {"ignore_eos": True},
}
LAST = {"response.completed", "response.incomplete", "response.failed"}
DAY_S = 86_400.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
Fault = Callable[[], object]


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.long)])
def cluster(request, tmp_path_factory, tiny_llama_dir) -> Iterator[Cluster]:
    """One worker, whose engine takes its time."""
    with Cluster(
        tmp_path_factory.mktemp("streams"),
        tiny_llama_dir,
        postgres=request.param == "postgres",
        num_workers=1,
        env={"CHAOS_STEP_S": "0.03"},
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster) -> Iterator[openai.OpenAI]:
    key = next(iter(cluster.keys.values()))
    with openai.OpenAI(base_url=f"{cluster.api}/v1", api_key=key, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def undisturbed(client) -> list[dict]:
    events = list(client.responses.create(**BODY, background=True, stream=True))
    return [event.to_dict() for event in events]


class Hearing:
    """One response's events, heard over as many connections as it takes."""

    def __init__(self, cluster: Cluster, client: openai.OpenAI) -> None:
        self._cluster, self._client = cluster, client
        self.events: list[dict] = []
        self.num_connections = 0

    def hear(self, faults: dict[int, Fault]) -> None:
        """To the end; `faults[n]` comes when n events were heard."""
        while not (self.events and self.events[-1]["type"] in LAST):
            with contextlib.suppress(openai.APIConnectionError, httpx2.TransportError):
                stream = self._open()
                self.num_connections += 1
                with stream:
                    for event in stream:
                        self._take(event.to_dict(), faults)
            self._cluster.until(self._cluster.ready)

    def _open(self) -> openai.Stream:
        if not self.events:
            return self._client.responses.create(**BODY, background=True, stream=True)
        return self._client.responses.retrieve(
            self.events[0]["response"]["id"],
            stream=True,
            starting_after=self.events[-1]["sequence_number"],
        )

    def _take(self, event: dict, faults: dict[int, Fault]) -> None:
        assert event["type"] != "error", event
        self.events.append(event)
        if fault := faults.pop(len(self.events), None):
            fault()


def told(events: list[dict]) -> list[tuple]:
    """What is the same of any two responses that say the same."""
    return [
        (each["sequence_number"], each["type"], each.get("delta"), each.get("text"))
        for each in events
    ]


def timeless(value: object) -> object:
    """An event without the times at which its response was made and ended."""
    if isinstance(value, list):
        return [timeless(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {n: timeless(v) for n, v in value.items() if n not in ("created_at", "completed_at")}


def test_api_and_worker_are_killed_and_no_event_is_missed_or_heard_twice(
    cluster, client, undisturbed
):
    api, worker = cluster.children["api"], cluster.workers[0]
    pids, hearing = (api.pid, worker.pid), Hearing(cluster, client)
    hearing.hear({15: lambda: [cluster.kill(api), cluster.kill(worker)]})
    assert hearing.num_connections > 1
    assert told(hearing.events) == told(undisturbed)
    assert [each["type"] in LAST for each in hearing.events].count(True) == 1
    assert hearing.events[-1]["response"]["usage"]["output_tokens"] == NUM_TOKENS
    assert attempt_of(cluster, hearing.events) > 1  # it was in its midst
    assert api.pid != pids[0]
    assert worker.pid != pids[1]
    check_a_day_later(cluster, client, hearing.events)


def check_a_day_later(cluster: Cluster, client: openai.OpenAI, events: list[dict]) -> None:
    """The same is told from SQL alone: Redis remembers nothing, and the row is a day older."""
    redis.Redis.from_url(cluster.valkey.url).flushall()
    times = ("created_at", "started_at", "first_token_at", "finished_at")
    with cluster.database.begin() as connection:
        connection.execute(update(jobs).values({name: jobs.c[name] - DAY_S for name in times}))
    for after in (None, 0, 17, len(events) - 2, len(events) - 1):
        query = {} if after is None else {"starting_after": after}
        again = client.responses.retrieve(events[0]["response"]["id"], stream=True, **query)
        behind = 0 if after is None else after + 1
        assert timeless([each.to_dict() for each in again]) == timeless(events[behind:]), after


def attempt_of(cluster: Cluster, events: list[dict]) -> int:
    job_id = events[0]["response"]["id"].replace("resp_", "job_")
    with cluster.database.read() as connection:
        attempt = connection.scalar(select(jobs.c.attempt).where(jobs.c.id == job_id))
    assert attempt is not None
    return attempt


@pytest.mark.long
def test_so_it_is_at_other_moments_and_with_other_faults(cluster, client, undisturbed):
    api, worker = cluster.children["api"], cluster.workers[0]
    faults = {
        "api": lambda: cluster.kill(api),
        "worker": lambda: cluster.kill(worker),
        "engine": lambda: os.kill(cluster.engine_pid(worker), signal.SIGKILL),
        "memory of Redis": redis.Redis.from_url(cluster.valkey.url).flushall,
    }
    for name, fault in faults.items():
        for at in (2, 11, len(undisturbed) // 2, len(undisturbed) - 8):
            cluster.until(lambda: cluster.engine_pid(worker) is not None)
            hearing = Hearing(cluster, client)
            hearing.hear({at: fault})
            assert told(hearing.events) == told(undisturbed), (name, at)
        check_a_day_later(cluster, client, hearing.events)
