"""Rows of a large batch beside other jobs: who goes first, and by which index they are found."""

import pytest
from sqlalchemy import text

from jobs import batch_progress, batch_rows, batches, sweep
from jobs.batch_record import BatchRecord, BatchState
from jobs.batch_rows import BatchRow
from jobs.records import new_job_id
from jobs.tenants import DEFAULT_TENANT
from tests.jobs.conftest import MODEL, NOW, new_job
from tests.jobs.test_sweep import plan

NUM_ROWS = 3000
BATCH = BatchRecord(
    id="batch_1", tenant_id=DEFAULT_TENANT, endpoint="/v1/chat/completions",
    input_file_id="file-1", metadata=None, priority=batches.PRIORITY, output_ttl_s=None,
    state=BatchState.IN_PROGRESS, ending="completed", model=MODEL, num_rows=NUM_ROWS,
    num_inserted=NUM_ROWS, created_at=NOW, expires_at=NOW + 86_400,
)  # fmt: skip


@pytest.fixture
def large(bench):
    """A batch whose rows are all queued."""
    rows = [
        BatchRow(
            id=new_job_id(), custom_id=str(i), row_number=i, body='{"prompt": "x"}', max_tokens=1
        )
        for i in range(NUM_ROWS)
    ]
    bench.call(batches.create, BATCH)
    bench.call(batch_rows.insert_rows, BATCH, rows, now=NOW, max_attempts=5)
    if not bench.database.sqlite:
        with bench.database.begin() as connection:
            connection.execute(text("ANALYZE"))
    return bench


def test_what_somebody_waits_for_goes_before_rows_that_came_earlier(large):
    first = large.call(sweep.publishable, MODEL, limit=10, now=NOW)
    bench_now = NOW + 60
    large.now = bench_now
    (waited_for,) = large.submit(new_job())
    published = large.call(sweep.publishable, MODEL, limit=3, now=bench_now)
    assert published[0] == waited_for.id
    rows = {each.id: each.row_number for each in large.call(
        batches.rows_after, BATCH.id, tenant=DEFAULT_TENANT, after=-1, limit=NUM_ROWS
    )}  # fmt: skip
    assert [rows[job_id] for job_id in first + published[1:]] == list(range(12))


def test_only_so_many_rows_are_on_the_runway_as_it_has_room_for(large):
    assert len(large.call(sweep.publishable, MODEL, limit=64, now=NOW)) == 64
    large.call(batches.pause, BATCH.id, tenant=DEFAULT_TENANT, now=NOW)
    assert large.call(sweep.publishable, MODEL, limit=64, now=NOW) == []
    large.call(batches.resume, BATCH.id, tenant=DEFAULT_TENANT, now=NOW)
    assert len(large.call(sweep.publishable, MODEL, limit=64, now=NOW)) == 64


INDEXED = {
    "rows_in": (
        "COVERING INDEX jobs_rows_in", batch_progress.rows_in, (BATCH.id,),
        {"tenant": DEFAULT_TENANT},
    ),
    "num_open": ("jobs_rows_in", batches.num_open, (BATCH,), {}),
    "rows_after": (
        "jobs_row", batches.rows_after, (BATCH.id,),
        {"tenant": DEFAULT_TENANT, "after": 2000, "limit": 100},
    ),
    "publishable": ("jobs_queue", sweep.publishable, (MODEL,), {"limit": 64, "now": NOW}),
    "take_open": ("batches_open", batches.take_open, ("k",), {"now": NOW, "limit": 9}),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEXED)
def test_a_large_batch_is_found_by_its_index(large, name):
    index, function, args, kwargs = INDEXED[name]
    words = plan(large, function, *args, **kwargs)
    if not large.database.sqlite and name != "rows_after":
        return  # all that there is are its rows: PostgreSQL reads the table
    assert index in words
    assert not any(line.endswith("'SCAN jobs')") for line in words.splitlines())
