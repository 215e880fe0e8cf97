"""The operator's look at failed jobs, and queueing them again."""

import pytest

from jobs.lifecycle import ErrorCode, JobState, error_object
from tests.api.conftest import MODEL, error_of, submit

FAILED = {
    "state": JobState.FAILED, "output": None, "completion_tokens": 0, "finish_reason": "error",
    "error": error_object(ErrorCode.NUMERICAL_ERROR, "no numbers"),
}  # fmt: skip


def test_a_failed_job_is_listed_and_queued_again_by_its_id(client, hands):
    job_id = submit(client)["id"]
    hands.finish(hands.claim(job_id), **FAILED)
    [listed] = client.get(f"/admin/v1/dead_jobs?error=numerical_error&model={MODEL}").json()["data"]
    assert (listed["id"], listed["error"], listed["reason"]) == (
        job_id, "numerical_error", "no numbers",
    )  # fmt: skip
    assert client.get("/admin/v1/dead_jobs?error=poisoned").json()["data"] == []
    assert client.get("/admin/v1/dead_jobs?tenant=acme").json()["data"] == []
    reply = client.post("/admin/v1/dead_jobs/requeue", json={"ids": [job_id, "job_none"]})
    assert reply.json()["data"] == [
        {"id": job_id, "requeued": True, "reason": None},
        {"id": "job_none", "requeued": False, "reason": "there is no such job"},
    ]
    job = client.get(f"/v1/jobs/{job_id}").json()
    assert (job["status"], job["attempt"], len(job["attempts"])) == ("queued", 0, 1)
    hands.finish(hands.claim(job_id))
    assert client.get(f"/v1/jobs/{job_id}").json()["status"] == "succeeded"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "ids"),
        ({"ids": []}, "ids"),
        ({"ids": ["x"] * 501}, "ids"),
        ({"ids": ["\0"]}, "ids[0]"),
        ({"ids": [5]}, "ids[0]"),
        ({"ids": ["job_1"], "all": True}, "all"),
    ],
)
def test_an_odd_body_is_refused_by_name(sqlite_client, body, param):
    reply = sqlite_client.post("/admin/v1/dead_jobs/requeue", json=body)
    assert reply.status_code == 400
    assert error_of(reply)["param"] == param
