"""Stored chats: whose they are, and which jobs are none."""

import pytest

from tests.api.conftest import chat, completion, error_of, submit
from tests.api.test_guard import door  # noqa: F401  a server that asks for keys

URL = "/v1/chat/completions"


def completion_id(job: dict) -> str:
    return job["id"].replace("job_", "chatcmpl-")


def end(hands, job: dict) -> None:
    output = {"id": completion_id(job), "object": "chat.completion"}
    hands.finish(hands.claim(job["id"]), output=output)


def test_only_ended_chats_that_were_to_be_stored_are_there(client, hands):
    # a body in which the word stands elsewhere, one that is no chat, one that waits
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"store": True}}}
    tools = [{"type": "function", "function": tool}]
    said = chat(messages=[{"role": "user", "content": '"store":true'}])
    jobs = [chat(store=True), said, chat(tools=tools, tool_choice="none"), completion(), chat()]
    ids = []
    for job in jobs:
        made = submit(client, job)
        end(hands, made)
        ids.append(completion_id(made))
    waits = completion_id(submit(client, chat(store=True)))
    assert [client.get(f"{URL}/{each}").status_code for each in ids] == [200, 404, 404, 404, 404]
    assert client.get(f"{URL}/{waits}").status_code == 404
    assert len(client.get(URL).json()["data"]) == 1


def test_another_tenants_is_not_there(door, sqlite_settings, hands):  # noqa: F811
    acme, globex = door.key("acme"), door.key("globex")
    made = door.client.post("/v1/jobs", json=chat(store=True), headers=acme).json()
    end(hands, made)
    path = f"{URL}/{completion_id(made)}"
    assert door.client.get(path, headers=acme).status_code == 200
    for method, at in (("GET", path), ("DELETE", path), ("GET", f"{path}/messages")):
        reply = door.client.request(method, at, headers=globex)
        assert reply.status_code == 404
        assert error_of(reply)["code"] == "completion_not_found"
    reply = door.client.post(path, json={"metadata": {"k": "v"}}, headers=globex)
    assert reply.status_code == 404
    assert door.client.get(URL, headers=globex).json()["data"] == []
    assert door.client.get(path, headers=acme).json()["metadata"] == {}


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "metadata"), ({"metadata": {"k": 1}}, "metadata.k"), ({"metadata": {}, "x": 1}, "x")],
)
def test_odd_labels_are_refused_by_name(sqlite_client, hands, body, param):
    made = submit(sqlite_client, chat(store=True))
    end(hands, made)
    reply = sqlite_client.post(f"{URL}/{completion_id(made)}", json=body)
    assert reply.status_code == 400
    assert error_of(reply)["param"] == param


def test_an_unknown_cursor_is_refused(sqlite_client):
    for after in ("chatcmpl-1", "nothing"):
        assert error_of(sqlite_client.get(URL, params={"after": after}))["param"] == "after"
