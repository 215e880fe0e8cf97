"""That no statement forgets its tenant, and that the list of those that may is not a loophole.

tests/conftest.py watches every statement of the whole run; here the guard itself is tried.
"""

import ast

import pytest
from sqlalchemy import func, insert, or_, select, update

from jobs.models import Base, idempotency_keys, jobs, workers
from tests import tenant_guard
from tests.conftest import REPOSITORY

MINE = jobs.c.tenant_id == "mine"

KEPT = {
    "a filtered select": select(jobs.c.id).where(jobs.c.id == "job_1", MINE),
    "a filtered update": update(jobs).where(MINE).values(priority=1),
    "a subquery": select(func.count()).select_from(select(jobs.c.id).where(MINE).subquery()),
    "an insert": insert(jobs).values(id="job_1", tenant_id="mine"),
    "a table of nobody": select(workers.c.id),
}
FORGOTTEN = {
    "a select": select(jobs.c.id).where(jobs.c.id == "job_1"),
    "no where": select(jobs.c.id),
    "an or": select(jobs.c.id).where(or_(MINE, jobs.c.id == "job_1")),
    "another comparison": select(jobs.c.id).where(jobs.c.tenant_id != "mine"),
    "another table's tenant": select(jobs.c.id).where(idempotency_keys.c.tenant_id == "mine"),
    "a subquery": select(workers.c.id).where(
        workers.c.id.in_(select(jobs.c.worker_id).where(jobs.c.id == "job_1"))
    ),
    "an update": update(jobs).where(jobs.c.id == "job_1").values(priority=1),
    "an insert": insert(jobs).values(id="job_1"),
    "a join": select(jobs.c.id)
    .join(idempotency_keys, idempotency_keys.c.job_ids == jobs.c.id)
    .where(MINE),
    "an alias": select(jobs.alias("others").c.id).where(MINE),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_statement_that_names_its_tenant_is_let_through(name):
    assert tenant_guard.unfiltered(KEPT[name], []) is None


@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_statement_that_forgets_its_tenant_is_seen(name):
    assert tenant_guard.unfiltered(FORGOTTEN[name], []) is not None


def test_rows_given_beside_an_insert_are_looked_at():
    assert tenant_guard.unfiltered(insert(jobs), [[{"id": "1", "tenant_id": "mine"}]]) is None
    assert tenant_guard.unfiltered(insert(jobs), [[{"id": "1"}]]) is not None


def test_every_table_has_a_tenant_but_those_of_the_deployment_itself():
    without = {table.name for table in Base.metadata.sorted_tables if "tenant_id" not in table.c}
    assert without == tenant_guard.UNOWNED


def test_the_list_names_functions_that_exist_and_says_why():
    for name, reason in tenant_guard.ALL_TENANTS.items():
        *module, function = name.split(".")
        tree = ast.parse((REPOSITORY.joinpath(*module).with_suffix(".py")).read_text())
        assert any(isinstance(n, ast.FunctionDef) and n.name == function for n in tree.body), name
        assert len(reason) > 5


def test_statements_stand_in_jobs_alone():
    """Where the guard's list can be read in one place."""
    for folder in ("api", "cli", "worker"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            text = path.read_text()
            assert "from jobs.models" not in text, path
            assert "import jobs.models" not in text, path
