"""Who may come in, and that nobody sees what is another's."""

import dataclasses
import re
import statistics
import threading
import time

import httpx
import pytest
from sqlalchemy import Engine, event

from api.app import create_app
from api.guard import OPEN_PATHS, needed_scope
from api.keyring import KEPT_S
from jobs import keys, tenants
from jobs.addresses import is_loopback
from jobs.database import Database
from jobs.keys import Scope
from jobs.settings import Settings, SettingsError
from jobs.tenants import DEFAULT_TENANT, Quotas
from tests.api.conftest import completion, error_of, serving, submit, until


@dataclasses.dataclass
class Door:
    """A server that asks for keys, and one key after another to come with."""

    client: httpx.Client
    database: Database

    def call(self, function, *args, **kwargs):
        with self.database.begin() as connection:
            return function(connection, *args, now=self.database.clock(connection), **kwargs)

    def key(self, tenant=DEFAULT_TENANT, scopes=keys.TENANT_SCOPES) -> dict[str, str]:
        _, key = self.call(keys.create, tenant, "test", scopes)
        return {"authorization": f"Bearer {key}"}


@pytest.fixture
def door(sqlite_settings):
    settings = dataclasses.replace(
        sqlite_settings, auth="keys", host="127.0.0.1", max_failed_keys_per_minute=20
    )
    database = Database(settings.database_url)
    with serving(settings) as client:
        door = Door(client, database)
        for tenant in ("acme", "globex"):
            door.call(tenants.create, tenant, Quotas())
        yield door
    database.dispose()


def routes(settings):
    for route in create_app(settings).routes:
        for method in route.methods:
            yield method, re.sub(r"\{\w+\}", "job_1", route.path)


def test_no_route_but_the_health_checks_is_open(door, sqlite_settings):
    weak = door.key(scopes=[Scope.WEBHOOKS])
    for method, path in routes(sqlite_settings):
        reply = door.client.request(method, path)
        if path in OPEN_PATHS:
            assert reply.status_code in (200, 503)
            continue
        assert reply.status_code == 401, (method, path)
        assert error_of(reply)["code"] == "invalid_api_key"
        assert reply.headers["www-authenticate"] == "Bearer"
        if needed_scope(method, path) is not Scope.WEBHOOKS:
            reply = door.client.request(method, path, headers=weak)
            assert reply.status_code == 403, (method, path)
            assert error_of(reply)["code"] == "insufficient_scope"
    assert door.client.get("/nowhere").status_code == 401
    assert door.client.get("/nowhere", headers=door.key()).status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("GET", "/v1/jobs", Scope.READ),
        ("POST", "/v1/jobs", Scope.WRITE),
        ("DELETE", "/v1/anything/new", Scope.WRITE),
        ("GET", "/v1/webhook_endpoints/x/deliveries", Scope.WEBHOOKS),
        ("GET", "/metrics", Scope.METRICS),
        ("GET", "/admin/v1/keys", Scope.ADMIN),
    ],
)
def test_a_path_needs_its_scope(method, path, scope):
    assert needed_scope(method, path) is scope


def test_an_ordinary_key_cannot_make_keys_or_see_the_deployment(door):
    for method, path in (
        ("GET", "/admin/v1/keys"),
        ("POST", "/admin/v1/keys"),
        ("POST", "/admin/v1/tenants/default"),
        ("GET", "/metrics"),
    ):
        assert door.client.request(method, path, headers=door.key()).status_code == 403
    assert door.client.get("/metrics", headers=door.key(scopes=[Scope.METRICS])).status_code == 200


def test_another_tenants_job_takes_no_other_time_than_none(door):
    """The same statements run, and neither is slower: no watch tells that it is there."""
    ours, theirs = door.key("acme"), door.key("globex")
    job_id = door.client.post("/v1/jobs", json=completion(), headers=ours).json()["id"]
    random_id = "job_" + "0" * len(job_id.removeprefix("job_"))
    statements: list[str] = []

    def note(connection, cursor, statement, parameters, context, many):
        of_calls = threading.current_thread().name.startswith("api-the database's")
        if of_calls and ("FROM jobs" in statement or "UPDATE jobs" in statement):
            statements.append(statement)

    took: dict[str, list[float]] = {job_id: [], random_id: []}
    event.listen(Engine, "before_cursor_execute", note)
    try:
        for method, path in (("GET", "/v1/jobs/{}"), ("POST", "/v1/jobs/{}/cancel")):
            asked = {}
            for each in took:
                statements.clear()
                door.client.request(method, path.format(each), headers=theirs)
                asked[each] = list(statements)
            assert asked[job_id] == asked[random_id] != []
        for _ in range(40):
            for each, times in took.items():  # in turns: what else the machine does meets both
                begun = time.perf_counter()
                assert door.client.get(f"/v1/jobs/{each}", headers=theirs).status_code == 404
                times.append(time.perf_counter() - begun)
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    there, nowhere = (statistics.median(times) for times in took.values())
    assert 0.5 < there / nowhere < 2


