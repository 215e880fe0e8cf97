"""C1 to C8 and C14: what dies, freezes, stops answering or has a wrong clock.

Each is given a Storm while clients are at work, does its faults, and returns; what must hold then
is the checker's. `tests/chaos/more_scenarios.py` has disks, memory, drains and poison.
"""

import contextlib
import json
import os
import signal
import time

import psutil
import redis

from tests.chaos.checker import Recovery
from tests.chaos.cluster import LEASE_S, Child
from tests.chaos.hooked import API_FILE, KILL_FILE
from tests.chaos.proxy import Mode
from tests.chaos.run import Storm, percentile

# to Redis and the database in turn; in the next round the other way round
NETWORK = (
    *(Mode.OLD_HOLE, Mode.CUT_AFTER_REQUEST, Mode.RESET, Mode.CUT_IN_REPLY),
    *(Mode.HOLE, Mode.ONE_WAY, Mode.SLOW, Mode.DELAY),
)
BACK_S = 10.0  # from the return of Redis until jobs run that did not
MOST_GROWN_MB = 20.0
ENGINE_BACK_S = 5.0  # beside the time its model takes to load


def kill_workers(storm: Storm) -> None:
    """C1: SIGKILL of a worker at random moments.

    One half come faster than a worker starts, so that at times none is left: nothing may be lost,
    and nobody can say when what. The other half are timed, each when what was before is over.
    """
    cluster = storm.cluster
    for i in range(storm.size.num_faults):
        timed = i >= storm.size.num_faults // 2
        if timed:
            cluster.until(lambda: storm.recovered and cluster.ready())
        if not storm.meet_work():
            break
        time.sleep(storm.rng.expovariate(1.2))
        worker = storm.rng.choice(busy_workers(storm) or cluster.workers)
        if timed:
            storm.kill_worker(worker)
        else:
            cluster.kill(worker)


def busy_workers(storm: Storm) -> list[Child]:
    """Those that hold jobs: what kills another meets nothing."""
    return [
        worker
        for worker in storm.cluster.workers
        if (record := storm.cluster.record_of(worker)) and storm.cluster.running(record.id)
    ]


def kill_engines(storm: Storm) -> None:
    """C2: SIGKILL of the engine alone, in a prefill, in a decode, behind the last token.

    The next one dies when no suspect of the last is left: else one recovery is timed with another.
    """
    file = storm.cluster.folder / KILL_FILE
    _load_s(storm)
    for i in range(storm.size.num_faults):
        storm.cluster.until(lambda: not storm.cluster.num_suspects())
        if not storm.meet_work():
            break
        fences = storm.cluster.running()
        file.write_text(("prefill", "decode", "complete")[i % 3])
        storm.cluster.until(lambda: not file.exists() or storm.all_ended)
        if file.exists():
            file.unlink()
            return
        storm.cluster.num_kills += 1
        storm.watch("kill -9 of an engine", fences, _load_s(storm) + ENGINE_BACK_S)
        storm.cluster.until(storm.cluster.ready)


def _load_s(storm: Storm) -> float:
    """How long an engine takes from its start to its first step on this machine, now."""
    if "engine_load_s" not in storm.result.figures:
        worker = storm.cluster.workers[0]
        storm.cluster.until(lambda: storm.cluster.engine_pid(worker) is not None)
        pid = storm.cluster.engine_pid(worker)
        assert pid is not None
        storm.cluster.num_kills += 1
        began = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        storm.cluster.until(lambda: storm.cluster.engine_pid(worker) not in (None, pid))
        storm.result.figures["engine_load_s"] = round(time.monotonic() - began, 2)
    return storm.result.figures["engine_load_s"] or 0.0


def kill_api(storm: Storm) -> None:
    """C3: the API dies before a commit, behind it, and in the midst of its reply."""
    file, api = storm.cluster.folder / API_FILE, storm.cluster.children["api"]
    starts = api.num_starts
    for i in range(storm.size.num_faults):
        chance = {("before", "behind", "reply")[i % 3]: 0.3}
        file.write_text(json.dumps(chance))
        seen = api.num_starts
        storm.cluster.until(lambda: api.num_starts > seen or storm.clients.done)  # noqa: B023
        file.write_text("{}")
        if storm.clients.done:
            break
        storm.cluster.until(storm.cluster.ready)
    file.unlink(missing_ok=True)
    storm.cluster.num_kills += api.num_starts - starts


def kill_redis(storm: Storm) -> None:
    """C4: Redis without persistence dies, is emptied, freezes; submits go on meanwhile."""
    cluster = storm.cluster
    for i in range(storm.size.num_faults):
        if not storm.meet_work():
            break
        began = time.monotonic()
        if i % 3 == 0:
            cluster.num_kills += 1
            cluster.valkey.kill()
            time.sleep(storm.rng.uniform(0.5, 3))
            cluster.valkey.start()
        elif i % 3 == 1:
            with redis.Redis.from_url(cluster.valkey.url) as client:
                client.flushall()
        else:
            assert cluster.valkey.pid is not None
            with cluster.frozen(cluster.valkey.pid):
                time.sleep(storm.rng.uniform(2, 5))
        storm.without_redis.append((began, time.monotonic()))
        time.sleep(storm.rng.uniform(0.2, 1))


