"""Calls that wait for one another are done together, and each gets its own answer."""

import asyncio

import pytest

from api.errors import Overloaded, Unavailable
from api.together import Together


class Work:
    """Notes what went together; goes on when it is let."""

    def __init__(self) -> None:
        self.groups: list[list] = []
        self.go_on = asyncio.Event()

    async def __call__(self, items):
        self.groups.append(list(items))
        await self.go_on.wait()
        if "crash" in items:
            raise ZeroDivisionError
        return [ValueError(item) if str(item).startswith("bad") else item * 2 for item in items]


def run(scenario, **limits):
    async def main():
        work = Work()
        limits_ = {"max_items": 4, "max_waiting": 8, "timeout_s": 5.0} | limits
        await scenario(Together("the work", work, **limits_), work)

    asyncio.run(main())


async def calls(together, *items):
    """Tasks that wait; items may be pairs with a name."""
    tasks = [
        asyncio.create_task(together(*item) if isinstance(item, tuple) else together(item))
        for item in items
    ]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


def test_what_comes_meanwhile_goes_together_in_order():
    async def scenario(together, work):
        first = await calls(together, 1)
        others = await calls(together, 2, "bad one", 3, 4, 5)
        work.go_on.set()
        got = await asyncio.gather(*first, *others, return_exceptions=True)
        assert work.groups == [[1], [2, "bad one", 3, 4], [5]]
        assert [repr(each) for each in got] == ["2", "4", "ValueError('bad one')", "6", "8", "10"]
        assert await together(7) == 14

    run(scenario)


def test_two_of_one_name_never_go_together():
    async def scenario(together, work):
        waiting = await calls(together, 1, (2, "a"), (3, "b"), (4, "a"), (5, "a"), 6)
        work.go_on.set()
        assert await asyncio.gather(*waiting) == [2, 4, 6, 8, 10, 12]
        assert work.groups == [[1], [2, 3, 6], [4], [5]] or work.groups == [
            [1, 2, 3, 6], [4], [5]
        ]  # fmt: skip

    run(scenario)


def test_a_fault_of_the_whole_is_everyones_and_no_later_ones():
    async def scenario(together, work):
        first = await calls(together, 1)
        others = await calls(together, 2, "crash")
        work.go_on.set()
        got = await asyncio.gather(*first, *others, return_exceptions=True)
        assert [repr(each) for each in got] == ["2", "ZeroDivisionError()", "ZeroDivisionError()"]
        assert await together(3) == 6

    run(scenario)


def test_nothing_is_done_for_who_has_gone():
    async def scenario(together, work):
        first = await calls(together, 1)
        gone, stays = await calls(together, 2, 3)
        gone.cancel()
        await asyncio.sleep(0)
        work.go_on.set()
        assert await first[0] == 2
        assert await stays == 6
        assert work.groups == [[1], [3]]

    run(scenario)


def test_too_many_are_refused_and_too_long_is_unknown():
    async def scenario(together, work):
        waiting = await calls(together, 0)
        waiting += await calls(together, *range(1, 9))
        with pytest.raises(Overloaded):
            await together(9)
        for task in waiting:
            with pytest.raises(Unavailable, match="did not answer within"):
                await task
        work.go_on.set()

    run(scenario, timeout_s=0.1)
