"""kombu's Redis transport, for a consumer that lives on a queue others can write to.

As kombu and Celery have it, an element of the list that they cannot read (not JSON, headers of
other types than Celery's, time limits that are no pair) raises in the worker's event loop: the
worker ends, the element goes back into the list, and the next worker ends too. Here one element's
fault costs that element alone: it is logged without its content, counted, and not restored. Where
only a header of a job is wrong, the job becomes a row that says so (worker/headers.py).
"""

import logging
import traceback
from collections.abc import Callable
from typing import Any, ClassVar

from kombu.transport import redis, virtual
from redis import DataError, RedisError

from jobs.celery_app import BACKGROUND_STEP
from worker.headers import tidy

SHUT_S = 0.1  # until it is asked again whether the background is wanted
# kombu's, of a connection in an event loop
_TIMERS = (
    "_restore_messages_tref", "_subclient_health_tref", "_brpop_health_tref", "_reauth_tref",
    "_binding_expiry_tref",
)  # fmt: skip

logger = logging.getLogger(__name__)


def _always() -> bool:
    return True


class QoS(redis.QoS):
    """What a channel has not acknowledged yet.

    kombu closes the channels of a connection it has lost, and lets go of the connection's address,
    while messages that came by it are still worked on: what is done about them later would end the
    worker. The messages are safe: the visibility timeout brings them back, and their rows decide.
    """

    def restore_unacked_once(self, stderr: Any = None) -> None:
        if not self._is_lost():
            super().restore_unacked_once(stderr)

    def ack(self, delivery_tag: str) -> None:
        if self._is_lost():
            virtual.QoS.ack(self, delivery_tag)
        else:
            super().ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        if self._is_lost():
            virtual.QoS.ack(self, delivery_tag)
        else:
            super().reject(delivery_tag, requeue)

    def _is_lost(self) -> bool:
        return self.channel.connection is None or self.channel.connection.client is None


class Channel(redis.Channel):
    QoS = QoS

    def _brpop_start(self, timeout: float | None = None) -> None:
        """Ask Redis for the next message; for none of the background while that is not wanted."""
        if Transport.takes_background():
            super()._brpop_start(timeout)  # type: ignore[misc]
            return
        steps = self.priority_steps
        self.priority_steps = [step for step in steps if step != BACKGROUND_STEP]
        try:
            super()._brpop_start(SHUT_S)  # type: ignore[misc]
        finally:
            self.priority_steps = steps

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)  # type: ignore[misc]
        except (ValueError, RecursionError) as error:  # from decoding bytes to text to JSON
            transport = self.connection
            assert isinstance(transport, Transport)
            transport.drop(error)
            return True


class Transport(redis.Transport):
    Channel = Channel
    num_dropped = 0
    # the pool's, of which a process has one, as of Celery's own state; an option of the connection
    # would be told to monitors, which take no function
    takes_background: ClassVar[Callable[[], bool]] = _always
    # what the last one of this process has in the event loop
    _in_loop: ClassVar[tuple[Any, set[Callable[[], None]]] | None] = None

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Take the place of the connection before, which has been lost.

        kombu leaves what that one called in each turn, and with it all that it had, for each
        reconnection.
        """
        if Transport._in_loop is not None:
            cycle, ticks = Transport._in_loop
            loop.on_tick -= ticks
            for name in _TIMERS:
                entry = getattr(cycle, name, None)
                if entry is not None:
                    entry.cancel()
        before = set(loop.on_tick)
        super().register_with_event_loop(connection, loop)
        Transport._in_loop = self.cycle, loop.on_tick - before

    def _deliver(self, message: Any, queue: str | None) -> None:
        try:
            tidy(message)
            super()._deliver(message, queue)
        except DataError as error:  # a value of the element's that Redis has no type for
            self.drop(error, message)
        except (OSError, RedisError):
            raise
        except Exception as error:  # noqa: BLE001 (whatever it is, it is this element's)
            self.drop(error, message)
            self._forget(message)

    def drop(self, error: Exception, message: object = None) -> None:
        self.num_dropped += 1
        place = traceback.extract_tb(error.__traceback__)[-1].name
        logger.warning(
            "element of a queue dropped, it is no message: task=%s fault=%s in %s",
            _task_id(message),
            type(error).__name__,
            place,
        )

    def _forget(self, message: Any) -> None:
        """Should it stand among the unacknowledged already, it would come back for ever."""
        tag = message.get("properties", {}).get("delivery_tag") if _is_object(message) else None
        if isinstance(tag, str):
            for channel in self.channels or ():
                channel.basic_reject(tag, requeue=False)


def _is_object(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("properties", {}), dict)


def _task_id(message: Any) -> str:
    """As its sender knows it."""
    headers = message.get("headers") if isinstance(message, dict) else None
    return repr(headers.get("id") if isinstance(headers, dict) else None)[:80]
