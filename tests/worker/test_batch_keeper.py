"""Batches from file to files: the test's own hands run the rows.

On PostgreSQL when asked (-m long): tests/api/test_batches.py goes the same way on both each time.
"""

import json

import pytest
from sqlalchemy import update

from jobs import batch_progress, batches, claims, files, finishing, webhooks
from jobs.batch_record import StopReason
from jobs.batches import LostBatch
from jobs.claims import Held
from jobs.finishing import JobResult
from jobs.lifecycle import JobState
from jobs.models import batches as batches_table
from jobs.models import tenants
from tests.worker.batch_shop import TENANT, data, row
from worker import batch_closer, batch_keeper


def assert_closed(shop, batch_id, num, state="completed"):
    """Results + errors = inputs, in order, and counted."""
    batch = shop.get(batch_id)
    assert (batch.state, batch.closed_at is not None) == (state, True)
    output, errors = shop.lines(batch.output_file_id), shop.lines(batch.error_file_id)
    assert (len(output), len(errors)) == (batch.num_completed, batch.num_failed)
    numbers = [[int(each["custom_id"][4:]) for each in part] for part in (output, errors)]
    assert numbers == [sorted(part) for part in numbers]
    assert sorted(numbers[0] + numbers[1]) == list(range(num))
    for each in output:
        assert each["response"]["body"]["text"] == f"prompt {each['custom_id'][4:]}"
        assert (each["response"]["status_code"], each["error"]) == (200, None)
    kept = {batch.output_file_id, batch.error_file_id, batch.input_file_id} - {None}
    assert set(shop.files()) == kept
    return output, errors


def test_rows_run_and_come_back_in_the_order_of_the_file(shop):
    batch_id = shop.create(data(1234))
    assert shop.get(batch_id).state == "validating"
    shop.turn()
    batch = shop.get(batch_id)
    assert (batch.state, batch.num_rows, batch.model) == ("in_progress", 1234, "tiny")
    assert [each.row_number for each in shop.rows(batch_id)] == list(range(1234))
    shop.run(batch_id, first=600, num=100)
    shop.run(batch_id, num=300, state=JobState.FAILED)
    batch = shop.get(batch_id)
    assert (batch.num_completed, batch.num_failed) == (100, 300)
    shop.turn()
    assert shop.get(batch_id).state == "in_progress"
    shop.run(batch_id)
    shop.turn()
    _, errors = assert_closed(shop, batch_id, 1234)
    assert len(errors) == 300
    assert errors[0]["error"] is None
    assert errors[0]["response"]["status_code"] == 500
    assert errors[0]["response"]["body"]["error"]["code"] == "poisoned"
    batch = shop.get(batch_id)
    assert batch.usage == {"prompt_tokens": 3702, "cached_tokens": 0, "completion_tokens": 1868}
    output = shop.call(files.get, batch.output_file_id, tenant=TENANT, now=shop.now)
    assert output.purpose == "batch_output"
    assert output.bytes == len((shop.store.folder / output.id).read_bytes())


def test_a_bad_body_is_an_error_line_and_all_bad_is_still_completed(shop):
    batch_id = shop.create(row(0, temperature="hot") + row(1, colour="red"))
    shop.turn()
    output, errors = assert_closed(shop, batch_id, 2)
    assert output == []
    assert [each["response"]["status_code"] for each in errors] == [400, 400]
    assert errors[1]["response"]["body"]["error"]["param"] == "colour"
    batch = shop.get(batch_id)
    assert (batch.output_file_id, batch.num_failed) == (None, 2)


def test_a_file_that_is_no_batch_fails_it_and_runs_nothing(shop):
    batch_id = shop.create(data(700) + b"{\n" + row(9999))
    shop.turn()
    batch = shop.get(batch_id)
    assert (batch.state, batch.num_rows) == ("failed", 0)
    assert [(each["code"], each["line"]) for each in batch.errors] == [("invalid_json_line", 701)]
    assert shop.rows(batch_id) == []
    assert batch.output_file_id is batch.error_file_id is None


