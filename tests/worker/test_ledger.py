"""The ledger against real databases, with the connection breaking where it hurts."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError

from jobs import attempts, claims, store, sweep
from jobs.accounting import Counted
from jobs.claims import ClaimedJob, Held
from jobs.database import Database
from jobs.lifecycle import ErrorCode, JobState
from jobs.records import JobRecord, NewJob, WorkerInfo
from jobs.retries import Backoff
from jobs.tenants import DEFAULT_TENANT
from worker.entries import Cancel, Claim, Count, Died, Finish, HandBack, Insert, Waste
from worker.generation import Outcome
from worker.ledger import Ledger

WORKER = "w1"
TIMEOUT_S = 20.0
SUCCEEDED = Outcome(state=JobState.SUCCEEDED, output={"text": "hello"}, completion_tokens=3)


class FragileDatabase(Database):
    """A database whose connection breaks at each commit as often as `breaks` says."""

    breaks: str = ""  # one letter a transaction: b before its commit, a after it, - not at all

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        fate, self.breaks = self.breaks[:1], self.breaks[1:]
        with super().begin() as connection:
            yield connection
            if fate == "b":
                raise _connection_lost()
        if fate == "a":
            raise _connection_lost()


def _connection_lost() -> OperationalError:
    return OperationalError("COMMIT", {}, Exception("gone"), connection_invalidated=True)


class Bench:
    """A ledger and the rows it writes."""

    def __init__(self, url: str) -> None:
        self.database = FragileDatabase(url)
        self.announced: list[str] = []
        self.ledger = Ledger(
            self.database,
            worker_id=WORKER,
            window_s=0.02,
            max_rows=256,
            max_crashes=3,
            backoff=Backoff(base_s=0),
            announce=self.announced.extend,
        )
        info = WorkerInfo(
            id=WORKER, hostname="here", pid=7, model="tiny",
            max_num_seqs=8, kv_tokens=4096, max_model_len=512,
        )  # fmt: skip
        with self.database.begin() as connection:
            now = self.database.clock(connection)
            claims.register_worker(connection, info, now=now, lease_s=30)

    def submit(self, num_jobs: int = 1) -> list[str]:
        with self.database.begin() as connection:
            now = self.database.clock(connection)
            submitted = store.submit(
                connection, [new_job() for _ in range(num_jobs)], tenant=DEFAULT_TENANT, now=now
            )
        return [record.id for record in submitted.records]

    def get(self, job_id: str) -> JobRecord:
        with self.database.read() as connection:
            record = store.get(connection, job_id, tenant=DEFAULT_TENANT)
        assert record is not None
        return record

    def claim(self, job_id: str, new_job: NewJob | None = None) -> ClaimedJob | None:
        return self.ask(lambda answer: Claim(job_id=job_id, new_job=new_job, answer=answer))[0]

    def finish(self, held: Held, outcome: Outcome = SUCCEEDED) -> bool:
        return self.ask(
            lambda answer: Finish(held=held, outcome=outcome, wasted_tokens=0, answer=answer)
        )[0]

    def ask(self, entry: Callable) -> tuple:
        """Post an entry and wait for its answer."""
        answered: list[tuple] = []
        done = threading.Event()

        def answer(*values) -> None:
            answered.append(values)
            done.set()

        self.ledger.post(entry(answer))
        assert done.wait(TIMEOUT_S)
        return answered[0]


def new_job(**values) -> NewJob:
    usual = {"url": "/v1/completions", "model": "tiny", "body": {"model": "tiny", "prompt": "x"}}
    return NewJob(**usual | values)


@pytest.fixture
def bench(database_url):
    bench = Bench(database_url)
    bench.ledger.start()
    yield bench
    bench.ledger.stop()
    bench.database.dispose()


def test_a_claim_is_answered_with_the_row_and_the_databases_time(bench):
    [job_id] = bench.submit()
    job, now = bench.ask(lambda answer: Claim(job_id=job_id, answer=answer))
    assert (job.id, job.attempt, job.body["prompt"]) == (job_id, 1, "x")
    assert now == pytest.approx(time.time(), abs=60)
    assert bench.get(job_id).state == JobState.RUNNING


def test_a_row_taken_before_is_answered_with_none(bench):
    [job_id] = bench.submit()
    assert bench.claim(job_id) is not None
    assert bench.claim(job_id) is None
    assert bench.claim("job_unknown") is None


@pytest.mark.parametrize("whole", [False, True])
def test_a_worker_whose_lease_has_lapsed_claims_nothing_and_loses_nothing(bench, whole):
    sent = new_job() if whole else None
    [job_id] = [sent.id] if sent else bench.submit()
    with bench.database.begin() as connection:
        now = bench.database.clock(connection)
        claims.unregister_worker(connection, WORKER, now=now)
        sweep.publishable(connection, "tiny", limit=9, now=now)
    assert bench.claim(job_id, sent) is None
    row = bench.get(job_id)
    assert (row.state, row.attempt, row.published_at) == (JobState.QUEUED, 0, None)


def test_messages_of_another_deployment_are_told_of_once_in_a_while(bench, caplog):
    [job_id] = bench.submit()
    assert bench.claim(job_id) is not None
    assert bench.claim(job_id) is None  # somebody has it, and it is ours
    assert "TOKENMILL_KEY_PREFIX" not in caplog.text
    for stranger in ("job_x", "job_y"):
        assert bench.claim(stranger) is None
    assert caplog.text.count("TOKENMILL_KEY_PREFIX") == 1
    assert "job_x" in caplog.text


def test_two_messages_of_one_job_in_one_window_make_one_claim(bench):
    [job_id] = bench.submit()
    answers = []
    for _ in range(2):
        bench.ledger.post(Claim(job_id=job_id, answer=lambda job, now: answers.append(job)))
    assert bench.ledger.flush().wait(TIMEOUT_S)
    assert sorted(answer is None for answer in answers) == [False, True]


def test_a_result_is_stored_and_then_announced(bench):
    [job_id] = bench.submit()
    job = bench.claim(job_id)
    assert bench.finish(Held(job.id, job.fence))
    row = bench.get(job_id)
    assert (row.state, row.output, row.completion_tokens) == ("succeeded", {"text": "hello"}, 3)
    assert bench.announced == [job_id]


def test_a_result_under_an_old_fence_is_refused(bench):
    [job_id] = bench.submit()
    job = bench.claim(job_id)
    assert not bench.finish(Held(job.id, job.fence - 1))
    assert bench.get(job_id).state == JobState.RUNNING
    assert bench.announced == []


def test_a_failure_is_stored_with_its_error(bench):
    [job_id] = bench.submit()
    job = bench.claim(job_id)
    outcome = Outcome(
        state=JobState.FAILED, code=ErrorCode.EXCEEDS_CAPACITY, message="too long", param="prompt"
    )
    assert bench.finish(Held(job.id, job.fence), outcome)
    row = bench.get(job_id)
    assert row.state == JobState.FAILED
    assert row.error["code"] == "exceeds_capacity"
    assert row.error["param"] == "prompt"


def test_a_handed_back_job_is_queued_again_with_its_tokens(bench):
    [job_id] = bench.submit()
    job = bench.claim(job_id)
    held = Held(job.id, job.fence)
    bench.ask(
        lambda answer: HandBack(
            held=held,
            checkpoint=[[7]],
            num_tokens=1,
            first_token_at=time.monotonic(),
            crashed=False,
            answer=answer,
        )
    )
    row = bench.get(job_id)
    assert (row.state, row.attempt) == (JobState.QUEUED, 0)
    assert row.created_at <= row.first_token_at <= row.created_at + TIMEOUT_S
    assert bench.claim(job_id).checkpoint == [[7]]
    assert not bench.finish(held)


def test_a_job_the_engine_died_with_too_often_fails_and_is_announced(bench):
    [job_id] = bench.submit()
    for _ in range(3):
        job = bench.claim(job_id)
        held = Held(job.id, job.fence)
        bench.ask(lambda answer, held=held: HandBack(
            held=held, checkpoint=[], num_tokens=0, first_token_at=None, crashed=True,
            answer=answer,
        ))  # fmt: skip
    assert bench.get(job_id).error["code"] == "poisoned"
    assert bench.announced == [job_id]


def test_a_death_and_refused_writes_are_counted(bench):
    [job_id] = bench.submit()
    job = bench.claim(job_id)
    stale = Held(job.id, job.fence - 1)
    assert not bench.finish(stale)
    bench.ask(lambda answer: HandBack(
        held=stale, checkpoint=None, num_tokens=0, first_token_at=None, crashed=True,
        answer=answer,
    ))  # fmt: skip
    died = Died(id="one", model="tiny", ending="SIGKILL", job_ids=[job_id])
    for _ in range(2):
        bench.ledger.post(died)
    assert bench.ledger.flush().wait(TIMEOUT_S)
    with bench.database.read() as connection:
        counted = attempts.totals(connection)
        assert attempts.of_job(connection, job_id, tenant=DEFAULT_TENANT)[0].outcome is None
    assert counted == {
        ("stale_writes", "result"): 1,
        ("stale_writes", "hand_back"): 1,
        ("engine_deaths", "SIGKILL"): 1,
    }


def test_a_job_that_failed_and_is_tried_again_is_queued_with_its_tokens(bench):
    [job_id] = bench.submit()
    job = bench.claim(job_id)
    bench.ask(lambda answer: HandBack(
        held=Held(job.id, job.fence), checkpoint=[[7]], num_tokens=1, first_token_at=None,
        crashed=False, failed=ErrorCode.ENGINE_ERROR, answer=answer,
    ))  # fmt: skip
    row = bench.get(job_id)
    assert (row.state, row.attempt, row.error) == (JobState.QUEUED, 1, None)
    with bench.database.read() as connection:
        [tried] = attempts.of_job(connection, job_id, tenant=DEFAULT_TENANT)
    assert (tried.outcome, tried.error_code, tried.kept_tokens) == ("failed", "engine_error", 1)


@pytest.mark.parametrize("whole", [False, True])
def test_a_cancel_in_the_window_of_its_claim_wins(database_url, whole):
    bench = Bench(database_url)  # not started: both entries fall into its first window
    sent = new_job() if whole else None
    [job_id] = [sent.id] if sent else bench.submit()
    claimed = []
    bench.ledger.post(
        Claim(job_id=job_id, new_job=sent, answer=lambda job, now: claimed.append(job))
    )
    bench.ledger.post(Cancel(job_id=job_id, answer=lambda: None))
    flushed = bench.ledger.flush()
    bench.ledger.start()
    assert flushed.wait(TIMEOUT_S)
    assert bench.get(job_id).state == JobState.CANCELLED
    assert claimed == [None]
    assert bench.announced == [job_id]


def test_waste_is_added_up(bench):
    [job_id] = bench.submit()
    for tokens, first_token_at in ((3, time.monotonic()), (4, None)):
        bench.ledger.post(Waste(held=Held(job_id, 1), tokens=tokens, first_token_at=first_token_at))
    assert bench.ledger.flush().wait(TIMEOUT_S)
    row = bench.get(job_id)
    assert row.wasted_tokens == 7
    assert row.created_at <= row.first_token_at <= row.created_at + TIMEOUT_S


def test_tokens_of_a_hand_back_that_comes_too_late_are_waste(bench):
    [job_id] = bench.submit()
    claimed = bench.claim(job_id)
    held = Held(claimed.id, claimed.fence)
    bench.ask(lambda answer: Cancel(job_id=job_id, answer=answer))
    bench.ask(lambda answer: HandBack(
        held=held, checkpoint=[[7, 8, 9]], num_tokens=3, first_token_at=time.monotonic(),
        crashed=True, answer=answer,
    ))  # fmt: skip
    row = bench.get(job_id)
    assert (row.state, row.wasted_tokens) == (JobState.CANCELLED, 3)
    assert row.created_at <= row.first_token_at <= row.created_at + TIMEOUT_S


def test_a_whole_job_is_counted_in_the_window_that_ends_it(database_url):
    bench = Bench(database_url)  # not started: all entries fall into its first window
    sent = new_job()
    bench.ledger.post(Count(counted=Counted(sent.id, 5, 20)))
    bench.ledger.post(Cancel(job_id=sent.id, new_job=sent, answer=lambda: None))
    flushed = bench.ledger.flush()
    bench.ledger.start()
    assert flushed.wait(TIMEOUT_S)
    row = bench.get(sent.id)
    assert (row.state, row.prompt_tokens, row.max_tokens) == (JobState.CANCELLED, 5, 20)


def test_a_whole_job_that_comes_twice_is_one_row_and_one_claim(bench):
    job = new_job(custom_id="c")
    assert bench.claim(job.id, job).id == job.id
    assert bench.claim(job.id, job) is None
    assert bench.get(job.id).custom_id == "c"


def test_a_whole_job_for_another_model_waits_for_the_runway(bench):
    job = new_job(model="other")
    bench.ask(lambda answer: Insert(new_job=job, answer=answer))
    row = bench.get(job.id)
    assert (row.state, row.published_at) == (JobState.QUEUED, None)


@pytest.mark.parametrize("breaks", ["b", "a", "ba", "aab"])
def test_a_claim_is_ours_whether_the_broken_commit_was_in_or_not(bench, breaks):
    [job_id] = bench.submit()
    bench.database.breaks = breaks
    job = bench.claim(job_id)
    assert job is not None
    assert job.fence == bench.get(job_id).fence == 1
    assert job.attempt == 1


@pytest.mark.parametrize("breaks", ["", "b", "a", "ba", "aab"])
def test_a_stale_result_is_counted_once_whether_the_broken_commit_was_in_or_not(bench, breaks):
    [job_id] = bench.submit()
    job = bench.claim(job_id)
    bench.database.breaks = breaks
    assert not bench.finish(Held(job.id, job.fence - 1))
    with bench.database.read() as connection:
        assert attempts.totals(connection) == {("stale_writes", "result"): 1}


@pytest.mark.parametrize("breaks", ["b", "a", "ba", "aab"])
def test_a_result_is_accepted_once_whether_the_broken_commit_was_in_or_not(bench, breaks):
    [job_id] = bench.submit()
    job = bench.claim(job_id)
    bench.database.breaks = breaks
    assert bench.finish(Held(job.id, job.fence))
    assert bench.get(job_id).state == JobState.SUCCEEDED
    assert bench.announced == [job_id]


def test_a_commit_in_doubt_does_not_accept_what_was_cancelled_meanwhile(bench):
    [job_id] = bench.submit()
    job = bench.claim(job_id)
    with bench.database.begin() as connection:
        store.cancel(
            connection, job_id, tenant=DEFAULT_TENANT, now=bench.database.clock(connection)
        )
    bench.database.breaks = "b"
    assert not bench.finish(Held(job.id, job.fence))
    assert bench.get(job_id).output is None


IN_DOUBT = ["", "b", "a", "ba", "ab", "aab", "bba"]


@pytest.mark.parametrize("breaks", IN_DOUBT)
def test_waste_is_added_once_whether_the_broken_commit_was_in_or_not(bench, breaks):
    [job_id] = bench.submit()
    for tokens in (3, 4):
        bench.database.breaks = breaks
        bench.ledger.post(Waste(held=Held(job_id, 1), tokens=tokens, first_token_at=None))
        assert bench.ledger.flush().wait(TIMEOUT_S)
    assert bench.get(job_id).wasted_tokens == 7


@pytest.mark.parametrize("breaks", IN_DOUBT)
def test_tokens_of_a_late_hand_back_are_added_once_whether_its_commit_was_in_or_not(bench, breaks):
    [late_id, in_time_id] = bench.submit(2)
    late, in_time = bench.claim(late_id), bench.claim(in_time_id)
    bench.ask(lambda answer: Cancel(job_id=late_id, answer=answer))
    bench.database.breaks = breaks
    for job in (late, in_time):
        bench.ledger.post(
            HandBack(
                held=Held(job.id, job.fence),
                checkpoint=[[7] * 9],
                num_tokens=9,
                first_token_at=None,
                crashed=False,
                answer=lambda: None,
            )
        )
    assert bench.ledger.flush().wait(TIMEOUT_S)
    assert bench.get(late_id).wasted_tokens == 9
    row = bench.get(in_time_id)
    assert (row.state, row.wasted_tokens) == (JobState.QUEUED, 0)
    assert bench.claim(in_time_id).checkpoint == [[7] * 9]


def test_what_comes_last_is_written_before_a_ledger_stops(bench):
    [job_id] = bench.submit()
    for _ in range(50):
        bench.ledger.post(Waste(held=Held(job_id, 1), tokens=1, first_token_at=None))
        bench.ledger.flush()
    bench.ledger.stop()
    assert bench.get(job_id).wasted_tokens == 50


def test_nothing_is_answered_while_the_database_is_away(bench):
    [job_id] = bench.submit()
    bench.database.breaks = "b" * 1000
    answers = []
    bench.ledger.post(Claim(job_id=job_id, answer=lambda job, now: answers.append(job)))
    flushed = bench.ledger.flush()
    assert not flushed.wait(0.5)
    assert answers == []
    bench.database.breaks = ""
    assert flushed.wait(TIMEOUT_S)
    assert [job.id for job in answers] == [job_id]


@pytest.mark.parametrize("condition", ["query_canceled", "read_only_sql_transaction", "io_error"])
def test_a_result_waits_for_a_database_that_refuses_it_for_a_while(postgres_url, condition):
    """It is not the result's fault: the job must not fail as unstorable, nor the worker end."""
    bench = Bench(postgres_url)
    bench.ledger.start()
    [job_id] = bench.submit()
    job = bench.claim(job_id)
    raising = f"BEGIN RAISE EXCEPTION 'not now' USING ERRCODE = '{condition}'; END"
    with bench.database.begin() as connection:
        for statement in (
            f"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $${raising}$$",
            "CREATE TRIGGER refuse BEFORE UPDATE ON jobs EXECUTE FUNCTION refuse()",
        ):
            connection.execute(text(statement))
    accepted = []
    bench.ledger.post(
        Finish(
            held=Held(job.id, job.fence),
            outcome=SUCCEEDED,
            wasted_tokens=0,
            answer=accepted.append,
        )
    )
    flushed = bench.ledger.flush()
    assert not flushed.wait(0.5)
    with bench.database.begin() as connection:
        connection.execute(text("DROP TRIGGER refuse ON jobs"))
    assert flushed.wait(TIMEOUT_S)
    assert accepted == [True]
    assert bench.get(job_id).state == JobState.SUCCEEDED
    bench.ledger.stop()
    bench.database.dispose()


