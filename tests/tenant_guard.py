"""Sees every statement that runs in this process, and which of them look at all tenants' rows.

A statement on a table with a tenant must compare its `tenant_id` with one value, in the WHERE of
each SELECT, UPDATE and DELETE that names the table, or give each inserted row one. Those of
ALL_TENANTS may not: what workers, the sweeper and the operator do is the whole deployment's.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from sqlalchemy import Engine, Table, event
from sqlalchemy.sql import operators
from sqlalchemy.sql.dml import Delete, Insert, Update
from sqlalchemy.sql.elements import BooleanClauseList, ClauseElement
from sqlalchemy.sql.selectable import Alias, FromClause, Join, Select
from sqlalchemy.sql.visitors import iterate

from jobs.models import Base

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCE_FOLDERS = ("api", "cli", "jobs", "worker")
OWNED = {table for table in Base.metadata.sorted_tables if "tenant_id" in table.c}
# tables of the deployment itself: what is in them belongs to no tenant
UNOWNED = {"workers", "api_processes", "tenants", "engine_deaths", "tallies"}

# module.function: why it sees every tenant
ALL_TENANTS = {
    "jobs.accounting.account_wasted": "a worker's, by the id of a job it had",
    "jobs.attempts.stored_tokens": "a worker's, by the id of a job it had",
    "jobs.accounting.count_prompts": "a worker's, by the id of a job it has",
    "jobs.attempts.add_wasted": "a worker's, of attempts it had",
    "jobs.attempts.close": "whoever's the jobs are that have just been ended, under their fences",
    "jobs.batches.let_go": "a keeper's, by its own name",
    "jobs.batches.num_by_state": "metrics",
    "jobs.batches.paused": "the sweeper's",
    "jobs.batches.take_open": "a keeper's: the sweeper's",
    "jobs.claims.beat": "a worker's, under its fences",
    "jobs.claims.claim": "a worker's: ids come from the runway",
    "jobs.claims.claimed_by": "a worker's, by its own id",
    "jobs.claims.put_back": "a worker's: ids come from the runway",
    "jobs.claims.release": "a worker's, under its fences",
    "jobs.claims._save": "a worker's, under its fences",
    "jobs.files.expire": "the sweeper's",
    "jobs.files.known": "the sweeper's",
    "jobs.dead.list_dead": "the operator's",
    "jobs.dead.requeue": "the operator's",
    "jobs.dead._requeue": "the operator's",
    "jobs.finishing.ended_under": "a worker's, under its fences",
    "jobs.finishing._finish": "a worker's, under its fences",
    "jobs.finishing.revoke": "what Celery revokes; whoever reaches the broker is trusted",
    "jobs.forecast._recent": "the pace of a model, of which only intervals are shown",
    "jobs.forecast._running": "the pace of a model, of which only intervals are shown",
    "jobs.forecast.backlogs": "metrics",
    "jobs.keys.find": "a key says which tenant it is of",
    "jobs.keys.list_keys": "the operator's",
    "jobs.keys.revoke": "the operator's",
    "jobs.lately._ended": "metrics",
    "jobs.order._ahead": "the sweeper's",
    "jobs.order._oldest": "the sweeper's",
    "jobs.order.waiting_tenants": "the sweeper's: whose turn it may be",
    "jobs.places._read": "the order of a model's queue, of which only positions are shown",
    "jobs.places.line": "how many jobs of each tenant run, for the order of a model's queue",
    "jobs.quotas.held_back": "a worker's: ids come from the runway",
    "jobs.retention.empty_one": "the sweeper's: which batch is next; its rows are its tenant's",
    "jobs.store.counts": "metrics",
    "jobs.store.ended": "which jobs have ended, of ids whose waiters have been let in",
    "jobs.store.trace_parents": "the sweeper's: ids go onto the runway",
    "jobs.store.unknown": "a worker's: ids come from the runway",
    "jobs.sweep._publish": "the sweeper's",
    "jobs.sweep.expire": "the sweeper's",
    "jobs.sweep.purge": "the sweeper's",
    "jobs.sweep.reap": "the sweeper's",
    "jobs.sweep.republish": "the sweeper's",
    "jobs.waiting.cancel_unwaited": "the sweeper's",
    "jobs.webhooks.announce": "the sweeper's",
    "jobs.webhooks.purge": "the sweeper's",
    "jobs.webhooks.take_due": "the sweeper's",
    "jobs.webhooks._turns": "of take_due",
}

LOOKS = 30  # at the statements of one line: a simulation runs it a million times
_ROOT = f"{REPOSITORY}/"

looked_at: Counter[tuple[str, int]] = Counter()
found: dict[str, str] = {}  # statement's function: what it lacks
seen: set[str] = set()  # functions of ALL_TENANTS that ran


def watch() -> None:
    """From now on every statement of this process is looked at."""
    event.listen(Engine, "before_execute", _look)


def _look(connection, clause, multiparams, params, execution_options) -> None:
    if not isinstance(clause, ClauseElement):
        return
    where, place = _function()
    if where is None or looked_at[place] >= LOOKS:
        return
    looked_at[place] += 1
    problem = unfiltered(clause, [*multiparams, params])
    if problem is None:
        return
    if where in ALL_TENANTS:
        seen.add(where)
    else:
        found[where] = problem


def unfiltered(clause: ClauseElement, parameters: list[object]) -> str | None:
    """What a statement reads or writes whoever's it is; None where it keeps to one tenant."""
    for node in iterate(clause):
        if isinstance(node, Insert) and node.table in OWNED:
            if not _inserts_tenant(node, parameters):
                return f"INSERT into {node.table.name}"
        elif isinstance(node, Select | Update | Delete):
            if isinstance(node, Select):
                tables = [t for each in node.get_final_froms() for t in _tables(each)]
            else:
                tables = [node.table]
            kept = set(_kept(node.whereclause))
            for table in tables:
                plain = table.element if isinstance(table, Alias) else table
                if plain in OWNED and table.c.tenant_id not in kept:
                    return f"{type(node).__name__.upper()} of {plain.name}"
    return None


