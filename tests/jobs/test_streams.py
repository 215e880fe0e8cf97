"""Tokens on their way from a worker to whoever streams them: Redis, the row, and their order."""

import asyncio
import contextlib
import random

import pytest
import redis

from api.feed import Transcript
from jobs import claims, store, streams
from jobs.claims import Held
from jobs.records import StreamMode
from jobs.settings import Settings
from jobs.streams import Piece, Run, StreamWriter, from_lines, to_lines
from tests.jobs.conftest import new_job
from tests.jobs.test_claims import success

PIECES = ["once", "", Piece("a", "b", (("f", '{"x": 1}'),), {"content": [1]}), "\0\ud800 \n"]


@pytest.fixture
def settings(valkey_url) -> Settings:
    return Settings(redis_url=valkey_url, stream_steps=100)


async def hear(settings: Settings, until: int) -> list[Run]:
    """Runs until one of that number has come."""
    heard: list[Run] = []
    async for runs in streams.listen(settings):
        heard += runs
        if heard and heard[-1].start >= until:
            return heard
    raise AssertionError


def test_steps_come_whole_and_in_order_and_redis_keeps_the_last_ones(settings):
    writer = StreamWriter(settings)

    async def both() -> list[Run]:
        hearing = asyncio.create_task(hear(settings, until=99))
        await asyncio.sleep(0.2)  # it hears what comes from now on
        writer.start()
        for number in range(100):
            writer.send([Run("job_a", 0, number, PIECES[:3]), Run("job_b", 1, number, ["x"])])
        return await asyncio.wait_for(hearing, 20)

    heard = asyncio.run(both())
    for number in range(500):
        writer.send([Run("job_a", 0, number, ["x"])])
    writer.close(5)
    assert [(run.job_id, run.start) for run in heard] == [
        (job, number) for number in range(100) for job in ("job_a", "job_b")
    ]
    assert heard[0].pieces == PIECES[:3]
    with redis.Redis.from_url(settings.redis_url) as client:
        assert 100 <= client.xlen("tokenmill:tokens") <= 200  # it is cut in pieces of a hundred


def test_the_stream_goes_on_after_redis_lost_everything_and_its_clock_went_back(settings):
    with redis.Redis.from_url(settings.redis_url) as client:
        client.xadd("tokenmill:tokens", {"runs": "odd"}, id="9999999999999-0")

        async def both() -> list[Run]:
            hearing = asyncio.create_task(hear(settings, until=7))
            await asyncio.sleep(0.3)
            client.flushall()
            client.client_kill_filter(skipme=True)  # all connections but this one
            client.xadd("tokenmill:tokens", {"runs": b"\x91\xff"})
            client.xadd("tokenmill:tokens", {"runs": streams._encode([Run("job_a", 0, 7, ["x"])])})
            return await asyncio.wait_for(hearing, 20)

        assert asyncio.run(both())[-1] == Run("job_a", 0, 7, ["x"])


def test_a_writer_without_redis_keeps_nobody_waiting_and_sends_when_it_is_back(
    settings, monkeypatch
):
    monkeypatch.setattr(streams, "RECONNECT_S", 0.05)
    writer = StreamWriter(settings)
    send, tries = writer._send, []

    def failing(steps):
        tries.append(len(steps))
        return len(tries) > 3 and send(steps)

    monkeypatch.setattr(writer, "_send", failing)
    writer.start()
    for number in range(2 * streams.MAX_WAITING_STEPS):
        writer.send([Run("job_a", 0, number, ["x"])])
    with redis.Redis.from_url(settings.redis_url) as client, contextlib.suppress(TimeoutError):
        while not client.xlen("tokenmill:tokens"):
            pass
    writer.close(5)
    assert len(tries) > 3


def test_lines_of_a_row_give_the_same_runs_back():
    runs = [Run("job_a", 0, 0, PIECES), Run("job_a", 1, 5, ["x", "y"])]
    assert from_lines("job_a", to_lines(runs[:1]) + to_lines(runs[1:])) == runs


def test_a_transcript_gives_each_token_once_whatever_comes_twice_late_or_out_of_order():
    for seed in range(200):
        draw = random.Random(seed)
        texts = {sample: [f"{sample}.{i} " for i in range(40)] for sample in range(2)}
        runs = []
        for sample, pieces in texts.items():
            for _ in range(30):
                start = draw.randrange(40)
                end = min(40, start + draw.randrange(1, 6))
                runs.append(Run("j", sample, start, pieces[start:end]))
            runs += [Run("j", sample, at, pieces[at : at + 3]) for at in range(0, 40, 3)]
        draw.shuffle(runs)
        transcript, said = Transcript(), {0: "", 1: ""}
        for at in range(0, len(runs), 4):
            for run in transcript.add(runs[at : at + 4]):
                said[run.sample] += "".join(run.pieces)
        assert said == {sample: "".join(pieces) for sample, pieces in texts.items()}
        assert not transcript.waits
        assert transcript.num_tokens == 80


def test_a_row_keeps_what_was_said_by_whoever_held_it(bench):
    [record] = bench.submit(new_job(stream=StreamMode.KEPT))
    bench.register()
    [first] = bench.claim(record.id)
    assert first.stream == StreamMode.KEPT
    held = Held(first.id, first.fence)
    lines = [to_lines([Run(record.id, 0, at, ["x", "\0"])]) for at in (0, 2, 4)]
    beat = {"now": bench.now, "lease_s": 30.0, "stats": {}, "held": [held]}
    bench.call(claims.beat, "w1", checkpoints={held: [[1, 2]]}, pieces={held: lines[0]}, **beat)
    bench.call(
        claims.release, [held], now=bench.now, crashed=False, max_crashes=3,
        checkpoints={held: [[1, 2, 3, 4]]}, pieces={held: lines[1]},
    )  # fmt: skip
    [second] = bench.claim(record.id)
    zombie = success(first, pieces=lines[2])
    assert bench.finish([zombie], now=bench.now) == set()
    assert bench.finish([success(second, pieces=lines[2])], now=bench.now) == {record.id}
    with bench.database.read() as connection:
        seen, runs = store.streamed(connection, record.id, tenant="default")
    assert seen.ended
    assert [(run.start, run.pieces) for run in runs] == [(at, ["x", "\0"]) for at in (0, 2, 4)]
