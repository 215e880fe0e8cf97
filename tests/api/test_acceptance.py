"""Calls accepted in one transaction: nobody's fault is another's, and no reply is early."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from api.acceptance import ALONE_JOBS, Acceptance
from api.app import create_app
from api.errors import Unavailable
from api.present import Presenter
from jobs import store, submissions
from jobs.forecast import Forecast
from jobs.places import Line
from jobs.submissions import Submission
from tests.jobs.conftest import new_job

HASH = b"\1" * 32


def one(*jobs, **values) -> Submission:
    return Submission(tenant="default", new_jobs=jobs or [new_job()], **values)


class Watched:
    """How many calls each transaction had; those of several may be made to fail."""

    def __init__(self, monkeypatch) -> None:
        self.groups: list[int] = []
        self._submit = submissions.submit_together
        self.fault: Exception | None = None
        monkeypatch.setattr(submissions, "submit_together", self)

    def __call__(self, connection, given, **kwargs):
        self.groups.append(len(given))
        outcomes = self._submit(connection, given, **kwargs)
        if self.fault is not None and len(given) > 1:
            raise self.fault
        return outcomes


@pytest.fixture
def watched(monkeypatch) -> Watched:
    return Watched(monkeypatch)


def run(settings, scenario) -> None:
    async def main() -> None:
        services = create_app(replace(settings)).state.services
        with contextlib.closing(services.sql):
            await scenario(Acceptance(services.sql, Presenter(), ttl_s=60.0), services.sql)

    asyncio.run(main())


async def known(sql) -> set[str]:
    listed = await sql.read(
        lambda connection, _: store.list_jobs(connection, tenant="default", limit=1000)
    )
    return {record.id for record in listed}


def test_who_comes_meanwhile_shares_a_commit_and_hears_after_it(settings, watched):
    async def scenario(acceptance, sql):
        async def submit(submission):
            accepted = await acceptance(submission)
            assert accepted.records[0].id in await known(sql)  # by another connection
            return accepted

        many = one(*(new_job() for _ in range(ALONE_JOBS + 1)))
        calls = [submit(one()) for _ in range(20)]
        accepted = await asyncio.gather(*calls, submit(many))
        assert sorted(watched.groups) == [1, 20]
        assert len(await known(sql)) == 20 + ALONE_JOBS + 1
        assert [each["status"] for each in accepted[7].objects] == ["queued"]
        assert accepted[7].objects[0]["queue_position"] > 1

    run(settings, scenario)


def test_a_job_committed_after_its_queue_was_looked_at_has_a_place(settings):
    """Its row's time is before that, for a commit takes a while."""

    async def scenario(acceptance, sql):
        now = await sql.read(lambda _, now: now)
        looked_at = Forecast(now + 1.0, None, Line())
        acceptance._presenter._forecasts[new_job().model] = looked_at
        accepted = await acceptance(one())
        assert accepted.objects[0]["queue_position"] == 1

    run(settings, scenario)


def test_a_row_that_the_database_refuses_harms_no_other(settings, watched):
    async def scenario(acceptance, sql):
        first = await acceptance(one())
        twin = new_job(id=first.records[0].id)
        odd = new_job(body={"model": "tiny", "prompt": float("nan")})
        calls = [one(), one(), one(twin), one(), one(odd), one()]
        got = await asyncio.gather(*map(acceptance, calls), return_exceptions=True)
        failed = [type(each).__name__ for each in got if isinstance(each, Exception)]
        assert failed == ["IntegrityError", "ValueError"]
        accepted = {each.records[0].id for each in got if not isinstance(each, Exception)}
        assert await known(sql) == accepted | {first.records[0].id}
        assert len(accepted) == 4

    run(settings, scenario)


def test_calls_of_one_key_are_one_job(settings, watched):
    async def scenario(acceptance, sql):
        twins = [one(key="k", body_sha256=HASH) for _ in range(6)]
        got = await asyncio.gather(acceptance(one()), *map(acceptance, twins))
        assert len({each.records[0].id for each in got[1:]}) == 1
        assert [each.replayed for each in got[1:]].count(False) == 1
        assert len(await known(sql)) == 2

    run(settings, scenario)


def test_where_the_database_went_away_nothing_is_tried_again(settings, watched):
    """The commit's answer may be what was lost: whether it took effect is the callers' to ask."""

    async def scenario(acceptance, sql):
        watched.fault = Unavailable("the database does not answer")
        got = await asyncio.gather(*(acceptance(one()) for _ in range(6)), return_exceptions=True)
        assert [type(each).__name__ for each in got] == ["Unavailable"] * 6
        assert watched.groups == [6]
        assert await known(sql) == set()

    run(settings, scenario)
