"""Whatever goes wrong is said in one shape, with an id, and nothing of ours shows."""

import contextlib
import logging
import sqlite3
from urllib.parse import urlsplit

from tests.api.conftest import completion, error_of, serving, submit


def test_an_unknown_path_is_not_found(sqlite_client):
    reply = sqlite_client.get("/v1/engines")
    assert reply.status_code == 404
    assert error_of(reply)["type"] == "invalid_request_error"
    assert sqlite_client.get("/v1/jobs/").status_code == 404  # no redirect either


def test_another_method_is_refused_naming_those_allowed(sqlite_client):
    for path, method, allowed in (
        ("/v1/jobs", "DELETE", ["GET", "POST"]),
        ("/v1/jobs/job_1/cancel", "GET", ["POST"]),
        ("/v1/models", "POST", ["GET"]),
        ("/v1/responses/input_tokens", "PUT", ["POST"]),
        ("/metrics", "PUT", ["GET"]),
    ):
        reply = sqlite_client.request(method, path)
        assert reply.status_code == 405
        assert reply.headers["allow"] == ", ".join(allowed)
        only = " and ".join(allowed)
        assert error_of(reply)["message"] == f"{method} is not allowed here, only {only}"


def test_every_reply_has_its_own_id(sqlite_client):
    paths = ("/v1/jobs", "/v1/models", "/health/live", "/health/ready", "/metrics", "/nowhere")
    replies = [sqlite_client.get(path) for path in paths]
    replies.append(sqlite_client.post("/v1/jobs", json=completion()))
    ids = {reply.headers["x-request-id"] for reply in replies}
    assert len(ids) == len(replies)


def test_a_fault_of_ours_shows_no_trace(sqlite_settings, monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise RuntimeError("canary: SELECT * FROM secrets")

    with serving(sqlite_settings) as client:
        monkeypatch.setattr("jobs.store.list_jobs", broken)
        with caplog.at_level(logging.ERROR):
            reply = client.get("/v1/jobs")
        assert reply.status_code == 500
        assert error_of(reply)["code"] == "internal_error"
        assert "canary" not in reply.text
        assert "Traceback" not in reply.text
        # the log has it, under the id that the client was given
        (record,) = [each for each in caplog.records if each.name == "api.middleware"]
        assert reply.headers["x-request-id"] in record.getMessage()
        assert "canary" in caplog.text
        assert client.get("/v1/models").status_code == 200


def test_no_prompt_and_no_password_is_ever_logged(sqlite_settings, caplog):
    canary = "a prompt nobody may read"
    with caplog.at_level(logging.DEBUG), serving(sqlite_settings) as client:
        submit(client, completion(prompt=canary))
        assert client.post("/v1/jobs", json=completion(prompt=canary, n=0)).status_code == 400
        file = sqlite_settings.database_url.removeprefix("sqlite:///")
        with contextlib.closing(sqlite3.connect(file)) as database:
            database.execute(
                "CREATE TRIGGER broken BEFORE INSERT ON jobs "
                "BEGIN SELECT RAISE(ABORT, 'a fault of ours'); END"
            )
        # the statement fails with the prompt among its parameters
        assert client.post("/v1/jobs", json=completion(prompt=canary)).status_code == 500
    assert "Traceback" in caplog.text
    assert canary not in caplog.text
    assert urlsplit(sqlite_settings.redis_url).password not in caplog.text
