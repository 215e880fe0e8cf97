"""OpenAI's response object, of a job in any state; and the items of its input and output.

A thought comes first, then the text, then the calls: the order in which a stream tells them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jobs.lifecycle import JobState
from jobs.openai_responses import items_of
from jobs.openai_tools import ToolCall, call_id
from jobs.records import JobRecord

PREFIX = "resp_"
_STATUS = {
    JobState.QUEUED: "queued",
    JobState.RUNNING: "in_progress",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "cancelled",
    JobState.EXPIRED: "failed",
}
_INCOMPLETE = {"length": "max_output_tokens", "deadline": "deadline"}


def response_id(job_id: str) -> str:
    return PREFIX + job_id.removeprefix("job_")


def finished(
    body: Mapping[str, Any],
    job_id: str,
    model: str,
    created: float,
    items: Sequence[Mapping[str, Any]],
    finish_reason: str,
    usage: Mapping[str, Any],  # as a chat tells it
) -> dict[str, Any]:
    """Of a generation that has ended."""
    reason = _INCOMPLETE.get(finish_reason)
    return _response(body, job_id, model, created) | {
        "status": "completed" if reason is None else "incomplete",
        "incomplete_details": None if reason is None else {"reason": reason},
        "output": list(items),
        "usage": _usage(usage),
    }


def of_record(record: JobRecord) -> dict[str, Any]:
    """Of a job as it is now."""
    assert record.body is not None
    if record.output is not None:
        complete = record.output["status"] == "completed"
        return record.output | {"completed_at": record.finished_at if complete else None}
    response = before_its_end(record)
    response["status"] = _STATUS[record.state]
    if record.error is not None:
        fault = record.error["type"] == "invalid_request_error"
        code = "invalid_prompt" if fault else "server_error"
        response["error"] = {"code": code, "message": record.error["message"]}
    return response


def before_its_end(record: JobRecord) -> dict[str, Any]:
    assert record.body is not None
    return _response(record.body, record.id, record.model, record.created_at)


def _usage(chat: Mapping[str, Any]) -> dict[str, Any]:
    cached = chat["prompt_tokens_details"]["cached_tokens"]
    reasoning = chat.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": chat["total_tokens"],
    }


def output_items(
    job_id: str,
    content: str,
    reasoning: str,
    calls: Sequence[ToolCall],
    logprobs: Mapping[str, Any] | None,
) -> list[dict[str, Any]]:
    items = []
    if reasoning:
        items.append(reasoning_item(job_id, reasoning))
    if content or not calls:
        scores = [] if logprobs is None else logprobs["content"]
        items.append(message_item(job_id, content, status="completed", logprobs=scores))
    items += [
        call_item(job_id, index, call.name, call.arguments) for index, call in enumerate(calls)
    ]
    return items


def reasoning_item(job_id: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": item_id("rs", job_id), "type": "reasoning", "summary": [], "content": content}


def text_part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def message_item(
    job_id: str, text: str | None, *, status: str, logprobs: Sequence[Any] = ()
) -> dict[str, Any]:
    """`text` None: it has no part yet."""
    content = [] if text is None else [text_part(text, logprobs)]
    return {
        "id": item_id("msg", job_id),
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def call_item(
    job_id: str, index: int, name: str, arguments: str, *, status: str = "completed"
) -> dict[str, Any]:
    return {
        "id": f"{item_id('fc', job_id)}_{index}",
        "type": "function_call",
        "call_id": call_id(job_id, 0, index),
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def input_items(record: JobRecord) -> list[dict[str, Any]]:
    """What the response answers, in order, each with an id of its own."""
    assert record.body is not None
    items = []
    for number, item in enumerate(items_of(record.body["input"])):
        kind = "msg" if item["type"] == "message" else item["type"]
        whole = {"id": f"{item_id(kind, record.id)}_in{number}", "status": "completed"} | item
        if item["type"] == "message" and isinstance(item["content"], str):
            part = text_part(item["content"]) if item["role"] == "assistant" else {
                "type": "input_text", "text": item["content"],
            }  # fmt: skip
            whole["content"] = [part]
        items.append(whole)
    return items


def following_input(record: JobRecord, value: object) -> list[dict[str, Any]]:
    """An input behind what an earlier response was asked and said; its thoughts are left out."""
    assert record.body is not None
    assert record.output is not None
    said = [item for item in record.output["output"] if item["type"] != "reasoning"]
    return [*items_of(record.body["input"]), *said, *items_of(value)]


def item_id(kind: str, job_id: str) -> str:
    return f"{kind}_{job_id.removeprefix('job_')}"


def _response(body: Mapping[str, Any], job_id: str, model: str, created: float) -> dict[str, Any]:
    def given(name: str, default: Any = None) -> Any:
        value = body.get(name)
        return default if value is None else value

    return {
        "id": response_id(job_id),
        "object": "response",
        "created_at": int(created),
        "completed_at": None,
        "status": "queued",
        "background": given("background", False),
        "error": None,
        "incomplete_details": None,
        "instructions": given("instructions"),
        "max_output_tokens": given("max_output_tokens"),
        "metadata": given("metadata", {}),
        "model": model,
        "output": [],
        "parallel_tool_calls": given("parallel_tool_calls", True),
        "previous_response_id": given("previous_response_id"),
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": given("store", True),
        "temperature": given("temperature", 1.0),
        "text": {"format": {"type": "text"}} | given("text", {}),
        "tool_choice": given("tool_choice", "auto"),
        "tools": given("tools", []),
        "top_logprobs": given("top_logprobs", 0),
        "top_p": given("top_p", 1.0),
        "truncation": "disabled",
        "usage": None,
        "user": given("user"),
    }