def test_a_ledger_told_to_stop_gives_up_on_a_database_that_stays_away(bench):
    [job_id] = bench.submit()
    bench.database.breaks = "b" * 1000
    answers = []
    bench.ledger.post(Claim(job_id=job_id, answer=lambda job, now: answers.append(job)))
    bench.ledger.stop()
    assert answers == []


def test_many_rows_share_a_transaction(bench):
    ids = bench.submit(200)
    claimed = []
    for job_id in ids:
        bench.ledger.post(Claim(job_id=job_id, answer=lambda job, now: claimed.append((job, now))))
    assert bench.ledger.flush().wait(TIMEOUT_S)
    assert {job.id for job, _ in claimed} == set(ids)
    assert len({now for _, now in claimed}) <= 10  # each transaction reads the clock once


@pytest.mark.parametrize("end", ["finish", "hand back", "waste"])
def test_a_first_token_lies_behind_the_claim_however_late_the_database_answers(
    bench, monkeypatch, end
):
    [job_id] = bench.submit()
    job = bench.claim(job_id)
    held, token_at, late_s = Held(job.id, job.fence), time.monotonic(), [0.0]
    monotonic, clock = time.monotonic, bench.database.clock
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + sum(late_s))

    def answer_late(connection):
        now = clock(connection)
        late_s.append(100.0)  # on its way, or behind others for the processor
        return now

    monkeypatch.setattr(bench.database, "clock", answer_late)
    if end == "finish":
        bench.finish(held, replace(SUCCEEDED, first_token_at=token_at))
    elif end == "hand back":
        bench.ask(
            lambda answer: HandBack(
                held=held,
                checkpoint=[[1]],
                num_tokens=1,
                first_token_at=token_at,
                crashed=False,
                answer=answer,
            )
        )
    else:
        bench.ledger.post(Waste(held=Held(job_id, 1), tokens=1, first_token_at=token_at))
        assert bench.ledger.flush().wait(TIMEOUT_S)
    row = bench.get(job_id)
    begun_at = job.created_at if end == "hand back" else row.started_at
    assert begun_at - 0.001 <= row.first_token_at < begun_at + 60  # SQLite's clock has milliseconds
    assert row.finished_at is None or row.first_token_at <= row.finished_at
