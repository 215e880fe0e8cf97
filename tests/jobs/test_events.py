"""Hints over Redis: told when someone listens, lost without harm."""

import asyncio
import threading
import time
from contextlib import aclosing

import pytest

from cli.servers import Valkey
from jobs.events import Channel, Publisher, Subscription, listen
from jobs.settings import Settings


def until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def subscribers(publisher, settings, channel):
    name = f"{settings.key_prefix}{channel}"
    return dict(publisher._redis.pubsub_numsub(name))[name]


def test_a_subscription_hears_the_ids_of_its_channel(valkey_url):
    settings = Settings(redis_url=valkey_url)
    publisher = Publisher(settings)
    subscription = Subscription(settings, Channel.CANCELLED)
    assert subscription.wait(0.01) == []
    until(lambda: subscribers(publisher, settings, Channel.CANCELLED))
    assert publisher.publish(Channel.ENDED, ["job_0"])
    assert publisher.publish(Channel.CANCELLED, ["job_1", "job_2"])
    heard = []
    until(lambda: heard.extend(subscription.wait(0.1)) or heard)
    assert heard == ["job_1", "job_2"]
    assert subscription.wait(0.01) == []
    subscription.close()
    publisher.close()


def test_nothing_is_sent_for_no_ids(valkey_url):
    settings = Settings(redis_url=valkey_url)
    publisher = Publisher(settings)
    before = publisher._redis.info("commandstats").get("cmdstat_publish", {"calls": 0})["calls"]
    assert publisher.publish(Channel.ENDED, [])
    after = publisher._redis.info("commandstats").get("cmdstat_publish", {"calls": 0})["calls"]
    assert before == after
    publisher.close()


def test_redis_away_loses_hints_quickly_and_a_subscription_comes_back(tmp_path):
    with Valkey(tmp_path, persist=False) as server:
        settings = Settings(redis_url=server.url)
        publisher = Publisher(settings)
        subscription = Subscription(settings, Channel.CANCELLED)
        subscription.wait(0.01)
        server.kill()
        started = time.monotonic()
        assert publisher.publish(Channel.CANCELLED, ["job_1"]) is False
        assert subscription.wait(0.5) == []
        assert subscription.wait(0.01) == []
        assert time.monotonic() - started < 5
        server.start()
        heard = []
        stop = threading.Event()

        def repeat():
            while not stop.wait(0.05):
                publisher.publish(Channel.CANCELLED, ["job_2"])

        thread = threading.Thread(target=repeat)
        thread.start()
        until(lambda: heard.extend(subscription.wait(0.1)) or heard)
        stop.set()
        thread.join()
        assert set(heard) == {"job_2"}
        subscription.close()
        publisher.close()


def test_an_event_loop_listens_and_is_told_when_it_may_have_missed_something(tmp_path):
    async def run(server):
        settings = Settings(redis_url=server.url)
        publisher = Publisher(settings)
        async with aclosing(listen(settings, Channel.ENDED)) as hints:
            assert await anext(hints) == []
            await asyncio.to_thread(publisher.publish, Channel.ENDED, ["job_1", "job_2"])
            assert await anext(hints) == ["job_1", "job_2"]
            server.kill()
            server.start()
            assert await anext(hints) == [], "connected anew: look at the rows"
            await asyncio.to_thread(publisher.publish, Channel.ENDED, ["job_3"])
            assert await anext(hints) == ["job_3"]
        publisher.close()

    with Valkey(tmp_path, persist=False) as server:
        asyncio.run(asyncio.wait_for(run(server), timeout=30))


NO_IDS = {
    "not UTF-8": b"\xff\xfe",
    "half a character": b"job_1 \xc3",
    "UTF-8 that no id holds": "job_é".encode(),
    "nothing": b"",
    "white space": b" \r\n\t ",
    "NUL": b"\x00",
    "Redis' own protocol": b"*1\r\n$4\r\nPING\r\n",
    "much": b"\xff" * 2**20,
}


@pytest.mark.parametrize("content", NO_IDS.values(), ids=NO_IDS)
def test_whatever_is_published_a_subscription_goes_on_hearing(valkey_url, content):
    settings = Settings(redis_url=valkey_url)
    publisher = Publisher(settings)
    subscription = Subscription(settings, Channel.CANCELLED)
    subscription.wait(0.01)
    until(lambda: subscribers(publisher, settings, Channel.CANCELLED))
    publisher._redis.publish(f"{settings.key_prefix}{Channel.CANCELLED}", content)
    publisher.publish(Channel.CANCELLED, ["job_1"])
    heard = []
    until(lambda: heard.extend(subscription.wait(0.1)) or "job_1" in heard)
    subscription.close()
    publisher.close()


@pytest.mark.parametrize("content", NO_IDS.values(), ids=NO_IDS)
def test_whatever_is_published_an_event_loop_goes_on_listening(valkey_url, content):
    async def run():
        settings = Settings(redis_url=valkey_url)
        publisher = Publisher(settings)
        async with aclosing(listen(settings, Channel.ENDED)) as hints:
            assert await anext(hints) == []
            name = f"{settings.key_prefix}{Channel.ENDED}"
            await asyncio.to_thread(publisher._redis.publish, name, content)
            await asyncio.to_thread(publisher.publish, Channel.ENDED, ["job_1"])
            heard = []
            while "job_1" not in heard:
                ids = await anext(hints)
                assert ids, "an empty list says that the connection is new"
                heard += ids
        publisher.close()

    asyncio.run(asyncio.wait_for(run(), timeout=30))


def test_what_is_no_id_is_logged_without_what_it_says(valkey_url, caplog):
    settings = Settings(redis_url=valkey_url)
    publisher = Publisher(settings)
    subscription = Subscription(settings, Channel.CANCELLED)
    subscription.wait(0.01)
    until(lambda: subscribers(publisher, settings, Channel.CANCELLED))
    publisher._redis.publish(f"{settings.key_prefix}{Channel.CANCELLED}", b"\xff\xfe")
    until(lambda: subscription.wait(0.1) or caplog.messages)
    assert caplog.messages == ["hint ignored: channel=b'tokenmill:cancelled' bytes=2 are no ids"]
    subscription.close()
    publisher.close()
