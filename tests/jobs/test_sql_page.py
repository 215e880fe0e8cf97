"""docs/sql.md: every column a reader may rely on, and statements that run as they stand."""

import re

from sqlalchemy import text

from jobs import store
from jobs.models import jobs
from jobs.tenants import DEFAULT_TENANT
from tests.conftest import REPOSITORY
from tests.jobs.conftest import new_job
from tests.jobs.test_claims import success

PAGE = (REPOSITORY / "docs" / "sql.md").read_text()
NOW = 20_700 * 86_400 + 60.0  # a minute into that day since 1970
OURS = {
    "rank", "due_at", "fence", "crash_count", "worker_id", "checkpoint", "checkpoint_tokens",
    "published_at", "stream", "pieces", "announced_at", "trace_parent", "waiter_id",
}  # fmt: skip


def statement(first_words: str) -> str:
    [found] = [
        block
        for block in re.findall(r"^```sql\n(.*?)^```$", PAGE, re.S | re.M)
        if first_words in block
    ]
    return found


def test_the_page_lists_all_columns_but_those_of_the_queue_itself():
    listed = [
        name
        for cell in re.findall(r"^\| (`.*?) \|", PAGE, re.M)
        for name in re.findall(r"`(\w+)`", cell)
    ]
    assert len(listed) == len(set(listed))
    assert set(listed) == {column.name for column in jobs.columns} - OURS


def three_jobs(bench):
    """Two that succeeded in a day, the first a chat; one cancelled in the next."""
    bench.now = NOW
    texts = [
        {"choices": [{"message": {"content": "hello"}}]},
        {"choices": [{"text": "once"}]},
    ]
    records = bench.submit(
        *(new_job(custom_id=f"row-{number}", prompt_tokens=10) for number in (17, 18, 19))
    )
    bench.register()
    claimed = {job.id: job for job in bench.claim(*(record.id for record in records[:2]))}
    results = [
        success(
            claimed[record.id], output=output, finish_reason="stop", prompt_tokens=10,
            cached_tokens=4, completion_tokens=3, wasted_tokens=1, first_token_at=NOW + 0.5,
        )
        for record, output in zip(records, texts, strict=False)
    ]  # fmt: skip
    bench.finish(results, now=NOW + 2)
    bench.call(store.cancel, records[2].id, tenant=DEFAULT_TENANT, now=NOW + 86_400)
    return [record.id for record in records]


def rows(bench, first_words: str) -> list[tuple]:
    query = statement(first_words)
    with bench.database.read() as connection:
        return [tuple(row) for row in connection.execute(text(query.replace(":", "\\:")))]


def test_the_question_after_my_jobs_is_answered_on_both_databases(bench):
    first, second, _ = three_jobs(bench)
    answer = rows(bench, "custom_id IN")
    assert [row[:7] for row in answer] == [
        (second, "row-18", "succeeded", "stop", 10, 3, 1),
        (first, "row-17", "succeeded", "stop", 10, 3, 1),
    ]
    for _, _, _, _, _, _, _, queue_s, ttft_s, total_s in answer:
        assert 0 <= queue_s + 0.001 < ttft_s < total_s < 2.1


def test_the_question_after_tokens_by_day_is_answered_on_both_databases(bench):
    three_jobs(bench)
    assert [(day, model, *map(int, counts)) for day, model, *counts in rows(bench, "AS day")] == [
        (20_700, "tiny", 2, 20, 8, 6, 2),
        (20_701, "tiny", 1, 10, 0, 0, 0),
    ]


def test_the_text_is_read_by_each_databases_own_word(bench):
    first, second, _ = three_jobs(bench)
    word = "'$.choices[0].text'" if bench.database.sqlite else "'{choices,0,text}'"
    assert sorted(rows(bench, word)) == sorted([(first, "hello"), (second, "once")])


def test_old_jobs_are_deleted_and_none_that_has_not_ended(bench):
    three_jobs(bench)
    [waiting] = bench.submit(new_job())
    delete = statement("DELETE").replace("1767225600", str(NOW + 3))
    with bench.database.begin() as connection:
        assert connection.execute(text(delete)).rowcount == 2
    assert bench.get(waiting.id) == waiting