@pytest.mark.parametrize("num_done", [0, 150, 299, 300])
def test_cancelled_when_so_many_are_done(shop, num_done):
    batch_id = shop.create(data(300))
    shop.turn()
    shop.run(batch_id, num=num_done)
    before = shop.cancel(batch_id)
    assert before.state == "cancelling"
    assert shop.cancel(batch_id).cancelling_at == before.cancelling_at
    shop.turn()
    output, errors = assert_closed(shop, batch_id, 300, "cancelled")
    assert len(output) == num_done
    assert {each["error"]["code"] for each in errors} <= {"batch_cancelled"}
    closed = shop.get(batch_id)
    assert shop.cancel(batch_id) == closed
    shop.turn()
    assert shop.get(batch_id) == closed


def test_cancelled_before_and_while_its_file_is_read(shop):
    early = shop.create(data(10))
    shop.cancel(early)
    shop.turn()
    batch = shop.get(early)
    assert (batch.state, batch.num_rows, batch.output_file_id) == ("cancelled", 0, None)
    shop.store.remove(batch.input_file_id)

    batch_id = shop.create(data(1300))
    while shop.get(batch_id).num_inserted == 0:
        shop.keeper.round()
    assert shop.get(batch_id).num_inserted == batch_keeper.ROWS
    shop.run(batch_id, num=20)
    shop.cancel(batch_id)
    shop.turn()
    output, errors = assert_closed(shop, batch_id, 1300, "cancelled")
    assert (len(output), len(errors)) == (20, 1280)


def test_a_running_row_that_is_cancelled_changes_nothing_any_more(shop):
    batch_id = shop.create(data(3))
    shop.turn()
    ids = [each.id for each in shop.rows(batch_id)]
    [job] = shop.call(claims.claim, ids[:1], worker_id="w1", now=shop.now)
    shop.cancel(batch_id)
    shop.turn()
    late = JobResult(id=job.id, fence=job.fence, state=JobState.SUCCEEDED, output={"text": "x"})
    assert shop.call(finishing.finish, [late], now=shop.now) == set()
    output, _ = assert_closed(shop, batch_id, 3, "cancelled")
    assert output == []
    beaten = shop.call(
        claims.beat, "w1", now=shop.now, lease_s=9, stats={}, checkpoints={},
        held=[Held(job.id, job.fence)],
    )  # fmt: skip
    assert beaten.lost == {Held(job.id, job.fence)}


def test_a_cancel_while_the_files_are_built_comes_too_late(shop, monkeypatch):
    monkeypatch.setattr(batch_closer, "ROWS", 10)
    batch_id = shop.create(data(50))
    shop.turn()
    shop.run(batch_id)
    while shop.get(batch_id).state != "finalizing":
        shop.keeper.round()
    shop.keeper.round()
    assert any(name.startswith(".tmp-") for name in shop.files())
    assert shop.cancel(batch_id).state == "finalizing"
    shop.turn()
    assert_closed(shop, batch_id, 50)


def test_what_is_left_when_its_time_is_over_has_expired(shop):
    batch_id = shop.create(data(40))
    shop.turn()
    shop.run(batch_id, num=15)
    shop.call(_age, batch_id)
    shop.turn()
    output, errors = assert_closed(shop, batch_id, 40, "expired")
    assert len(output) == 15
    assert {each["error"]["code"] for each in errors} == {"batch_expired"}
    assert all(each["response"] is None for each in errors)


def _age(connection, batch_id):
    from jobs.models import batches as table

    connection.execute(table.update().where(table.c.id == batch_id).values(expires_at=1.0))


def _orphan(connection):
    """As after the death of whoever has the batches."""
    from jobs.models import batches as table

    connection.execute(table.update().values(keeper_until=1.0))


@pytest.mark.parametrize("turns", [1, 2, 3, 5, 7, 8, 9])
def test_another_keeper_goes_on_wherever_one_stopped(shop, turns, monkeypatch):
    monkeypatch.setattr(batch_keeper, "LINES", 50)
    monkeypatch.setattr(batch_keeper, "ROWS", 40)
    monkeypatch.setattr(batch_closer, "ROWS", 30)
    batch_id = shop.create(data(130))
    for _ in range(turns):
        shop.keeper.round()
        shop.run(batch_id)
    dead = shop.keeper
    shop.call(_orphan)
    shop.keeper = shop.another_keeper()
    for _ in range(30):
        shop.turn()
        shop.run(batch_id)
    if turns > 2:
        dead.round()  # it was only slow
    shop.turn()
    for name in shop.files():  # of the dead one
        if name.startswith(".tmp-"):
            (shop.store.folder / name).unlink()
    dead._works.clear()
    assert_closed(shop, batch_id, 130)


