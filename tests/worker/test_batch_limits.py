"""A batch comes to its limits while its file is still read, too; a page of it is read quickly."""

from dataclasses import replace

import pytest
from sqlalchemy import text

from jobs import batches
from jobs.batch_record import BatchState
from jobs.database import Database
from jobs.lifecycle import JobState
from tests.worker.batch_shop import TENANT, Shop, data
from worker import batch_keeper


def half_read(shop: Shop, monkeypatch, **limits) -> str:
    """A batch of 300 rows, of which 40 are in the queue."""
    monkeypatch.setattr(batch_keeper, "ROWS", 10)
    monkeypatch.setattr(batch_keeper, "LIMITS_EVERY_S", 0.0)
    monkeypatch.setattr(batch_keeper, "LIMITS_SHARE", 0)
    batch_id = shop.create(data(300), **limits)
    while shop.get(batch_id).num_inserted < 40:
        shop.keeper.round()
    return batch_id


@pytest.mark.parametrize(
    ("limits", "state", "reason"),
    [
        ({"token_budget": 150}, JobState.SUCCEEDED, "token_budget"),
        ({"max_error_rate": 0.5}, JobState.FAILED, "error_rate"),
    ],
)
def test_a_limit_is_seen_while_rows_come_in(shop, monkeypatch, limits, state, reason):
    batch_id = half_read(shop, monkeypatch, **limits)
    assert shop.run(batch_id, state=state) == 40
    shop.keeper.round()
    stopped = shop.get(batch_id)
    assert (stopped.state, stopped.stop_reason) == (BatchState.CANCELLING, reason)
    assert stopped.num_inserted == 40
    shop.turn()
    batch = shop.get(batch_id)
    assert (batch.state, batch.num_inserted) == ("cancelled", 300)
    assert batch.num_completed + batch.num_failed == 300
    errors = shop.lines(batch.error_file_id)
    codes = [line["error"]["code"] for line in errors if line["error"]]
    assert codes == ["batch_stopped"] * 260


def test_its_time_is_over_while_rows_come_in(shop, monkeypatch):
    batch_id = half_read(shop, monkeypatch)
    shop.run(batch_id, num=25)
    clock = Database.clock
    monkeypatch.setattr(Database, "clock", lambda self, connection: clock(self, connection) + 1e5)
    shop.keeper.round()
    shop.keeper.round()
    assert shop.get(batch_id).ending == BatchState.EXPIRED
    assert shop.get(batch_id).num_inserted < 100
    shop.turn()
    batch = shop.get(batch_id)
    assert (batch.state, batch.num_completed, batch.num_failed) == ("expired", 25, 275)


def test_a_limit_that_is_not_reached_stops_nothing(shop, monkeypatch):
    batch_id = half_read(shop, monkeypatch, token_budget=10_000, max_error_rate=0.5)
    shop.run(batch_id)
    shop.turn()
    assert shop.get(batch_id).num_inserted == 300
    shop.run(batch_id)
    shop.turn()
    assert (shop.get(batch_id).state, shop.get(batch_id).num_completed) == ("completed", 300)


@pytest.mark.parametrize("shop", ["postgres"], indirect=True)
def test_a_page_of_a_new_large_batch_is_read_without_a_look_at_all_its_rows(shop):
    """PostgreSQL plans by the size the table had when it was counted last."""
    shop.keeper.settings = replace(shop.settings, max_batch_rows=20_000)
    batch_id = shop.create(data(11_000))
    shop.turn()
    assert shop.get(batch_id).num_inserted == 11_000
    with shop.database.begin() as connection:
        plan = connection.execute(
            text(
                "EXPLAIN SELECT id FROM jobs WHERE batch_id = :batch AND tenant_id = :tenant"
                " AND row_number > 500 ORDER BY row_number LIMIT 200"
            ),
            {"batch": batch_id, "tenant": TENANT},
        )
        words = "\n".join(line[0] for line in plan)
    assert "jobs_row " in words
    assert "Sort" not in words
    rows = shop.call(batches.rows_after, batch_id, tenant=TENANT, after=500, limit=2)
    assert [each.row_number for each in rows] == [501, 502]
