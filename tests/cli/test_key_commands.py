"""`tokenmill keys` and `tokenmill tenants`, against a database."""

import json

import pytest
from click.testing import CliRunner

from cli.main import tokenmill
from jobs import keys
from jobs.database import Database
from jobs.keys import Scope


def found(sqlite_url, key):
    database = Database(sqlite_url)
    with database.read() as connection:
        principal = keys.find(connection, key)
    database.dispose()
    return principal


def test_a_key_is_printed_alone_and_opens_what_it_says(run, sqlite_url):
    run("tenants", "create", "acme", "--quota", "max_queued_jobs=5")
    made = run("keys", "create", "--tenant", "acme", "--name", "web", "--scope", "read")
    principal = found(sqlite_url, made.stdout.strip())
    assert (principal.tenant, principal.scopes) == ("acme", {Scope.READ})
    [listed] = map(json.loads, run("keys", "list", "--tenant", "acme").stdout.splitlines())
    assert (listed["name"], listed["scopes"], listed["revoked"]) == ("web", "read", None)
    run("keys", "revoke", listed["id"])
    assert found(sqlite_url, made.stdout.strip()) is None


def test_quotas_are_shown_changed_and_lifted(run):
    run("tenants", "create", "acme", "--quota", "max_queued_jobs=5")
    run(
        "tenants",
        "set",
        "acme",
        "--quota",
        "max_queued_jobs=none",
        "--quota",
        "tokens_per_minute=9",
    )
    shown = {
        tenant["id"]: tenant
        for tenant in map(json.loads, run("tenants", "list").stdout.splitlines())
    }
    assert (shown["acme"]["max_queued_jobs"], shown["acme"]["tokens_per_minute"]) == (None, 9)
    assert "default" in shown


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["keys", "create", "--tenant", "nobody", "--name", "x"], 1, "no tenant 'nobody'"),
        (["keys", "create", "--name", ""], 1, "name must have"),
        (["keys", "create", "--name", "x", "--scope", "root"], 2, "root"),
        (["keys", "revoke", "nothing"], 1, "no key 'nothing'"),
        (["tenants", "create", "default"], 1, "already"),
        (["tenants", "set", "default", "--quota", "speed=9"], 2, "NAME=NUMBER"),
        (["tenants", "set", "default", "--quota", "max_queued_jobs=-1"], 2, "NAME=NUMBER"),
        (["tenants", "set", "nobody", "--quota", "max_queued_jobs=1"], 1, "no tenant"),
    ],
)
def test_what_cannot_be_done_is_said(run, words, status, said):
    result = run(*words, status=status)
    assert said in result.output
    assert "Traceback" not in result.output


def test_a_database_without_tables_is_named(tmp_path):
    result = CliRunner().invoke(
        tokenmill, ["keys", "list"], env={"DATABASE_URL": f"sqlite:///{tmp_path / 'new.db'}"}
    )
    assert result.exit_code == 1
    assert "tokenmill migrate" in result.output
