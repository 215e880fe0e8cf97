"""The simulations must see twelve classic faults of such a protocol, each planted.

Two belong to the engine (test_planted_faults.py
plants them with its own): blocks leaked on abort, and a preempted sequence that keeps its sealed
blocks. Ten belong to the protocol of claims, leases, results and messages.
"""

from contextlib import suppress

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import OperationalError

from jobs import accounting, claims, finishing, retries, store, sweep
from jobs.claims import Held
from jobs.lifecycle import TERMINAL, JobState
from jobs.models import jobs
from jobs.rows import encode
from tests.simulation import test_planted_faults as engine_faults
from tests.simulation.servers import SimDatabase, SimRunway
from tests.simulation.service import run_seed
from worker.ledger import Ledger

MOST_SEEDS = 400


def current_fences(connection, held):
    """What each would be called if fences did not exist."""
    query = select(jobs.c.id, jobs.c.fence).where(jobs.c.id.in_([each.id for each in held]))
    fences = dict(connection.execute(query).all())
    return {each: Held(each.id, fences.get(each.id, each.fence)) for each in held}


def results_without_a_fence(patch):
    real = finishing._finish

    def finish(connection, results, now):
        names = current_fences(connection, [Held(r.id, r.fence) for r in results])
        renamed = [
            type(r)(**{f: getattr(r, f) for f in r.__dataclass_fields__}
                    | {"fence": names[Held(r.id, r.fence)].fence})
            for r in results
        ]  # fmt: skip
        accepted = real(connection, renamed, now)
        return {held for held, name in names.items() if name in accepted}

    patch.setattr(finishing, "_finish", finish)


def leases_by_the_workers_clock(patch):
    patch.setattr(SimDatabase, "clock", lambda self, _: self._world.now + self._process.skew_s)


def beats_without_a_fence(patch):
    real = claims.beat

    def beat(connection, worker_id, *, held, checkpoints, first_tokens=None, **given):
        names = current_fences(connection, held)
        beaten = real(
            connection,
            worker_id,
            held=list(names.values()),
            checkpoints={names[each]: tokens for each, tokens in checkpoints.items()},
            first_tokens={names[each]: at for each, at in (first_tokens or {}).items()},
            **given,
        )
        return claims.Beaten(
            lost=frozenset(each for each in held if names[each] in beaten.lost),
            stored=frozenset(each for each in held if names[each] in beaten.stored),
        )

    patch.setattr(claims, "beat", beat)


def no_reaper(patch):
    patch.setattr(sweep, "reap", lambda connection, now: [])


def published_once_is_never_published_again(patch):
    patch.setattr(sweep, "republish", lambda *_, **__: [])


def outputs_overwritten(patch):
    real = finishing._finish

    def finish(connection, results, now):
        accepted = real(connection, results, now)
        for result in results:
            held = Held(result.id, result.fence)
            if held not in accepted and result.output is not None:
                connection.execute(
                    update(jobs)
                    .where(jobs.c.id == result.id, jobs.c.state.in_(TERMINAL))
                    .values(
                        state=result.state,
                        output=encode(result.output),
                        completion_tokens=result.completion_tokens,
                        finished_at=now,
                    )
                )
        return accepted

    patch.setattr(finishing, "_finish", finish)


def counters_outside_the_transaction(patch):
    real, counted = accounting.account_wasted, []
    patch.setattr(accounting, "account_wasted", lambda _, wasted: counted.extend(wasted))
    real_commit = Ledger._commit

    def commit(self, window):
        written = real_commit(self, window)
        with suppress(OperationalError), self._database.begin() as connection:
            real(connection, counted)
        counted.clear()
        return written

    patch.setattr(Ledger, "_commit", commit)


def cancels_pass_over_what_runs(patch):
    real = store.cancel

    def cancel(connection, job_id, *, tenant, now):
        record = store.get(connection, job_id, tenant=tenant)
        if record is not None and record.state == JobState.RUNNING:
            return record
        return real(connection, job_id, tenant=tenant, now=now)

    patch.setattr(store, "cancel", cancel)


def nobody_polls_the_backlog(patch):
    real = SimRunway.refill_lanes

    def refill_lanes(self, database):
        return real(self, database) if database._process.kind == "api" else {}

    patch.setattr(SimRunway, "refill_lanes", refill_lanes)


def retries_without_limit(patch):
    real = retries.ending
    never = jobs.c.attempt < 0

    def ending(*endings, **given):
        return real(*((never, code, message) for _, code, message in endings), **given)

    patch.setattr(retries, "ending", ending)


FAULTS = [
    results_without_a_fence,
    leases_by_the_workers_clock,
    beats_without_a_fence,
    no_reaper,
    published_once_is_never_published_again,
    outputs_overwritten,
    counters_outside_the_transaction,
    cancels_pass_over_what_runs,
    nobody_polls_the_backlog,
    retries_without_limit,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_simulated_deployment_sees_a_planted_fault(fault, monkeypatch):
    fault(monkeypatch)
    for seed in range(MOST_SEEDS):
        try:
            run_seed(seed)
        except Exception:  # noqa: BLE001 (an audit's, or the database's)
            return
    raise AssertionError(f"{MOST_SEEDS} seeds, and nobody saw it")


def test_the_engines_two_are_planted_in_its_own_simulation():
    planted = set(engine_faults.FAULTS)
    assert engine_faults.leak_blocks_on_abort in planted
    assert engine_faults.seal_every_block_of_a_preempted_sequence in planted
