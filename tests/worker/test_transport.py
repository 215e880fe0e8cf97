"""What a worker's Redis transport does that kombu's does not."""

import contextlib
import gc
import logging
import weakref

import kombu
import pytest
from kombu.asynchronous import Hub

from worker import transport


@contextlib.contextmanager
def unacknowledged(valkey_url, name):
    """A channel of this transport, and a message that it has handed out."""
    with kombu.Connection(valkey_url, transport=transport.Transport) as connection:
        channel = connection.channel()
        queue = kombu.Queue(name, channel=channel, durable=False)
        queue.declare()
        kombu.Producer(channel).publish({"x": 1}, routing_key=name)
        yield channel, queue.get(no_ack=False)


@pytest.mark.parametrize("lost", ["the channel's connection", "the connection's address"])
@pytest.mark.parametrize("act", ["ack", "reject", "requeue"])
def test_a_message_of_a_lost_connection_is_acknowledged_late_without_harm(valkey_url, lost, act):
    with unacknowledged(valkey_url, "late") as (channel, message):
        held = channel.connection
        client, pool = held.client, channel._pool
        channel._pool = None
        if lost == "the channel's connection":
            channel.connection = None
        else:
            held.client = None
        logger, errors = logging.getLogger(__name__), client.connection_errors
        if act == "ack":  # as Celery does it, once a job has ended
            message.ack_log_error(logger, errors)
        else:
            message.reject_log_error(logger, errors, requeue=act == "requeue")
        assert message.acknowledged
        held.client, channel.connection, channel._pool = client, held, pool
        # Redis still has it for whoever restores what nobody acknowledged
        assert channel.client.hlen(channel.qos.unacked_key) == 1
        channel.client.delete(channel.qos.unacked_key, channel.qos.unacked_index_key)


def test_a_channel_of_a_lost_connection_closes_with_a_message_unacknowledged(valkey_url):
    with unacknowledged(valkey_url, "lost") as (channel, message):
        assert message.payload == {"x": 1}
        lost = channel.connection
        client, lost.client, channel._pool = lost.client, None, None  # as kombu leaves them
        channel.close()
        lost.client = client


def test_the_background_is_left_in_redis_while_it_is_not_wanted(valkey_url, monkeypatch):
    wanted = []
    monkeypatch.setattr(transport.Transport, "takes_background", lambda: bool(wanted))
    got = []
    with kombu.Connection(valkey_url, transport=transport.Transport) as connection:
        channel = connection.channel()
        queue = kombu.Queue("lanes", channel=channel, durable=False)
        queue.declare()
        producer = kombu.Producer(channel)
        for priority in (9, 9, 0):
            producer.publish({"p": priority}, routing_key="lanes", priority=priority)

        def take(body, message) -> None:
            got.append(body["p"])
            message.ack()

        with kombu.Consumer(channel, [queue], callbacks=[take]):
            with contextlib.suppress(TimeoutError):
                while True:
                    connection.drain_events(timeout=1)
            assert got == [0]
            wanted.append(True)
            while len(got) < 3:
                connection.drain_events(timeout=5)
    assert got == [0, 9, 9]


def test_a_connection_that_was_lost_leaves_nothing_in_the_event_loop(valkey_url, monkeypatch):
    monkeypatch.setattr(transport.Transport, "_in_loop", None)
    hub, seen, timers = Hub(), [], []
    for _ in range(4):
        connection = kombu.Connection(valkey_url, transport=transport.Transport)
        made = connection.transport
        made.register_with_event_loop(connection.connection, hub)
        connection.channel().client.ping()
        seen.append(weakref.ref(made.cycle))
        timers.append(sum(not each.entry.canceled for each in hub.timer.queue))
        connection.collect()  # as Celery does with one that it has lost
    held = hub.timer._queue
    held[:] = [each for each in held if not each.entry.canceled]  # as when they are due
    del connection, made
    gc.collect()
    assert [cycle() is not None for cycle in seen] == [False, False, False, True]
    assert timers == [timers[0]] * 4
    assert len(hub.on_tick) == 1
    hub.close()
