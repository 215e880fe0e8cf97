"""What a worker's Redis transport does that kombu's does not."""

import kombu

from worker import transport


def test_a_channel_of_a_lost_connection_closes_with_a_message_unacknowledged(valkey_url):
    with kombu.Connection(valkey_url, transport=transport.Transport) as connection:
        channel = connection.channel()
        queue = kombu.Queue("lost", channel=channel, durable=False)
        queue.declare()
        kombu.Producer(channel).publish({"x": 1}, routing_key="lost")
        message = queue.get(no_ack=False)
        assert message.payload == {"x": 1}
        lost = channel.connection
        client, lost.client, channel._pool = lost.client, None, None  # as kombu leaves them
        channel.close()
        lost.client = client