def test_a_keeper_that_was_thought_dead_makes_no_second_file(shop, monkeypatch):
    monkeypatch.setattr(batch_closer, "ROWS", 10)
    batch_id = shop.create(data(25))
    shop.turn()
    shop.run(batch_id)
    [batch] = shop.keeper.write(shop.keeper._take)
    shop.keeper._finalize(batch)
    [batch] = shop.keeper.write(shop.keeper._take)
    work = batch_closer.close(shop.keeper, batch)
    next(work)
    shop.call(_orphan)
    shop.keeper = shop.another_keeper()
    shop.turn()
    assert_closed_with = shop.get(batch_id)
    with pytest.raises(LostBatch):
        list(work)
    assert shop.get(batch_id) == assert_closed_with
    assert_closed(shop, batch_id, 25)


def test_a_batch_that_cannot_be_worked_on_keeps_no_other_waiting(shop, monkeypatch, caplog):
    sick, well = shop.create(data(2)), shop.create(data(3))
    opens = shop.keeper.store.open

    def fails(file_id):
        if file_id == shop.get(sick).input_file_id:
            raise ValueError("a fault of ours")
        return opens(file_id)

    monkeypatch.setattr(shop.keeper.store, "open", fails)
    shop.turn()
    assert shop.get(well).state == "in_progress"
    assert shop.get(sick).state == "validating"
    assert sick in caplog.text
    monkeypatch.undo()
    shop.keeper._resting.clear()
    shop.turn()
    assert shop.get(sick).state == "in_progress"


def test_each_end_is_an_event(shop):
    hook = shop.call(
        webhooks.create_endpoint, TENANT, name="x", url="https://shop.example/",
        event_types=[str(each) for each in webhooks.EventType], now=shop.now,
    )  # fmt: skip
    ends = {}
    ends[shop.create(b"{\n")] = "batch.failed"
    ends[shop.create(row(0, colour=1))] = "batch.completed"
    cancelled, expired = shop.create(data(3)), shop.create(data(3))
    shop.cancel(cancelled)
    shop.call(_age, expired)
    ends |= {cancelled: "batch.cancelled", expired: "batch.expired"}
    shop.turn()
    shop.turn()
    sent = shop.call(webhooks.list_deliveries, TENANT, hook.id, limit=100)
    told = {json.loads(each.payload)["data"]["id"]: each.event_type for each in sent}
    assert (told, len(sent)) == (ends, 4)


def test_rows_count_against_the_quota_of_queued_jobs(shop):
    with shop.database.begin() as connection:
        connection.execute(tenants.insert().values(id=TENANT, created_at=1.0, max_queued_jobs=100))
    first, second, third = (shop.create(data(num)) for num in (60, 41, 40))
    shop.turn()
    assert shop.get(first).state == "in_progress"
    [error] = shop.get(second).errors
    assert error["code"] == "max_queued_jobs"
    assert shop.get(third).state == "in_progress"


def test_a_file_that_is_being_read_stays(shop):
    batch_id = shop.create(data(10))
    file_id = shop.get(batch_id).input_file_id
    with pytest.raises(files.FileInUse):
        shop.call(files.remove, file_id, tenant=TENANT)
    shop.turn()
    shop.call(files.remove, file_id, tenant=TENANT)
    shop.store.remove(file_id)
    gone = shop.create(data(1))
    shop.store.remove(shop.get(gone).input_file_id)
    shop.turn()
    assert shop.get(gone).errors[0]["code"] == "file_not_found"


def test_another_tenants_batch_is_not_there(shop):
    batch_id = shop.create(data(2))
    shop.turn()
    for call in (
        lambda: shop.call(batches.get, batch_id, tenant="globex", now=0.0),
        lambda: shop.call(batches.cancel, batch_id, tenant="globex", now=shop.now),
        lambda: shop.call(batches.list_batches, tenant="globex", limit=1, after=batch_id, now=0.0),
    ):
        with pytest.raises(batches.UnknownBatch):
            call()
    assert shop.call(batches.list_batches, tenant="globex", limit=10, now=0.0) == []
    assert shop.call(batches.rows_after, batch_id, tenant="globex", after=-1, limit=9) == []
    assert shop.call(batch_progress.rows_in, batch_id, tenant="globex") == {}


