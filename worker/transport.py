"""kombu's Redis transport, for a consumer that lives on a queue others can write to.

As kombu has it, an element of the list that is no message (not JSON, no object, a body that cannot
be decoded) raises in the consumer's event loop and ends the worker. Here it is logged, counted and
passed over; it was popped, so it does not come again. What raises once a message is delivered is
not touched.
"""

import logging
from typing import Any

from kombu.transport import redis

logger = logging.getLogger(__name__)


class Channel(redis.Channel):
    def _brpop_read(self, **options: Any) -> Any:
        transport = self.connection
        assert isinstance(transport, Transport)
        transport.delivering = False
        try:
            return super()._brpop_read(**options)  # type: ignore[misc]
        except ValueError as error:  # json's, and what decoding bytes to text raises
            if transport.delivering:
                raise
            transport.drop(type(error).__name__)
            return False


class Transport(redis.Transport):
    Channel = Channel
    delivering = False  # the element was JSON; what fails from here on is not its syntax
    num_dropped = 0

    def _deliver(self, message: Any, queue: str | None) -> None:
        self.delivering = True
        if fault := self._fault_of(message):
            self.drop(fault)
            return
        super()._deliver(message, queue)

    def drop(self, fault: str) -> None:
        self.num_dropped += 1
        logger.warning("element of a queue dropped, it is no message: fault=%s", fault)

    def _fault_of(self, message: Any) -> str | None:
        """Why kombu's own reading of a message would raise; None when it would not."""
        if not isinstance(message, dict):
            return type(message).__name__
        channel = next(iter(self.channels or ()), None)
        try:
            if channel is not None:
                channel.Message(message, channel=channel)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            return type(error).__name__
        return None
