"""The simulations must see twelve classic faults of such a protocol, each planted.

Two belong to the engine (test_planted_faults.py
plants them with its own): blocks leaked on abort, and a preempted sequence that keeps its sealed
blocks. Ten belong to the protocol of claims, leases, results and messages. Six more belong to the
background's lane and its chunks.
"""

import sys
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
from worker.book import Book
from worker.chunk import Chunk
from worker.ledger import Ledger
from worker.unclaimed import Unclaimed

MOST_SEEDS = 800


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


def nobody_takes_the_background(patch):
    patch.setattr(Book, "takes_background", lambda self: False)


def what_waits_of_a_chunk_is_forgotten(patch):
    real = Unclaimed.add

    def add(self, delivery):
        real(self, delivery)
        self._book.unclaimed.pop(delivery, None)

    patch.setattr(Unclaimed, "add", add)


def a_drain_keeps_what_waits_of_a_chunk(patch):
    patch.setattr(Unclaimed, "put_back_all", lambda self: None)


def chunks_are_never_acknowledged(patch):
    patch.setattr(Chunk, "_decided", lambda self, index: None)
    patch.setattr(Chunk, "_ended", lambda self, index: None)


def chunks_are_claimed_whole(patch):
    patch.setattr(Book, "may_claim", lambda self: bool(self.unclaimed and self._open_room()))


def lost_messages_of_the_background_stay_lost(patch):
    real = sweep.republish

    def republish(connection, model, *, background=None, **given):
        return [] if background else real(connection, model, background=background, **given)

    patch.setattr(sweep, "republish", republish)


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
    nobody_takes_the_background,
    what_waits_of_a_chunk_is_forgotten,
    a_drain_keeps_what_waits_of_a_chunk,
    chunks_are_never_acknowledged,
    chunks_are_claimed_whole,
    lost_messages_of_the_background_stay_lost,
]


def forget_statements():
    """Those that are made once: the fault may lie in how they are made."""
    for name, module in list(sys.modules.items()):
        if name.startswith("jobs."):
            for each in vars(module).values():
                if hasattr(each, "cache_clear"):
                    each.cache_clear()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_simulated_deployment_sees_a_planted_fault(fault, monkeypatch):
    fault(monkeypatch)
    forget_statements()
    try:
        for seed in range(MOST_SEEDS):
            run_seed(seed)
    except Exception:  # noqa: BLE001 (an audit's, or the database's)
        return
    finally:
        forget_statements()
    raise AssertionError(f"{MOST_SEEDS} seeds, and nobody saw it")


def test_the_engines_two_are_planted_in_its_own_simulation():
    planted = set(engine_faults.FAULTS)
    assert engine_faults.leak_blocks_on_abort in planted
    assert engine_faults.seal_every_block_of_a_preempted_sequence in planted
