"""Events and their deliveries: none lost, none made twice, tried until they are over."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from jobs import store, tenants, webhooks
from jobs.tenants import Quotas
from jobs.webhooks import BACKOFF_S, IN_HANDS_S, TENANT_IN_HANDS, UnknownWebhook, WebhookError
from tests.jobs.conftest import MODEL, NOW, new_job
from tests.jobs.test_claims import success

ALL = [str(each) for each in webhooks.EventType]


def endpoint(bench, tenant="acme", event_types=ALL):
    return bench.call(
        webhooks.create_endpoint, tenant, name="shop", url="https://shop.example/hooks",
        event_types=event_types, now=NOW,
    )  # fmt: skip


def response(**body):
    body = {"model": MODEL, "input": "hi", "background": True} | body
    return new_job(url="/v1/responses", body=body)


def sent(bench, hook):
    found = bench.call(webhooks.list_deliveries, hook.tenant_id, hook.id, limit=100)
    return [(each.event_type, json.loads(each.payload)["data"]["id"]) for each in found]


def test_each_end_of_a_background_response_is_one_event(bench):
    hook = endpoint(bench)
    endings = {
        "response.completed": {"output": {"status": "completed"}},
        "response.incomplete": {"output": {"status": "incomplete"}},
    }
    bench.register()
    expected = set()
    for event_type, result in endings.items():
        job = response()
        bench.submit(job, tenant="acme")
        bench.finish([success(bench.claim(job.id)[0], **result)], now=NOW + 1)
        expected.add((event_type, "resp_" + job.id.removeprefix("job_")))
    gone = response()
    bench.submit(gone, tenant="acme")
    bench.call(store.cancel, gone.id, tenant="acme", now=NOW + 1)
    expected.add(("response.cancelled", "resp_" + gone.id.removeprefix("job_")))
    waiting, waited_for, plain = response(), response(background=False), new_job()
    bench.submit(waiting, waited_for, plain, tenant="acme")
    for each in (waited_for, plain):
        bench.call(store.cancel, each.id, tenant="acme", now=NOW + 1)
    assert bench.call(webhooks.announce, NOW + 2) == 4
    assert set(sent(bench, hook)) == expected
    assert bench.call(webhooks.announce, NOW + 3) == 0
    assert len(sent(bench, hook)) == 3


def test_an_event_goes_to_those_of_its_tenant_who_ask_for_its_type(bench):
    ours, other_type = endpoint(bench), endpoint(bench, event_types=["batch.failed"])
    theirs = endpoint(bench, tenant="globex")
    deliveries = bench.call(webhooks.record, "acme", "batch.completed", "batch_1", now=NOW)
    assert [each.endpoint_id for each in deliveries] == [ours.id]
    assert sent(bench, ours) == [("batch.completed", "batch_1")]
    assert sent(bench, other_type) == sent(bench, theirs) == []


def test_it_is_tried_again_later_and_later_and_then_given_up(bench):
    hook = endpoint(bench)
    bench.call(webhooks.record, "acme", "batch.completed", "batch_1", now=NOW)
    now, waits = NOW, []
    while due := bench.call(webhooks.take_due, now):
        [each] = due
        assert bench.call(webhooks.take_due, now + IN_HANDS_S - 1) == []
        bench.call(webhooks.settle, each.delivery, status_code=500, error="status 500", now=now)
        [seen] = bench.call(webhooks.list_deliveries, "acme", hook.id, limit=1)
        if seen.next_try_at is None:
            break
        waits.append(round(seen.next_try_at - now))
        now = seen.next_try_at
    assert waits == list(BACKOFF_S)
    assert 5.5 * 3600 < sum(waits) < 6.5 * 3600
    assert (seen.num_tries, seen.status_code, seen.delivered_at) == (len(BACKOFF_S) + 1, 500, None)
    again = bench.call(webhooks.redeliver, "acme", hook.id, seen.id, now=now)
    assert again.event_id == seen.event_id
    [each] = bench.call(webhooks.take_due, now)
    bench.call(webhooks.settle, each.delivery, status_code=204, error=None, now=now)
    [seen] = bench.call(webhooks.list_deliveries, "acme", hook.id, limit=1)
    assert (seen.delivered_at, seen.next_try_at) == (now, None)


def test_a_delivery_of_a_sweeper_that_died_is_due_again(bench):
    endpoint(bench)
    bench.call(webhooks.record, "acme", "batch.completed", "batch_1", now=NOW)
    [first] = bench.call(webhooks.take_due, NOW)
    [second] = bench.call(webhooks.take_due, NOW + IN_HANDS_S)
    assert second.delivery.event_id == first.delivery.event_id
    # the first was only slow: what it says then changes nothing
    bench.call(webhooks.settle, first.delivery, status_code=200, error=None, now=NOW + 200)
    assert bench.call(webhooks.take_due, NOW + IN_HANDS_S + 1) == []
    assert len(bench.call(webhooks.take_due, NOW + 2 * IN_HANDS_S)) == 1


def test_a_tenant_with_many_deliveries_holds_up_no_other(bench):
    endpoint(bench), endpoint(bench, tenant="globex")
    for number in range(10):
        bench.call(webhooks.record, "acme", "batch.failed", f"batch_{number}", now=NOW)
    bench.call(webhooks.record, "globex", "batch.failed", "batch_g", now=NOW + 1)

    def taken(**held):
        due = bench.call(webhooks.take_due, NOW + 2, room=8, in_hands=held)
        return [each.delivery.tenant_id for each in due]

    assert taken(acme=TENANT_IN_HANDS, globex=TENANT_IN_HANDS) == []
    [first] = bench.call(webhooks.take_due, NOW + 2, room=1, in_hands={"acme": 1})
    assert first.delivery.tenant_id == "globex"
    assert taken(acme=1) == ["acme"] * (TENANT_IN_HANDS - 1)
    assert taken() == ["acme"] * TENANT_IN_HANDS
    assert taken() == ["acme"] * (10 - 2 * TENANT_IN_HANDS + 1)


def test_another_tenants_endpoint_is_not_there(bench):
    hook = endpoint(bench)
    [delivery] = bench.call(webhooks.record, "acme", "batch.failed", "batch_1", now=NOW)
    for call in (
        lambda tenant: bench.call(webhooks.get_endpoint, tenant, hook.id),
        lambda tenant: bench.call(webhooks.change_endpoint, tenant, hook.id, {"name": "x"}),
        lambda tenant: bench.call(webhooks.list_deliveries, tenant, hook.id, limit=1),
        lambda tenant: bench.call(webhooks.redeliver, tenant, hook.id, delivery.id, now=NOW),
        lambda tenant: bench.call(webhooks.delete_endpoint, tenant, hook.id),
    ):
        with pytest.raises(UnknownWebhook):
            call("globex")
    assert bench.call(webhooks.list_endpoints, "globex") == []
    assert bench.call(webhooks.get_endpoint, "acme", hook.id) == hook
    bench.call(webhooks.delete_endpoint, "acme", hook.id)
    assert bench.call(webhooks.take_due, NOW) == []


def test_of_many_endpoints_at_once_as_many_are_made_as_may_be(bench, monkeypatch):
    monkeypatch.setattr(webhooks, "MAX_ENDPOINTS", 5)
    bench.call(tenants.create, "acme", Quotas(), now=NOW)

    def one(_):
        try:
            return endpoint(bench)
        except WebhookError:
            return None

    with ThreadPoolExecutor(20) as threads:
        made = list(threads.map(one, range(20)))
    assert made.count(None) == 15
    assert len(bench.call(webhooks.list_endpoints, "acme")) == 5


def test_there_is_a_bound_on_endpoints(bench, monkeypatch):
    monkeypatch.setattr(webhooks, "MAX_ENDPOINTS", 1)
    endpoint(bench)
    with pytest.raises(WebhookError, match="at most 1"):
        endpoint(bench)
    endpoint(bench, tenant="globex")
