"""Rows that are the same are run once, if asked: the others take what the first came to."""

import json

import pytest
from sqlalchemy import select, text

from jobs import batch_progress, store
from jobs.lifecycle import JobState
from jobs.models import jobs
from tests.worker.batch_shop import TENANT, Shop, row
from worker import batch_keeper
from worker.batch_reader import sameness


def same(i: int, kind: int, **body) -> bytes:
    return row(i, **{"prompt": f"kind {kind}", "seed": 7} | body)


def data(num: int, kinds: int) -> bytes:
    return b"".join(same(i, i % kinds) for i in range(num))


def answers(shop: Shop, batch_id: str) -> dict[int, object]:
    """By row: its text, or the code of its error."""
    batch = shop.get(batch_id)
    assert batch.closed_at is not None
    found: dict[int, object] = {}
    for file_id in (batch.output_file_id, batch.error_file_id):
        numbers = [int(line["custom_id"][4:]) for line in shop.lines(file_id)]
        assert numbers == sorted(set(numbers) - found.keys())
        for line in shop.lines(file_id):
            reply = (line["response"] or {}).get("body", line)
            said = reply["text"] if "text" in reply else reply["error"]["code"]
            found[int(line["custom_id"][4:])] = said
    assert sorted(found) == list(range(batch.num_rows))
    return found


def waiting(shop: Shop, batch_id: str) -> int:
    return sum(each.state == JobState.QUEUED for each in shop.rows(batch_id))


def test_each_kind_is_run_once_and_counted_as_saved(shop):
    batch_id = shop.create(data(1000, 10), dedupe=True)
    shop.turn()
    batch = shop.get(batch_id)
    assert (batch.num_rows, batch.num_same, batch.num_inserted) == (1000, 990, 10)
    assert batch.progress["rows"]["waiting"] == 990
    assert shop.run(batch_id, num=4) == 4
    shop.turn()
    assert shop.run(batch_id) == 6
    shop.turn()
    batch = shop.get(batch_id)
    assert (batch.state, batch.num_completed) == ("completed", 1000)
    assert answers(shop, batch_id) == {i: f"kind {i % 10}" for i in range(1000)}
    assert batch.progress["saved"] == {"rows": 990, "tokens": 990 * 5}
    assert batch.usage == {"prompt_tokens": 30, "cached_tokens": 0, "completion_tokens": 20}
    with shop.database.read() as connection:
        saved = connection.scalars(select(jobs.c.saved_tokens).order_by(jobs.c.row_number)).all()
    assert saved == [None] * 10 + [5] * 990


def test_only_what_comes_out_the_same_each_time_is_the_same(shop):
    rows = [
        same(0, 0), same(1, 0, seed=8), same(2, 0, max_tokens=5), row(3, prompt="x"),
        row(4, prompt="x"), row(5, prompt="y", temperature=0), row(6, prompt="y", temperature=0.0),
        row(7, prompt="y", temperature=0, seed=3), same(8, 0),
    ]  # fmt: skip
    batch_id = shop.create(b"".join(rows), dedupe=True)
    shop.turn()
    # 0 and 0.0 are written in two ways; a greedy row's seed says nothing
    assert shop.get(batch_id).num_same == 2
    plain = shop.create(b"".join(rows))
    shop.turn()
    assert (shop.get(plain).num_same, shop.get(plain).num_inserted) == (0, 9)


def test_the_order_of_a_body_s_keys_says_nothing():
    one = b'{"custom_id": "a", "url": "u", "body": {"model": "m", "seed": 1, "prompt": "x"}}'
    other = b'{"body":{"prompt":"x","model":"m","seed":1},"url":"u","custom_id":"b"}'
    assert sameness(one) == sameness(other) is not None
    assert sameness(one.replace(b'"seed": 1', b'"seed": true')) is None
    big = 2**70
    assert sameness(one.replace(b": 1,", b": %d," % big)) != sameness(
        one.replace(b": 1,", b": %d," % (big + 1))
    )


def test_when_the_first_fails_the_next_is_tried(shop):
    batch_id = shop.create(data(6, 1), dedupe=True)
    shop.turn()
    fail(shop, batch_id, "engine_error")
    shop.turn()
    assert waiting(shop, batch_id) == 1
    assert shop.get(batch_id).closed_at is None
    shop.run(batch_id)
    shop.turn()
    expected = {0: "engine_error"} | dict.fromkeys(range(1, 6), "kind 0")
    assert answers(shop, batch_id) == expected
    assert shop.get(batch_id).progress["saved"] == {"rows": 4, "tokens": 20}


@pytest.mark.parametrize("code", ["poisoned", "exceeds_capacity"])
def test_what_would_fail_again_is_not_tried_again(shop, code):
    batch_id = shop.create(data(5, 1), dedupe=True)
    shop.turn()
    fail(shop, batch_id, code)
    shop.turn()
    assert answers(shop, batch_id) == dict.fromkeys(range(5), code)


