"""C9 to C13, waste and the control run: disks, memory, drains, poison, and a fence removed."""

import contextlib
import os
import resource
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil
import redis
from celery import Celery

from jobs.celery_app import DEFAULT_QUEUE, GENERATE_TASK, make_app, queue_for
from jobs.lifecycle import TERMINAL
from jobs.settings import Settings
from tests.chaos.checker import Recovery, Row
from tests.chaos.cluster import GRACE_S, LEASE_S
from tests.chaos.history import OK, Event
from tests.chaos.hooked import NO_FENCE_FILE, tokens_of_engines
from tests.chaos.oracle import SAMPLED_TOKENS, Ask
from tests.chaos.run import Storm, percentile
from tests.chaos.scenarios import busy_workers
from tests.worker.deployment import MODEL

POISONED = {"crash", "exit", "segv", "stuck", "raise", "memory"}
ELSEWHERE_S = 3.0  # until what a drain hands back runs again
NEIGHBOURS = 7


def fill_the_disk(storm: Storm) -> None:
    """C9: no room for the database's file. Nothing is accepted falsely, nothing fails, all goes on.

    For a cluster on SQLite, whose folder lies on a small tmpfs.
    """
    folder = storm.cluster.database_folder
    filler = folder / "filler"
    for _ in range(storm.size.num_faults):
        if not storm.meet_work():
            break
        storm.cluster.num_stops += 1
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
        free = shutil.disk_usage(folder).free
        assert free < 1 << 17, f"{free} bytes are free still"
        began = time.monotonic()
        time.sleep(storm.rng.uniform(2, 4))
        num, answered = storm.clients.history.answered("submit", began, time.monotonic())
        storm.result.figures["submits_answered_on_a_full_disk"] = answered / num if num else None
        filler.unlink()
        storm.result.figures["disk_back_s"] = round(storm.cluster.until(storm.cluster.ready), 2)
        time.sleep(1)


def starve_of_memory(storm: Storm) -> None:
    """C11: an engine may not map another page; it ends or goes on, its jobs are done."""
    for i in range(storm.size.num_faults):
        if not storm.meet_work():
            break
        worker = storm.cluster.workers[i % len(storm.cluster.workers)]
        storm.cluster.until(lambda: storm.cluster.engine_pid(worker) is not None)  # noqa: B023
        pid = storm.cluster.engine_pid(worker)
        assert pid is not None
        storm.cluster.num_stops += 1
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            limit = psutil.Process(pid).memory_info().vms + (1 << 20)
            resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
        time.sleep(2)
        with contextlib.suppress(ProcessLookupError):  # whatever it was able to go on with
            os.kill(pid, signal.SIGKILL)
        storm.cluster.until(storm.cluster.ready)


def drain(storm: Storm) -> None:
    """C12: SIGTERM to one worker after another; then twice, SIGQUIT, and SIGKILL behind it."""
    exits = []
    for i in range(storm.size.num_faults):
        if not storm.meet_work():
            break
        worker = storm.cluster.workers[i % len(storm.cluster.workers)]
        record = storm.cluster.record_of(worker)
        if record is None:
            continue
        held = storm.cluster.running(record.id)
        process = worker.process
        storm.cluster.num_stops += 1
        began = time.monotonic()
        way = ("once", "once", "twice", "quit", "kill")[i % 5]
        worker.signal(signal.SIGQUIT if way == "quit" else signal.SIGTERM)
        if way == "twice":
            time.sleep(0.3)
            worker.signal(signal.SIGTERM)
        if way == "kill":
            time.sleep(0.5)
            storm.cluster.kill(worker)
            storm.watch("SIGTERM, then SIGKILL", held, LEASE_S + 5)
        process.wait()
        if way != "kill":
            exits.append(time.monotonic() - began)
            left = storm.cluster.unsettled(held)
            storm.watch("a drain", {i: held[i] for i in left}, ELSEWHERE_S)
            if held and not left:  # all of them ran elsewhere, or had ended, before its exit
                storm.recoveries.append(Recovery("a drain", 0.0, ELSEWHERE_S + storm.slack_s))
        storm.cluster.until(storm.cluster.ready)
    slowest = max(exits, default=0.0)
    storm.result.figures |= {
        "drains": float(len(exits)),
        "drain_exit_s_max": round(slowest, 2),
        "drain_exit_s_p50": percentile([round(e, 2) for e in exits], 0.5),
        "drain_bound_s": GRACE_S + 2,
    }
    for seconds in exits:
        storm.recoveries.append(
            Recovery("a drain, to its exit", seconds, GRACE_S + 2 + storm.slack_s)
        )


