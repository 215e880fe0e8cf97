"""Whose an API key is, as the database says, and for a moment as it said.

A key that was found is not looked up again for KEPT_S: a revocation counts within that time, in
every process.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection

from api.errors import Overloaded, Unauthorized
from api.sql import Sql
from jobs import keys
from jobs.keys import Principal

K = TypeVar("K")
V = TypeVar("V")

KEPT_S = 2.0
MAX_KEPT = 4096  # keys, and as many addresses that failed
MINUTE_S = 60.0


class Keyring:
    """Belongs to the event loop's thread. Keeps hashes of keys, never a key."""

    def __init__(
        self,
        sql: Sql,
        *,
        max_failed_per_minute: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sql = sql
        self._max_failed = max_failed_per_minute
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[Principal, float]] = OrderedDict()  # until when
        self._failed: OrderedDict[str, tuple[int, float]] = OrderedDict()  # how often, since when

    async def principal(self, key: str, address: str) -> Principal:
        """Whose it is. Raises Unauthorized, Overloaded where `address` has guessed too often, and
        Unavailable."""
        digest = hashlib.sha256(key.encode(errors="surrogatepass")).digest()
        kept = self._known.get(digest)
        if kept is not None and self._clock() < kept[1]:
            return kept[0]
        if kept is None:
            self._check_guesses(address)

        def find(connection: Connection, now: float) -> Principal | None:
            return keys.find(connection, key)

        found = await self._sql.read(find)
        if found is None:
            self._known.pop(digest, None)
            self._count_guess(address)
            raise Unauthorized("the API key is not known here, or it was revoked")
        _keep(self._known, digest, (found, self._clock() + KEPT_S))
        return found

    def _check_guesses(self, address: str) -> None:
        count, since = self._failed.get(address, (0, 0.0))
        left_s = since + MINUTE_S - self._clock()
        if count >= self._max_failed and left_s > 0:
            raise Overloaded(
                "too many unknown API keys came from this address",
                code="too_many_keys",
                retry_after_s=left_s,
            )

    def _count_guess(self, address: str) -> None:
        count, since = self._failed.get(address, (0, self._clock()))
        if self._clock() - since >= MINUTE_S:
            count, since = 0, self._clock()
        _keep(self._failed, address, (count + 1, since))


def _keep(kept: OrderedDict[K, V], key: K, value: V) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > MAX_KEPT:
        kept.popitem(last=False)
