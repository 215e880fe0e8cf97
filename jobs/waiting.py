"""Jobs that end with their callers: whose they are, and what becomes of them when he has gone.

An API process cancels such a job when it sees the caller leave. That the process itself has gone is
seen by its lease: one row, extended every few seconds, however many callers wait. Every function
takes an open connection and `now`, seconds by the database's clock.
"""

from sqlalchemy import Connection, delete, exists, select

from jobs import attempts, finishing
from jobs.attempts import Outcome
from jobs.models import WAITED_FOR, api_processes, jobs
from jobs.retries import TAKEN, taken
from jobs.rows import insert_into, picked

ROUND = 1000  # most jobs that one call ends: transactions stay short, the next call goes on


def extend(connection: Connection, process_id: str, *, now: float, lease_s: float) -> None:
    """Begin the lease of an API process, or let it last until `lease_s` from now."""
    until = {"lease_until": now + lease_s}
    connection.execute(
        insert_into(connection, api_processes)
        .values(id=process_id, **until)
        .on_conflict_do_update(index_elements=[api_processes.c.id], set_=until)
    )


def end(connection: Connection, process_id: str) -> None:
    """It waits for nothing any more: what it could not cancel is nobody's now."""
    connection.execute(delete(api_processes).where(api_processes.c.id == process_id))


def cancel_unwaited(connection: Connection, now: float) -> list[str]:
    """End jobs whose API process has no lease any more, or never had one; their ids."""
    waits = exists().where(
        api_processes.c.id == jobs.c.waiter_id, api_processes.c.lease_until > now
    )
    left = select(jobs.c.id).where(WAITED_FOR, ~waits).limit(ROUND)
    free = picked(left.with_for_update(skip_locked=True, of=jobs))
    rows = connection.execute(
        finishing.cancelling(now).where(jobs.c.id.in_(free)).returning(*TAKEN)
    ).all()
    attempts.close(connection, [taken(row, Outcome.CANCELLED) for row in rows], now=now)
    return [row.id for row in rows]


def purge(connection: Connection, now: float) -> None:
    """Forget leases that have run out: a job that names none of those left is nobody's, too."""
    connection.execute(delete(api_processes).where(api_processes.c.lease_until <= now))