def test_another_tenants_job_is_not_there(door):
    ours, theirs = door.key("acme"), door.key("globex")
    door.client.headers.update(ours)
    job = submit(door.client, completion(prompt="the fox"))
    del door.client.headers["authorization"]
    random_id = "job_" + "0" * len(job["id"].removeprefix("job_"))
    for method, path in (
        ("GET", "/v1/jobs/{}"),
        ("GET", "/v1/jobs/{}?wait=1"),
        ("POST", "/v1/jobs/{}/cancel"),
        ("GET", "/v1/jobs/{}/events"),
    ):
        replies = [
            door.client.request(method, path.format(job_id), headers=theirs)
            for job_id in (job["id"], random_id)
        ]
        assert [reply.status_code for reply in replies] == [404, 404], path
        one, other = (error_of(reply) for reply in replies)
        assert one["message"].replace(job["id"], random_id) == other["message"]
    assert door.client.get("/v1/jobs", headers=theirs).json()["data"] == []
    after = door.client.get(f"/v1/jobs?after={job['id']}", headers=theirs)
    assert after.status_code == 400
    assert [j["id"] for j in door.client.get("/v1/jobs", headers=ours).json()["data"]] == [
        job["id"]
    ]
    assert door.client.get(f"/v1/jobs/{job['id']}", headers=ours).json()["status"] == "queued"


def test_a_revoked_key_is_refused_within_seconds(door):
    record, key = door.call(keys.create, DEFAULT_TENANT, "test", [Scope.READ])
    headers = {"authorization": f"Bearer {key}"}
    assert door.client.get("/v1/jobs", headers=headers).status_code == 200
    door.call(keys.revoke, record.id)
    assert KEPT_S <= 5
    until(lambda: door.client.get("/v1/jobs", headers=headers).status_code == 401, KEPT_S + 20)


def test_who_guesses_is_told_to_wait_and_a_known_key_goes_on(door):
    headers = door.key()
    assert door.client.get("/v1/jobs", headers=headers).status_code == 200
    guess = {"authorization": "Bearer tm_000000000000_" + "a" * 43}
    statuses = [door.client.get("/v1/jobs", headers=guess).status_code for _ in range(25)]
    assert statuses == [401] * 20 + [429] * 5
    reply = door.client.get("/v1/jobs", headers=guess)
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    assert error_of(reply)["code"] == "too_many_keys"
    assert door.client.get("/v1/jobs", headers=headers).status_code == 200


def test_behind_a_trusted_proxy_who_guesses_is_told_apart_from_others(sqlite_settings):
    guess = {"authorization": "Bearer tm_000000000000_" + "a" * 43}
    for trusted, others in (("127.0.0.1", 401), ("10.0.0.0/8", 429)):
        settings = dataclasses.replace(
            sqlite_settings, auth="keys", max_failed_keys_per_minute=5, trusted_proxies=trusted
        )
        with serving(settings) as client:
            for _ in range(8):
                client.get("/v1/jobs", headers=guess | {"x-forwarded-for": "192.0.2.1"})
            reply = client.get("/v1/jobs", headers=guess | {"x-forwarded-for": "192.0.2.2"})
            assert reply.status_code == others
    with pytest.raises(SettingsError, match="TOKENMILL_TRUSTED_PROXIES"):
        Settings(trusted_proxies="127.0.0.1, proxy")


@pytest.mark.parametrize("value", ["", "Basic abc", "Bearer", "tm_x", "Bearer " + "a" * 2000])
def test_an_odd_header_is_no_key(door, value):
    reply = door.client.get("/v1/jobs", headers={"authorization": value})
    assert reply.status_code == 401
    assert error_of(reply)["type"] == "authentication_error"


def test_two_keys_at_once_are_refused(door):
    one, two = door.key(), door.key()
    headers = [("authorization", each["authorization"]) for each in (one, two)]
    assert door.client.get("/v1/jobs", headers=headers).status_code == 400


def test_without_keys_only_this_machine_is_served():
    for host in ("0.0.0.0", "::", "10.1.2.3", "example.com"):
        with pytest.raises(SettingsError, match="TOKENMILL_AUTH"):
            Settings(host=host)
        Settings(host=host, auth="keys")
    for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        assert is_loopback(host)
        Settings(host=host)


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "rebound.example"},
        {"host": ""},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"host": "[::1"},
    ],
)
def test_a_web_page_cannot_use_the_single_users_browser(sqlite_client, headers):
    reply = sqlite_client.get("/v1/jobs", headers=headers)
    assert reply.status_code in (400, 403)
    if reply.status_code == 403:
        assert error_of(reply)["code"] == "not_local"


def test_a_page_of_this_machine_may(sqlite_client):
    headers = {"origin": "http://localhost:3000", "host": "localhost:8000"}
    assert sqlite_client.get("/v1/jobs", headers=headers).status_code == 200
