"""Threads for what would block the event loop: SQL, tokenizing, publishing.

Every pool has a bound on threads, on calls that wait for one, and on how long a reply waits.
"""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from api.errors import Overloaded, Unavailable

P = ParamSpec("P")
R = TypeVar("R")


class Pool:
    """`threads` threads; at most `max_waiting` calls wait for one of them."""

    def __init__(self, name: str, *, threads: int, max_waiting: int, timeout_s: float) -> None:
        assert threads > 0
        assert max_waiting >= 0
        self.name = name
        self.max_calls = threads + max_waiting
        self.timeout_s = timeout_s
        self.calls = 0  # begun and not ended, the abandoned ones included
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=f"api-{name}")

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The function's result. Raises Overloaded, or Unavailable after `timeout_s`.

        A call that timed out goes on in its thread: what it did is unknown to the caller.
        """
        if self.calls >= self.max_calls:
            raise Overloaded(f"more than {self.max_calls} calls wait for {self.name}")
        self.calls += 1
        loop = asyncio.get_running_loop()
        context = contextvars.copy_context()  # what is logged there is about the same call
        future = loop.run_in_executor(
            self._executor, lambda: context.run(function, *args, **kwargs)
        )
        future.add_done_callback(self._ended)
        try:
            return await asyncio.wait_for(asyncio.shield(future), self.timeout_s)
        except TimeoutError:
            raise Unavailable(
                f"{self.name} did not answer within {self.timeout_s:g} s", code="timeout"
            ) from None

    def close(self) -> None:
        """Start nothing new; wait for no thread, since one may hang on a dead server."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _ended(self, future: "asyncio.Future[R]") -> None:
        self.calls -= 1
        if not future.cancelled():
            future.exception()  # seen: an abandoned call's failure has nobody to hear it