def redis_away(storm: Storm) -> None:
    """Q22: Redis is gone for so many minutes. Nobody gathers anything, all goes on when it is back.

    Jobs are asked for all the while, and accepted.
    """
    cluster = storm.cluster
    assert storm.meet_work()
    before = _rss_mb(storm)
    cluster.num_kills += 1
    began = time.monotonic()
    cluster.valkey.kill()
    time.sleep(60 * storm.size.num_faults)
    grown = {name: mb - before[name] for name, mb in _rss_mb(storm).items() if name in before}
    storm.without_redis.append((began, time.monotonic()))
    cluster.valkey.start()
    fences, began = cluster.running(), time.monotonic()
    cluster.until(lambda: bool(set(cluster.running()) - set(fences)) or storm.all_ended)
    back = time.monotonic() - began
    storm.recoveries.append(Recovery("Redis away for long", back, BACK_S + storm.slack_s))
    storm.result.figures |= {f"mb_grown_{name}": round(mb, 1) for name, mb in grown.items()}
    assert grown, "no process lived through it"
    assert max(grown.values()) < MOST_GROWN_MB, f"grown, in MB: {grown}"


def _rss_mb(storm: Storm) -> dict[str, float]:
    """By the process's name and id: one that was started anew is not compared."""
    return {
        f"{child.name}-{child.pid}": psutil.Process(child.pid).memory_info().rss / 1e6
        for child in storm.cluster.children.values()
    }


def kill_postgres(storm: Storm) -> None:
    """C5: the database dies as a whole, or freezes; then it must all go on by itself."""
    cluster = storm.cluster
    assert cluster.postgres is not None
    for i in range(storm.size.num_faults):
        if not storm.meet_work():
            break
        if i % 3 < 2:
            cluster.num_kills += 1
            cluster.postgres.kill()
            time.sleep(storm.rng.uniform(0.1, 1.5))
            cluster.postgres.start()
        else:
            assert cluster.postgres.pid is not None
            with cluster.frozen(cluster.postgres.pid, *_sessions(cluster.postgres.pid)):
                time.sleep(storm.rng.uniform(2, 5))
        back = cluster.until(cluster.ready)
        storm.result.figures["database_back_s_max"] = max(
            storm.result.figures.get("database_back_s_max") or 0.0, round(back, 2)
        )


def _sessions(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]


def freeze_workers(storm: Storm) -> None:
    """C6: a worker sleeps for up to three leases while its engine goes on, and wakes up."""
    for _ in range(storm.size.num_faults):
        if not storm.meet_work():
            break
        worker = storm.rng.choice(storm.cluster.workers)
        with storm.cluster.frozen(worker.pid):
            time.sleep(LEASE_S * storm.rng.uniform(0.5, 2.5))
        time.sleep(storm.rng.uniform(0, 1))


def break_the_network(storm: Storm) -> None:
    """C7: every mode of the proxy before Redis, and before the database."""
    proxies = [storm.cluster.redis_proxy]
    if storm.cluster.postgres_proxy is not None:
        proxies.append(storm.cluster.postgres_proxy)
    backs = []
    for i in range(storm.size.num_faults):
        if not storm.meet_work():
            break
        turn, place = divmod(i, len(NETWORK))
        mode, proxy = NETWORK[place], proxies[(place + turn) % len(proxies)]
        storm.cluster.num_stops += 1
        proxy.mode = mode
        time.sleep(storm.rng.uniform(1, 4))
        proxy.mode = Mode.PASS
        if mode in (Mode.HOLE, Mode.OLD_HOLE, Mode.ONE_WAY):
            # whoever sent into the hole finds its connection dead, and makes another
            proxy.mode = Mode.RESET
            proxy.mode = Mode.PASS
        backs.append(storm.cluster.until(storm.cluster.ready))
    storm.result.figures["network_back_s_p95"] = percentile([round(b, 2) for b in backs], 0.95)


def half_open_redis(storm: Storm) -> None:
    """C7 too: old connections to Redis are dead and nobody says so; the runway must move on."""
    storm.meet_work()
    storm.cluster.num_stops += 1
    storm.cluster.redis_proxy.mode = Mode.OLD_HOLE
    began = time.monotonic()
    claimed = set(storm.cluster.running())
    storm.cluster.until(
        lambda: bool(set(storm.cluster.running()) - claimed) or storm.all_ended, timeout_s=120
    )
    storm.result.figures["half_open_back_s"] = round(time.monotonic() - began, 2)


def wrong_clocks(storm: Storm) -> None:
    """C8: one worker two hours ahead, one two behind, and the API too."""
    for i, child in enumerate([*storm.cluster.workers, storm.cluster.children["api"]]):
        _restart(storm, child, CHAOS_CLOCK_S=str((7200, -7200, 7200)[i % 3]))
    storm.cluster.until(storm.cluster.ready)
    storm.meet_work()
    time.sleep(2 * LEASE_S)
    storm.kill_worker(storm.cluster.workers[0])
    storm.cluster.until(lambda: storm.all_ended)
    for child in [*storm.cluster.workers, storm.cluster.children["api"]]:
        _restart(storm, child, CHAOS_CLOCK_S="0")


def _restart(storm: Storm, child: Child, **env: str) -> None:
    child.env = child.env | env
    storm.cluster.kill(child)


def swizzle(storm: Storm) -> None:
    """C14: some of all processes freeze one by one and thaw in another order."""
    cluster = storm.cluster
    for _ in range(storm.size.num_faults):
        if not storm.meet_work():
            break
        pids = [child.pid for child in cluster.children.values()]
        pids += [
            server.pid for server in (cluster.valkey, cluster.postgres) if server and server.pid
        ]
        chosen = storm.rng.sample(pids, storm.rng.randint(1, 3))
        cluster.num_stops += len(chosen)
        for pid in chosen:
            _signal(pid, signal.SIGSTOP)
            time.sleep(storm.rng.uniform(0, LEASE_S))
        storm.rng.shuffle(chosen)
        for pid in chosen:
            time.sleep(storm.rng.uniform(0, LEASE_S / 2))
            _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
