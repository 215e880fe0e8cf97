"""Tenants and their keys: what is kept, what opens what, until when."""

import pytest
from sqlalchemy import select

from jobs import keys, tenants
from jobs.database import Database
from jobs.keys import KeyRefused, Scope, UnknownKey
from jobs.models import api_keys, idempotency_keys
from jobs.tenants import DEFAULT_TENANT, Quotas, TenantError, UnknownTenant
from tests.jobs.conftest import NOW, new_job

HASH = b"\1" * 32


@pytest.fixture
def two(bench):
    """Two tenants beside whatever there was."""
    bench.call(tenants.create, "acme", Quotas(max_queued_jobs=3), now=NOW)
    bench.call(tenants.create, "globex", Quotas(), now=NOW)
    return bench


def make(bench, tenant="acme", scopes=keys.TENANT_SCOPES):
    return bench.call(keys.create, tenant, "a service", scopes, now=NOW)


def test_a_key_says_whose_it_is_and_what_it_may(two):
    record, key = make(two, scopes=[Scope.WRITE, Scope.READ])
    principal = two.call(keys.find, key)
    assert (principal.tenant, principal.key_id) == ("acme", record.id)
    assert principal.scopes == {Scope.READ, Scope.WRITE}
    assert principal.quotas == Quotas(max_queued_jobs=3)
    assert record.id in key


def test_what_is_kept_is_no_key(two):
    _, key = make(two)
    with two.database.read() as connection:
        [row] = connection.execute(select(api_keys))
    secret = key.split("_", 2)[2]
    assert secret not in repr(tuple(row))
    assert len(key) > 32 + len("tm_")


@pytest.mark.parametrize(
    "wrong", ["", "tm_", "sk-123", "tm_000000000000_" + "a" * 43, "tm_ü", "\ud800", "a" * 10_000]
)
def test_what_was_never_handed_out_opens_nothing(two, wrong):
    make(two)
    assert two.call(keys.find, wrong) is None


def test_another_secret_behind_a_known_id_opens_nothing(two):
    _, key = make(two)
    changed = key[:-1] + ("A" if key[-1] != "A" else "B")
    assert two.call(keys.find, changed) is None
    assert two.call(keys.find, key + " ") is None


def test_a_revoked_key_opens_nothing_and_stays_revoked_at_its_first_time(two):
    record, key = make(two)
    assert two.call(keys.revoke, record.id, now=NOW + 1).revoked_at == NOW + 1
    assert two.call(keys.find, key) is None
    assert two.call(keys.revoke, record.id, now=NOW + 9).revoked_at == NOW + 1
    with pytest.raises(UnknownKey):
        two.call(keys.revoke, "000000000000", now=NOW)


def test_keys_are_listed_by_tenant_or_all(two):
    ours, _ = make(two)
    theirs, _ = make(two, tenant="globex")
    assert two.call(keys.list_keys, "acme") == [ours]
    assert {record.id for record in two.call(keys.list_keys)} == {ours.id, theirs.id}


def test_a_key_that_cannot_be_is_refused(two):
    with pytest.raises(UnknownTenant):
        make(two, tenant="nobody")
    for name in ("", "a\0b", "x" * 129):
        with pytest.raises(KeyRefused, match="name"):
            two.call(keys.create, "acme", name, [Scope.READ], now=NOW)
    with pytest.raises(KeyRefused, match="scope"):
        make(two, scopes=[])


def test_quotas_can_be_changed_and_lifted(two):
    assert two.call(tenants.change, "acme", {"tokens_per_minute": 5}).quotas == Quotas(
        max_queued_jobs=3, tokens_per_minute=5
    )
    assert two.call(tenants.change, "acme", {"max_queued_jobs": None}).quotas == Quotas(
        tokens_per_minute=5
    )
    for wrong in (-1, 2**60):
        with pytest.raises(TenantError, match="max_queued_jobs"):
            two.call(tenants.change, "acme", {"max_queued_jobs": wrong})
    with pytest.raises(UnknownTenant):
        two.call(tenants.change, "nobody", {"max_queued_jobs": 1})


def test_ids_of_tenants_are_plain_and_taken_once(two):
    for wrong in ("", "A", "a b", "-a", "x" * 65, "ü"):
        with pytest.raises(TenantError):
            two.call(tenants.create, wrong, Quotas(), now=NOW)
    with pytest.raises(TenantError, match="already"):
        two.call(tenants.create, "acme", Quotas(), now=NOW)


def test_one_idempotency_key_of_two_tenants_is_two_keys(bench):
    ours, theirs = new_job(), new_job()
    for tenant, job in (("acme", ours), ("globex", theirs)):
        submitted = bench.submit(job, tenant=tenant, key="k", body_sha256=HASH)
        assert [record.id for record in submitted] == [job.id]
    assert bench.submit(new_job(), tenant="acme", key="k", body_sha256=HASH)[0].id == ours.id
    with bench.database.read() as connection:
        kept = connection.execute(select(idempotency_keys.c.tenant_id, idempotency_keys.c.key))
        assert sorted(map(tuple, kept)) == [("acme", "k"), ("globex", "k")]


def test_the_default_tenant_comes_with_the_schema(sqlite_url):
    database = Database(sqlite_url)
    with database.read() as connection:
        assert [t.id for t in tenants.list_tenants(connection)] == [DEFAULT_TENANT]
    database.dispose()
