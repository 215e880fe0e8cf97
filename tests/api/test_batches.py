"""What stands under a batch over HTTP: rows before the end, pause and resume, retry."""

import json
import os
from dataclasses import replace

import pytest
from sqlalchemy import select, update

from api.routes import batch_rows
from jobs import retention, sweep
from jobs.database import Database
from jobs.models import attempts, batches
from tests.api.conftest import MODEL, error_of, hands_on, serving
from tests.api.test_guard import door  # noqa: F401  a server that asks for keys
from worker import file_sweeper
from worker.batch_keeper import BatchKeeper
from worker.file_sweeper import FileSweeper


@pytest.fixture
def kept(settings, tmp_path):
    return replace(settings, files_dir=str(tmp_path / "files"))


@pytest.fixture
def shop(kept):
    """A server, a worker's hands, and a keeper that turns when told."""
    keeper = BatchKeeper(kept)
    with serving(kept) as client, hands_on(kept) as hands:
        hands.register()
        yield client, hands, lambda: [None for _ in iter(keeper.round, False)]
    keeper.stop()


def create(client, num, **fields):
    rows = []
    for i in range(num):
        body = {"model": MODEL, "prompt": f"say {i}", "max_tokens": 4} | fields.pop(f"body{i}", {})
        rows.append({"custom_id": f"row-{i}", "url": "/v1/completions", "body": body})
    data = "\n".join(map(json.dumps, rows))
    file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", data)}).json()
    make = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    reply = client.post("/v1/batches", json=make | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()["id"]


def jobs_of(client, batch_id):
    found = client.get("/v1/jobs", params={"batch_id": batch_id, "limit": 1000}).json()["data"]
    return {int(each["custom_id"][4:]): each["id"] for each in found}


def results(client, batch_id, **query):
    page = client.get(f"/v1/batches/{batch_id}/results", params=query).json()
    return [each["row"] for each in page["data"]], page


def test_rows_are_read_in_order_before_the_end(shop):
    client, hands, turn = shop
    batch_id = create(client, 6)
    turn()
    assert results(client, batch_id)[1] == {
        "object": "list", "data": [], "last_row": None, "has_more": True,
    }  # fmt: skip
    ids = jobs_of(client, batch_id)
    for i in (0, 1, 3, 5):
        hands.finish(hands.claim(ids[i]), output={"text": f"answer {i}"})
    rows, page = results(client, batch_id)
    assert rows == [0, 1]
    assert page["data"][1]["custom_id"] == "row-1"
    assert page["data"][1]["response"]["body"] == {"text": "answer 1"}
    assert results(client, batch_id, after=1)[0] == []
    assert results(client, batch_id, skip_unfinished="true")[0] == [0, 1, 3, 5]
    assert results(client, batch_id, skip_unfinished="true", after=1, limit=1)[0] == [3]
    for i in (2, 4):
        hands.finish(hands.claim(ids[i]), output={"text": f"answer {i}"})
    rows, page = results(client, batch_id, after=1)
    assert (rows, page["has_more"]) == ([2, 3, 4, 5], True)
    turn()
    assert results(client, batch_id, after=1)[1]["has_more"] is False
    assert client.get(f"/v1/batches/{batch_id}").json()["status"] == "completed"


def test_rows_of_a_paused_batch_stay_in_sql(shop):
    client, hands, turn = shop
    batch_id = create(client, 3)
    paused = client.post(f"/v1/batches/{batch_id}/pause").json()
    assert paused["paused_at"] >= paused["created_at"]
    turn()
    lone = client.post("/v1/jobs", json={
        "url": "/v1/completions", "body": {"model": MODEL, "prompt": "x"}
    }).json()["id"]  # fmt: skip

    def publishable():
        return hands.call(sweep.publishable, MODEL, limit=10)

    assert set(publishable()) <= {lone}
    assert publishable() == []
    assert client.post(f"/v1/batches/{batch_id}/resume").json()["paused_at"] is None
    published = set(publishable())
    listed = client.get("/v1/jobs", params={"batch_id": batch_id}).json()["data"]
    assert published <= {each["id"] for each in listed}
    assert client.post(f"/v1/batches/{batch_id}/resume").status_code == 200


def test_what_failed_for_no_fault_of_its_own_is_tried_again(shop):
    client, hands, turn = shop
    batch_id = create(client, 4, body3={"temperature": "hot"}, metadata={"a": "b"})
    reply = client.post(f"/v1/batches/{batch_id}/retry_failed")
    assert (reply.status_code, error_of(reply)["code"]) == (409, "batch_not_ended")
    turn()
    ids = jobs_of(client, batch_id)
    error = {"message": "no", "type": "server_error", "param": None, "code": "poisoned"}
    hands.finish(hands.claim(ids[0]))
    hands.finish(hands.claim(ids[1]), state="failed", output=None, error=error)
    client.post(f"/v1/batches/{batch_id}/cancel")
    turn()
    again = client.post(f"/v1/batches/{batch_id}/retry_failed").json()
    assert (again["metadata"], again["status"]) == ({"a": "b"}, "validating")
    turn()
    rows = jobs_of(client, again["id"])
    assert sorted(rows) == [1, 2]
    for job_id in rows.values():
        hands.finish(hands.claim(job_id))
    turn()
    counts = client.get(f"/v1/batches/{again['id']}").json()["request_counts"]
    assert counts == {"total": 2, "completed": 2, "failed": 0}
    reply = client.post(f"/v1/batches/{again['id']}/retry_failed")
    assert error_of(reply)["code"] == "nothing_to_retry"


def test_metrics_count_batches_and_their_rows(shop):
    client, _, turn = shop
    create(client, 3)
    turn()
    lines = client.get("/metrics").text.splitlines()
    assert 'tokenmill_batches{state="in_progress"} 1.0' in lines
    assert 'tokenmill_batches{state="failed"} 0.0' in lines
    assert f'tokenmill_jobs{{model="{MODEL}",state="queued"}} 3.0' in lines


def test_another_tenants_batch_is_not_there(door):  # noqa: F811
    door.client.headers.update(door.key("acme"))
    batch_id = create(door.client, 1)
    door.client.headers.update(door.key("globex"))
    calls = [("GET", ""), ("POST", "/cancel"), ("GET", "/results"), ("POST", "/pause"),
             ("POST", "/resume"), ("POST", "/retry_failed")]  # fmt: skip
    for method, path in calls:
        reply = door.client.request(method, f"/v1/batches/{batch_id}{path}")
        assert error_of(reply)["code"] == "batch_not_found"
    assert door.client.get("/v1/batches").json()["data"] == []
    reply = door.client.get("/v1/batches", params={"after": batch_id})
    assert error_of(reply)["param"] == "after"


def age(database, batch_id, seconds):
    """Its rows' time is over so much sooner."""
    with database.begin() as connection:
        connection.execute(
            update(batches)
            .where(batches.c.id == batch_id)
            .values(rows_expire_at=batches.c.rows_expire_at - seconds)
        )


def ended(client, hands, turn, num, **fields):
    """A batch all of whose rows have been answered."""
    batch_id = create(client, num, **fields)
    turn()
    for job_id in jobs_of(client, batch_id).values():
        hands.finish(hands.claim(job_id))
    turn()
    return client.get(f"/v1/batches/{batch_id}").json()


def said_to_be_gone(client, batch_id):
    for verb, call in ((client.get, "results"), (client.post, "retry_failed")):
        reply = verb(f"/v1/batches/{batch_id}/{call}")
        assert (reply.status_code, error_of(reply)["code"]) == (404, "rows_removed")


@pytest.mark.parametrize("killed", [False, True])
def test_rows_and_files_go_when_their_time_is_over_and_counts_stay(shop, kept, monkeypatch, killed):
    monkeypatch.setattr(retention, "ROUND", 2)
    monkeypatch.setattr(file_sweeper, "MOST_ROUNDS", 2 if killed else 20)
    client = shop[0]
    gone, other = ended(*shop, 7, rows_ttl_s=60), ended(*shop, 1)
    assert gone["rows_expire_at"] - gone["completed_at"] == 60
    assert other["rows_expire_at"] is None
    database, ids = Database(kept.database_url), set(jobs_of(client, gone["id"]).values())
    assert FileSweeper(kept, database).empty_batches()
    assert results(client, gone["id"])[0] == list(range(7))  # not yet
    age(database, gone["id"], 61)
    said_to_be_gone(client, gone["id"])
    assert FileSweeper(kept, database).empty_batches()
    assert len(jobs_of(client, gone["id"])) == 7  # who had begun to read them reads on
    age(database, gone["id"], retention.GRACE_S)
    if killed:
        assert not FileSweeper(kept, database).empty_batches()
        assert len(jobs_of(client, gone["id"])) == 3
        assert client.get(f"/v1/files/{gone['output_file_id']}/content").status_code == 200
        assert client.get(f"/v1/batches/{gone['id']}").json()["rows_removed_at"] is None
        said_to_be_gone(client, gone["id"])
    while not FileSweeper(kept, database).empty_batches():
        pass
    with database.read() as connection:
        assert ids.isdisjoint(connection.scalars(select(attempts.c.job_id)))
    database.dispose()
    assert (jobs_of(client, gone["id"]), len(jobs_of(client, other["id"]))) == ({}, 1)
    emptied = client.get(f"/v1/batches/{gone['id']}").json()
    assert emptied["rows_removed_at"] >= gone["completed_at"]
    changed = ("rows_removed_at", "rows_expire_at")
    assert emptied == gone | {name: emptied[name] for name in changed}
    assert emptied["request_counts"]["completed"] == 7
    assert client.get(f"/v1/files/{gone['output_file_id']}").status_code == 404
    assert client.get(f"/v1/files/{gone['input_file_id']}").status_code == 200
    assert gone["output_file_id"] not in os.listdir(kept.files_dir)
    said_to_be_gone(client, gone["id"])


def test_a_batch_of_rows_to_try_again_is_not_begun_with_some_of_them(shop, kept, monkeypatch):
    """Rows whose time ends while they are read: the others alone would pass for all of them."""
    client, _, turn = shop
    batch_id = create(client, 3, rows_ttl_s=60)
    turn()
    client.post(f"/v1/batches/{batch_id}/cancel")
    turn()
    database = Database(kept.database_url)
    line = batch_rows.request_line

    def late(record):
        if record.row_number == 1:
            age(database, batch_id, 61)
        return line(record)

    monkeypatch.setattr(batch_rows, "request_line", late)
    reply = client.post(f"/v1/batches/{batch_id}/retry_failed")
    assert (reply.status_code, error_of(reply)["code"]) == (404, "rows_removed")
    assert len(client.get("/v1/batches").json()["data"]) == 1
    database.dispose()


@pytest.mark.parametrize("given", [59, 315_360_001, "60", True])
def test_a_time_to_keep_rows_has_its_bounds(shop, given):
    client, _, _ = shop
    make = {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"}
    reply = client.post("/v1/batches", json=make | {"rows_ttl_s": given})
    assert (reply.status_code, error_of(reply)["param"]) == (400, "rows_ttl_s")


def test_limits_and_progress_stand_in_the_batch(shop):
    client, _, turn = shop
    limits = {"token_budget": 1000, "max_error_rate": 0.25, "deadline_s": 60}
    batch_id = create(client, 4, dedupe=True, **limits)
    turn()
    batch = client.get(f"/v1/batches/{batch_id}").json()
    assert batch["expires_at"] - batch["created_at"] == 60
    assert (batch["token_budget"], batch["max_error_rate"]) == (1000, 0.25)
    assert batch["stop_reason"] is None
    assert batch["dedupe"] is True
    progress = batch["progress"]
    assert progress["rows"] == {
        "total": 4, "waiting": 0, "queued": 4,
        **dict.fromkeys(("running", "succeeded", "failed", "cancelled", "expired"), 0),
    }  # fmt: skip
    assert progress["failures"] == {}
    assert progress["saved"] == {"rows": 0, "tokens": 0}
    [listed] = client.get("/v1/batches").json()["data"]
    assert listed["progress"]["rows"] == progress["rows"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token_budget", 0), ("max_error_rate", 1), ("max_error_rate", -0.1), ("deadline_s", 0),
        ("deadline_s", 2_592_001),
    ],
)  # fmt: skip
def test_a_limit_outside_its_bounds_is_named(shop, field, value):
    client, _, _ = shop
    make = {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h"}
    reply = client.post("/v1/batches", json=make | {field: value})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field