def fail(shop: Shop, batch_id: str, code: str) -> None:
    kind = "invalid_request_error" if code == "exceeds_capacity" else "server_error"
    shop.run(batch_id, num=1, state=JobState.FAILED)
    with shop.database.begin() as connection:
        error = json.dumps({"message": "no", "type": kind, "param": None, "code": code})
        connection.execute(
            jobs.update().where(jobs.c.state == JobState.FAILED).values(
                error=error.replace(" ", ""))
        )  # fmt: skip


def test_a_row_that_was_cancelled_or_deleted_is_no_result(shop):
    batch_id = shop.create(data(9, 3), dedupe=True)
    shop.turn()
    first, second = (each.id for each in shop.rows(batch_id)[:2])
    shop.call(store.cancel, first, tenant=TENANT, now=shop.now)
    shop.turn()
    assert waiting(shop, batch_id) == 3  # row 3 has taken its place
    shop.run(batch_id)
    shop.turn()
    expected = {i: f"kind {i % 3}" for i in range(9)} | {0: "batch_cancelled"}
    assert answers(shop, batch_id) == expected
    assert second


@pytest.mark.parametrize("body", [{"max_tokens": "x"}, {"unheard_of": 1}])
def test_a_body_that_is_refused_is_refused_each_time(shop, body):
    lines = [same(i, 0, **body) for i in range(3)] + [same(3, 0)]
    batch_id = shop.create(b"".join(lines), dedupe=True)
    shop.turn()
    shop.run(batch_id)
    shop.turn()
    refused = dict.fromkeys(range(3), "invalid_request")
    assert answers(shop, batch_id) == refused | {3: "kind 0"}


def test_a_line_that_only_looks_like_one_that_was_refused_is_run(shop):
    twice = same(0, 0).replace(b'"seed": 7', b'"seed": 8, "seed": 7')
    batch_id = shop.create(twice + same(1, 0) + same(2, 0), dedupe=True)
    shop.turn()
    assert shop.run(batch_id) == 1
    shop.turn()
    assert answers(shop, batch_id) == {0: "invalid_request", 1: "kind 0", 2: "kind 0"}


@pytest.mark.parametrize("num_done", [0, 3, 10])
def test_what_is_done_when_it_is_cancelled_is_shared_and_no_more(shop, num_done):
    batch_id = shop.create(data(100, 10), dedupe=True)
    shop.turn()
    shop.run(batch_id, num=num_done)
    shop.cancel(batch_id)
    shop.turn()
    batch = shop.get(batch_id)
    assert (batch.state, batch.num_inserted) == ("cancelled", 100)
    assert answers(shop, batch_id) == {
        i: f"kind {i % 10}" if i % 10 < num_done else "batch_cancelled" for i in range(100)
    }


@pytest.mark.parametrize("turns", [*range(12)])
def test_another_keeper_goes_on_wherever_one_stopped(shop, turns, monkeypatch):
    monkeypatch.setattr(batch_keeper, "COPIES", 7)
    monkeypatch.setattr(batch_keeper, "ROWS", 4)
    batch_id = shop.create(data(60, 6), dedupe=True)
    shop.turn()
    shop.run(batch_id, num=4)
    for _ in range(turns):
        shop.keeper.round()
    shop.keeper.let_go()
    shop.keeper = shop.another_keeper()
    shop.turn()
    shop.run(batch_id)
    shop.turn()
    assert answers(shop, batch_id) == {i: f"kind {i % 6}" for i in range(60)}
    assert shop.get(batch_id).progress["saved"]["rows"] == 54
    with shop.database.read() as connection:
        ids = connection.scalars(select(jobs.c.id)).all()
    assert len(set(ids)) == 60


def test_ids_in_an_answer_are_those_of_its_own_row(shop):
    batch_id = shop.create(data(2, 1), dedupe=True)
    shop.turn()
    shop.run(batch_id)
    with shop.database.begin() as connection:
        connection.execute(
            text("UPDATE jobs SET output = '{\"id\":\"cmpl-' || substr(id, 5) || '\"}'")
        )
    shop.turn()
    records = shop.rows(batch_id)
    assert [each.output["id"][5:] for each in records] == [each.id[4:] for each in records]


def test_copies_cost_nothing_when_it_is_guessed_what_is_left(shop):
    batch_id = shop.create(data(1000, 40), dedupe=True)
    shop.turn()
    shop.run(batch_id, num=20)
    shop.turn()
    with shop.database.read() as connection:
        batch = shop.get(batch_id)
        now = batch.in_progress_at + 100
        found = batch_progress.progress(connection, batch, now=now)
    assert found.eta.s == pytest.approx(100, rel=0.35)