def poison(storm: Storm) -> None:
    """C13: jobs that end, hang or break their engine, each among seven seeded healthy ones."""
    markers = ["crash", "oom", "exit", "raise", "segv", "memory", "stuck"][: storm.size.num_faults]
    for marker in markers:
        restarts = _restarts(storm)
        job_id = _submit_among_healthy(storm, marker)
        storm.cluster.until(lambda: storm.cluster.has_ended(job_id))  # noqa: B023
        (row,) = [row for row in storm.cluster.rows(storm.name) if row.id == job_id]
        expected = ("failed", "poisoned") if marker in POISONED else ("succeeded", None)
        assert (row.state, row.error_code) == expected, row
        storm.cluster.num_kills += marker in POISONED
        restarts = _restarts(storm) - restarts
        storm.result.figures[f"restarts_by_{marker}"] = float(restarts)
        assert restarts <= 3, f"{marker} cost {restarts} engines"
    storm.settle()
    asks = storm.clients.history.asks
    beside = [row for row in storm.cluster.rows(storm.name) if "-beside-" in row.custom_id]
    equal = sum(row.text == storm.oracle.text(asks[row.custom_id]) for row in beside)
    storm.result.figures["neighbours"] = float(len(beside))
    storm.result.figures["neighbours_byte_equal"] = float(equal)


def _submit_among_healthy(storm: Storm, marker: str) -> str:
    """One call: the poison in the midst of its neighbours, of which the checker hears as well."""
    history, began = storm.clients.history, time.monotonic()
    calls = []
    for i in range(NEIGHBOURS):
        known = storm.rng.choice(storm.oracle.sampled)
        custom_id = f"{storm.name}-beside-{marker}-{i}"
        ask = Ask(prompt=known.prompt, max_tokens=SAMPLED_TOKENS, seed=known.seed)
        history.asks[custom_id] = ask
        calls.append({"custom_id": custom_id, "body": ask.body()})
    custom_id = f"{storm.name}-poison-{marker}"
    body = {"model": MODEL, "prompt": f"fault {marker} now", "max_tokens": 8}
    calls.insert(NEIGHBOURS // 2, {"custom_id": custom_id, "body": body})
    common = {"url": "/v1/completions", "max_attempts": 100}
    reply = httpx.post(
        f"{storm.cluster.api}/v1/jobs",
        json=[call | common for call in calls],
        headers=storm.cluster.headers(),
        timeout=30,
        trust_env=False,
    )
    assert reply.status_code == 202, reply.text
    told = [(job["id"], job["custom_id"], job["status"]) for job in reply.json()["data"]]
    history.events.append(
        Event(
            client=-1,
            kind="submit",
            key=custom_id,
            began=began,
            ended=time.monotonic(),
            outcome=OK,
            status=202,
            jobs=tuple(job for job in told if job[1] != custom_id),
        )
    )
    return next(job_id for job_id, name, _ in told if name == custom_id)


def _restarts(storm: Storm) -> int:
    return sum(row.stats.get("engine_restarts", 0) for row in storm.cluster.live_workers())


ODD_BODIES = [
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [-1]},
    {"prompt": [10**9]},
    {"prompt": [True, None]},
    {"prompt": "x", "max_tokens": 0},
    {"prompt": "x", "max_tokens": -1},
    {"prompt": "x", "max_tokens": 2**31},
    {"prompt": "x", "temperature": 1e308},
    {"prompt": "x", "top_p": 0},
    {"prompt": "x", "top_k": -7},
    {"prompt": "x", "logit_bias": {"999999": 1}},
    {"prompt": "x", "n": 10**6},
    {"prompt": "x", "stop": ""},
    {"prompt": "x", "logprobs": -1},
    {"prompt": "x " * 4000},
    {"prompt": "x", "structured_outputs": {"regex": "("}},
    {"messages": []},
]
JUNK = [
    b"junk", b"\xff\xfe\x00", b"[1, 2]", b"{}", b'{"body": "!!!", "properties": {}}',
    b'{"body": "bm90IGpzb24=", "properties": {"body_encoding": "base64"}}', b"null", b"5",
    b'{"body": null, "headers": null, "properties": null}', b"", b'"text"', b"{" * 1000,
]  # fmt: skip


