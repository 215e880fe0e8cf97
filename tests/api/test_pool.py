"""The bounds of the threads behind the event loop."""

import asyncio
import threading

import pytest

from api.errors import Overloaded, Unavailable
from api.pool import Pool


@pytest.fixture
def gate():
    """Holds whoever waits for it, until the test ends at the latest."""
    gate = threading.Event()
    yield gate
    gate.set()


def test_a_result_and_an_exception_come_back():
    async def scenario():
        pool = Pool("x", threads=1, max_waiting=0, timeout_s=30)
        assert await pool.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await pool.run(divmod, 7, 0)
        assert pool.calls == 0
        pool.close()

    asyncio.run(scenario())


def test_more_calls_than_may_wait_are_refused_at_once(gate):
    async def scenario():
        pool = Pool("x", threads=2, max_waiting=1, timeout_s=30)
        held = [asyncio.create_task(pool.run(gate.wait, 30)) for _ in range(3)]
        await asyncio.sleep(0.1)
        with pytest.raises(Overloaded):
            await pool.run(gate.wait)
        gate.set()
        assert await asyncio.gather(*held) == [True] * 3
        assert await pool.run(gate.wait) is True  # there is room again
        pool.close()

    asyncio.run(scenario())


def test_a_call_that_takes_too_long_is_given_up_but_keeps_its_place(gate):
    async def scenario():
        pool = Pool("x", threads=1, max_waiting=0, timeout_s=0.1)
        with pytest.raises(Unavailable):
            await pool.run(gate.wait, 30)
        assert pool.calls == 1
        with pytest.raises(Overloaded):
            await pool.run(gate.wait, 30)
        gate.set()
        while pool.calls:
            await asyncio.sleep(0.01)
        pool.close()

    asyncio.run(scenario())


def test_the_event_loop_turns_while_a_call_works(gate):
    async def scenario():
        pool = Pool("x", threads=1, max_waiting=0, timeout_s=30)
        call = asyncio.create_task(pool.run(gate.wait, 30))
        await asyncio.sleep(0.1)
        assert not call.done()
        gate.set()
        assert await call is True
        pool.close()

    asyncio.run(scenario())
