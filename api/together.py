"""Calls that come while one is under way are done together in the next.

Each hop from the event loop to a thread and back costs about as much as what is done there, and so
does a commit: under load one of either then serves many calls. A call that comes alone waits for
nobody.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from api.errors import Overloaded, Unavailable

T = TypeVar("T")
R = TypeVar("R")


@dataclass(slots=True)
class _Waiting(Generic[T, R]):
    item: T
    name: Hashable | None
    answer: "asyncio.Future[R]"


class Together(Generic[T, R]):
    """Belongs to the event loop's thread.

    `work` answers for each item, in order, with a result or the exception that its call raises; an
    exception of its own is every item's. At most `max_items` go together, and no two of one name.
    """

    def __init__(
        self,
        what: str,
        work: Callable[[Sequence[T]], Awaitable[Sequence[R | Exception]]],
        *,
        max_items: int,
        max_waiting: int,
        timeout_s: float,
    ) -> None:
        assert 0 < max_items <= max_waiting
        self.what = what
        self.max_items = max_items
        self.max_waiting = max_waiting
        self.timeout_s = timeout_s
        self._work = work
        self._waiting: list[_Waiting[T, R]] = []
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, item: T, name: Hashable | None = None) -> R:
        """The item's result. Raises Overloaded; Unavailable after `timeout_s`: what became of the
        item is then unknown."""
        if len(self._waiting) >= self.max_waiting:
            raise Overloaded(f"more than {self.max_waiting} calls wait for {self.what}")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[R] = loop.create_future()
        self._waiting.append(_Waiting(item, name, answer))
        if self._task is None:
            self._task = loop.create_task(self._run())
        try:
            async with asyncio.timeout(self.timeout_s):
                return await answer
        except TimeoutError:
            raise Unavailable(
                f"{self.what} did not answer within {self.timeout_s:g} s", code="timeout"
            ) from None

    async def _run(self) -> None:
        try:
            while group := self._next():
                await self._do(group)
        finally:
            self._task = None

    def _next(self) -> list[_Waiting[T, R]]:
        """The oldest calls; nothing is done for one that nobody waits for any more."""
        group: list[_Waiting[T, R]] = []
        later: list[_Waiting[T, R]] = []
        names: set[Hashable] = set()
        for each in self._waiting:
            if each.answer.done():
                continue
            if len(group) == self.max_items or each.name in names:
                later.append(each)
                continue
            group.append(each)
            if each.name is not None:
                names.add(each.name)
        self._waiting = later
        return group

    async def _do(self, group: Sequence[_Waiting[T, R]]) -> None:
        try:
            answers: Sequence[R | Exception] = await self._work([each.item for each in group])
        except Exception as error:  # noqa: BLE001 - each caller raises it
            answers = [error] * len(group)
        except BaseException:
            for each in group:
                each.answer.cancel()
            raise
        for each, answer in zip(group, answers, strict=True):
            if each.answer.done():
                continue
            if isinstance(answer, Exception):
                each.answer.set_exception(answer)
            else:
                each.answer.set_result(answer)
