"""Hints over Redis pub/sub: ids of jobs that ended, ids of jobs that were cancelled.

A hint may be lost, doubled or late: whoever waits for one also looks at the row from time to time.
Nothing is decided by a hint. Whoever reaches Redis may publish any bytes: what is no list of ids is
logged and ignored.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection
from contextlib import suppress
from enum import StrEnum

import redis
from redis.client import PubSub

from jobs.redis_client import connect, connect_async
from jobs.settings import Settings

logger = logging.getLogger(__name__)

RECONNECT_S = 1.0
_SILENCE_S = 5.0  # how long a subscription waits before it looks whether its connection still lives


class Channel(StrEnum):
    ENDED = "ended"
    CANCELLED = "cancelled"


class Publisher:
    """Sends hints. Thread-safe. Redis being away loses them, which is allowed."""

    def __init__(self, settings: Settings) -> None:
        self._prefix = settings.key_prefix
        self._redis = connect(settings.redis_url)

    def publish(self, channel: Channel, ids: Collection[str]) -> bool:
        """One message for all of them; False when Redis did not take it."""
        if not ids:
            return True
        try:
            self._redis.publish(f"{self._prefix}{channel}", " ".join(ids))
        except (redis.RedisError, OSError) as error:
            logger.warning("hint lost: channel=%s ids=%d error=%s", channel, len(ids), error)
            return False
        return True

    def close(self) -> None:
        self._redis.close()


class Subscription:
    """Hears hints, for one thread. Connects again by itself; what was said meanwhile is lost."""

    def __init__(self, settings: Settings, channel: Channel) -> None:
        self._name = f"{settings.key_prefix}{channel}"
        self._redis = connect(settings.redis_url, decode=False)
        self._pubsub: PubSub = self._redis.pubsub(  # type: ignore[no-untyped-call]
            ignore_subscribe_messages=True
        )
        self._retry_at = 0.0

    def wait(self, timeout_s: float) -> list[str]:
        """Ids of the next hint; empty after `timeout_s` seconds, or while Redis is away."""
        if (pause := self._retry_at - time.monotonic()) > 0:
            time.sleep(min(pause, timeout_s))
            return []
        try:
            if not self._pubsub.subscribed:
                self._pubsub.subscribe(self._name)
            message = self._pubsub.get_message(timeout=timeout_s)
        except (redis.RedisError, OSError) as error:
            logger.warning("subscription broken: channel=%s error=%s", self._name, error)
            self._pubsub.reset()
            self._retry_at = time.monotonic() + RECONNECT_S
            return []
        return [] if message is None else _ids(message)

    def close(self) -> None:
        self._pubsub.close()
        self._redis.close()


async def listen(settings: Settings, channel: Channel) -> AsyncIterator[list[str]]:
    """Ids of hint after hint, for ever. An empty list says: newly connected, look at the rows."""
    name = f"{settings.key_prefix}{channel}"
    while True:
        client = connect_async(settings.redis_url, decode=False)
        pubsub = client.pubsub(ignore_subscribe_messages=True)
        try:
            await pubsub.subscribe(name)
            yield []
            while True:
                message = await pubsub.get_message(timeout=_SILENCE_S)
                if message is not None and (ids := _ids(message)):
                    yield ids
        except (redis.RedisError, OSError) as error:
            logger.warning("subscription broken: channel=%s error=%s", name, error)
        finally:
            with suppress(redis.RedisError, OSError):
                await pubsub.aclose()  # type: ignore[no-untyped-call]
                await client.aclose()
        await asyncio.sleep(RECONNECT_S)


def _ids(message: dict[str, bytes]) -> list[str]:
    channel, content = message["channel"], message["data"]
    try:
        return content.decode("ascii").split()
    except UnicodeDecodeError:
        logger.warning("hint ignored: channel=%r bytes=%d are no ids", channel, len(content))
        return []