def test_a_token_budget_ends_what_is_left_and_says_so(shop):
    batch_id = shop.create(data(100), token_budget=200)
    shop.turn()
    shop.run(batch_id, num=39)  # 5 tokens each
    shop.turn()
    assert shop.get(batch_id).state == "in_progress"
    shop.run(batch_id, num=1)
    shop.keeper._look_at.clear()
    shop.turn()
    batch = shop.get(batch_id)
    assert (batch.stop_reason, batch.num_completed) == ("token_budget", 40)
    output, errors = assert_closed(shop, batch_id, 100, "cancelled")
    assert (len(output), len(errors)) == (40, 60)
    assert {line["error"]["code"] for line in errors} == {"batch_stopped"}
    assert "200" in errors[0]["error"]["message"]
    assert batch.progress["tokens"]["completion_tokens"] == 80
    assert batch.progress["rows"]["cancelled"] == 60


def test_an_error_rate_ends_a_batch_only_when_enough_rows_have_ended(shop):
    batch_id = shop.create(data(100), max_error_rate=0.5)
    shop.turn()
    shop.run(batch_id, num=19, state=JobState.FAILED)
    shop.turn()
    assert shop.get(batch_id).state == "in_progress"
    shop.run(batch_id, num=1, state=JobState.SUCCEEDED)
    shop.keeper._look_at.clear()
    shop.turn()
    batch = shop.get(batch_id)
    assert (batch.state, batch.stop_reason) == ("cancelled", "error_rate")
    assert batch.progress["failures"] == {"poisoned": 19}


def test_rows_that_are_no_jobs_yet_when_a_batch_is_stopped_are_marked_alike(shop):
    batch_id = shop.create(data(1300), token_budget=1)
    while shop.get(batch_id).num_inserted == 0:
        shop.keeper.round()
    batch = shop.get(batch_id)
    shop.call(batches.stop, batch, shop.keeper.name, StopReason.TOKEN_BUDGET, now=shop.now)
    shop.turn()
    _, errors = assert_closed(shop, batch_id, 1300, "cancelled")
    assert {line["error"]["code"] for line in errors} == {"batch_stopped"}


def test_progress_is_counted_from_rows_while_they_run_and_kept_at_the_end(shop):
    batch_id = shop.create(data(100))
    shop.turn()
    before = shop.get(batch_id).progress
    assert (before["rows"]["queued"], before["eta_s"]) == (100, None)
    shop.run(batch_id, num=50)
    shop.run(batch_id, num=1, state=JobState.FAILED)
    now = shop.get(batch_id).progress
    assert (now["rows"]["succeeded"], now["rows"]["failed"], now["rows"]["queued"]) == (50, 1, 49)
    assert now["tokens"]["completion_tokens"] == 100
    assert now["failures"] == {"poisoned": 1}
    assert now["tokens_per_s"] == pytest.approx(100 / now["elapsed_s"], rel=0.01)
    assert 0 < now["eta_low_s"] < now["eta_s"] < now["eta_high_s"]
    shop.run(batch_id)
    shop.turn()
    after = shop.get(batch_id).progress
    assert (after["rows"]["succeeded"], after["rows"]["total"], after["eta_s"]) == (99, 100, None)


def test_rows_run_as_planned_and_come_back_as_in_the_file_whoever_read_it(shop, monkeypatch):
    """A keeper that dies in the midst of a plan is followed by one that makes the same plan."""
    monkeypatch.setattr(batch_keeper, "ROWS", 16)
    lines = []
    for i in range(60):
        line = json.loads(row(i))
        line["body"]["max_tokens"] = (1, 16, 256)[i % 3]
        lines.append(json.dumps(line).encode() + b"\n")
    batch_id = shop.create(b"".join(lines))
    while shop.get(batch_id).num_inserted < 20:
        shop.keeper.round()
    first = [each.row_number for each in shop.rows(batch_id)]
    assert {number % 3 for number in first} == {2, 1}, "the longest are there first"
    assert sum(number % 3 == 2 for number in first) == 20
    shop.keeper = shop.another_keeper()
    with shop.database.begin() as connection:
        connection.execute(update(batches_table).values(keeper=None, keeper_until=None))
    shop.turn()
    rows = sorted(shop.rows(batch_id), key=lambda each: each.created_at)
    assert [each.row_number % 3 for each in rows] == [2] * 20 + [1] * 20 + [0] * 20
    assert [each.row_number for each in rows[:20]] == list(range(2, 60, 3))
    shop.run(batch_id)
    shop.turn()
    assert_closed(shop, batch_id, 60)