def _tables(element: FromClause) -> Iterator[FromClause]:
    if isinstance(element, Join):
        yield from _tables(element.left)
        yield from _tables(element.right)
    elif isinstance(element, Table | Alias):
        yield element


def _kept(where: ClauseElement | None) -> Iterator[object]:
    """Columns that every row must have one value in: compared by `=`, under nothing but AND."""
    if where is None:
        return
    if isinstance(where, BooleanClauseList):
        if where.operator is operators.and_:
            for each in where.clauses:
                yield from _kept(each)
    elif getattr(where, "operator", None) is operators.eq:
        yield from (where.left, where.right)


def _inserts_tenant(insert: Insert, parameters: list[object]) -> bool:
    if insert._values is not None:
        return any(getattr(column, "name", column) == "tenant_id" for column in insert._values)
    if insert._multi_values:
        rows = [row for rows in insert._multi_values for row in rows]
        return all("tenant_id" in {getattr(c, "name", c) for c in row} for row in rows)
    rows = []
    for each in parameters:
        rows += each if isinstance(each, list | tuple) else [each] if each else []
    return bool(rows) and all("tenant_id" in row for row in rows)


def _function() -> tuple[str | None, tuple[str, int]]:
    """The innermost function of ours on the stack, None where a test or a migration asks; and the
    line that it is at."""
    frame = sys._getframe(2)
    while frame is not None:
        asks, where = _asker(frame.f_code.co_filename, frame.f_code.co_name)
        if asks:
            return where, (frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None, ("", 0)


@cache
def _asker(filename: str, function: str) -> tuple[bool, str | None]:
    """Whether it is there that one asks, and by which name."""
    if not filename.startswith(_ROOT):
        return False, None
    file = Path(filename)
    folder, *rest = file.relative_to(REPOSITORY).with_suffix("").parts
    named = not function.startswith("<")  # else a comprehension in one
    if folder in SOURCE_FOLDERS and named and file.name != "database.py":
        return True, ".".join((folder, *rest, function))
    return folder in ("tests", "migrations"), None