REFUSALS = {"invalid_request", "context_length_exceeded", "exceeds_capacity"}


def _odd_rows(storm: Storm) -> list[Row]:
    """Of bodies that have come to their end; a few, such as an empty prompt, may have a text."""
    rows = storm.cluster.rows(storm.name)
    return [row for row in rows if "-odd-" in row.custom_id and row.state in TERMINAL]


def engines_of(storm: Storm) -> set[int]:
    """As soon as all are up and every worker has told of its own."""
    cluster = storm.cluster
    cluster.until(lambda: all(cluster.engine_pid(worker) for worker in cluster.workers))
    return {pid for worker in cluster.workers if (pid := cluster.engine_pid(worker))}


def odd_messages(storm: Storm) -> None:
    """C13, Q06: bodies that no door has seen, and bytes that are no message at all."""
    settings = Settings.from_env(storm.cluster.env)
    app: Celery = make_app(settings)
    pids = [child.pid for child in storm.cluster.workers]
    engines = engines_of(storm)
    for i, body in enumerate(ODD_BODIES):
        custom_id = f"{storm.name}-odd-{i}"
        kwargs = {"url": "/v1/completions", "custom_id": custom_id, "body": {"model": MODEL} | body}
        app.send_task(GENERATE_TASK, kwargs=kwargs, queue=DEFAULT_QUEUE)
    with redis.Redis.from_url(storm.cluster.valkey.url) as client:
        for junk in JUNK:
            storm.meet_work()
            client.lpush(f"{settings.key_prefix}{queue_for(MODEL)}", junk)
            client.lpush(f"{settings.key_prefix}{DEFAULT_QUEUE}", junk)
            time.sleep(0.05)
    app.close()
    storm.cluster.until(
        lambda: (
            sum("-odd-" in row.custom_id for row in storm.cluster.rows(storm.name))
            == len(ODD_BODIES)
        )
    )
    storm.result.figures["workers_ended_by_odd_messages"] = float(
        sum(child.pid not in pids for child in storm.cluster.workers)
    )
    still = engines_of(storm)
    storm.result.figures["engines_ended_by_odd_messages"] = float(len(engines - still))
    assert engines == still, "an engine did not survive an odd body"


def kill_now_and_then(storm: Storm, every_s: float = 20.0) -> None:
    """Bar 3: a kill every 20 seconds, of a worker or an engine in turn, while long jobs run.

    No recovery is timed: all seats are taken, by jobs that take as long.
    """
    folder: Path = storm.cluster.folder
    generated_before, again_before = tokens_of_engines(folder)
    due = time.monotonic() + every_s
    for i in range(storm.size.num_faults):
        while time.monotonic() < due:
            time.sleep(0.1)
            if storm.all_ended:
                break
        if storm.all_ended:
            break
        due += every_s
        worker = storm.rng.choice(storm.cluster.workers)
        pid = storm.cluster.engine_pid(worker)
        if i % 2 == 0 or pid is None:
            storm.cluster.kill(worker)
        else:
            storm.cluster.num_kills += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    storm.settle()
    generated, again = tokens_of_engines(folder)
    kept = sum(row.completion_tokens for row in storm.cluster.rows(storm.name))
    made = generated - generated_before
    storm.result.figures |= {
        "tokens_made": float(made),
        "tokens_kept": float(kept),
        "tokens_computed_again": float(again - again_before),
        "wasted_share": round((made - kept) / made, 4),
    }


def without_a_fence(storm: Storm) -> None:
    """The control run: workers sleep past their lease, and their results name no fence.

    The checker must not be content with this one.
    """
    file = storm.cluster.folder / NO_FENCE_FILE
    file.touch()
    for _ in range(storm.size.num_faults):
        if not storm.meet_work() or _has_two_results(storm):
            break
        for worker in busy_workers(storm)[:1]:
            with storm.cluster.frozen(worker.pid):
                time.sleep(2 * LEASE_S)
            time.sleep(1)
    storm.settle()
    file.unlink()


def _has_two_results(storm: Storm) -> bool:
    """Some job, which is all that the checker is to see."""
    taken = Counter(write.job_id for write in storm.cluster.writes() if write.accepted)
    return max(taken.values(), default=0) > 1
