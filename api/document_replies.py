"""What replies are, as JSON Schema. A fuzzer compares each reply that it gets with this."""

from typing import Any

from api.document_bodies import BOOLEAN, INTEGER, NUMBER, TEXT, array, ref
from jobs.attempts import Outcome
from jobs.batch_record import BatchState, StopReason
from jobs.files import PURPOSES
from jobs.lifecycle import RETRYABLE, JobState
from jobs.tenants import QUOTAS
from jobs.webhooks import EventType

Schema = dict[str, Any]

_TIME: Schema = {"type": "number", "description": "seconds since 1970"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_ANY: Schema = {}
_OBJECT: Schema = {"type": "object"}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _record(optional: dict[str, Schema] | None = None, /, **required: Schema) -> Schema:
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
        "additionalProperties": False,
    }


def _kind(name: str) -> Schema:
    """What an `object` or `type` says."""
    return {"const": name}


def _list(of: Schema, **more: Schema) -> Schema:
    return _record(object=_kind("list"), data=array(of), **more)


def _page(of: Schema) -> Schema:
    return _list(of, first_id=_or_null(TEXT), last_id=_or_null(TEXT), has_more=BOOLEAN)


def _deleted(kind: str) -> Schema:
    return _record(id=TEXT, object=_kind(kind), deleted={"const": True})


_ATTEMPT = _record(
    attempt=_COUNT,
    fence=_COUNT,
    worker=TEXT,
    started_at=_TIME,
    ended_at=_or_null(_TIME),
    outcome={"enum": [*map(str, Outcome), None]},
    error=_or_null(TEXT),
    kept_tokens=_COUNT,
    wasted_tokens=_COUNT,
)
_INTERVAL = _or_null(_record(low=NUMBER, high=NUMBER))
_ERROR_FIELDS = {
    "message": TEXT,
    "type": TEXT,
    "param": _or_null(TEXT),
    "code": _or_null(TEXT),
}
_USAGE = _record(
    {"completion_tokens_details": _record(reasoning_tokens=_COUNT)},
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_record(cached_tokens=_COUNT),
)
_CALL = _record(id=TEXT, type=_kind("function"), function=_record(name=TEXT, arguments=TEXT))
_MESSAGE = _record(
    {"reasoning_content": TEXT, "tool_calls": array(_CALL)},
    role=_kind("assistant"),
    content=_or_null(TEXT),
    refusal={"type": "null"},
)
_REASONS = ["stop", "length", "tool_calls", "deadline"]
_ENDED: dict[str, Schema] = {
    "index": _COUNT,
    "logprobs": _or_null(_OBJECT),
    "finish_reason": {"enum": _REASONS},
}
_BATCH_TIMES = (
    "in_progress_at", "finalizing_at", "cancelling_at", "completed_at", "failed_at", "expired_at",
    "cancelled_at", "paused_at",
)  # fmt: skip
_LABELS: Schema = {"type": "object", "additionalProperties": TEXT}
_STANDING = _record(
    job_id=TEXT, queue_position=_or_null(_COUNT), start_s=_INTERVAL, eta_s=_INTERVAL
)
_CHAT_MORE: dict[str, Schema] = {"prompt_logprobs": array(_ANY)}
_CHAT = {
    "id": TEXT,
    "object": _kind("chat.completion"),
    "created": INTEGER,
    "model": TEXT,
    "choices": array(_record({"stop_reason": TEXT}, message=_MESSAGE, **_ENDED), 1),
    "usage": _USAGE,
}
_ITEM: Schema = {
    "anyOf": [
        _record(
            id=TEXT,
            type=_kind("message"),
            role=_kind("assistant"),
            status=TEXT,
            content=array(
                _record(
                    type=_kind("output_text"), text=TEXT, annotations=array(_ANY, 0, 0),
                    logprobs=array(_OBJECT),
                )
            ),
        ),
        _record(
            id=TEXT, type=_kind("reasoning"), summary=array(_ANY, 0, 0),
            content=array(_record(type=_kind("reasoning_text"), text=TEXT)),
        ),
        _record(
            id=TEXT, type=_kind("function_call"), call_id=TEXT, name=TEXT, arguments=TEXT,
            status=TEXT,
        ),
    ]
}  # fmt: skip
_QUOTAS = dict.fromkeys(QUOTAS, _or_null(_COUNT))
_KEY = {
    "id": TEXT,
    "object": _kind("api_key"),
    "tenant": TEXT,
    "name": TEXT,
    "scopes": array(TEXT),
    "created_at": _TIME,
    "revoked_at": _or_null(_TIME),
}
_ENDPOINT = {
    "id": TEXT,
    "object": _kind("webhook_endpoint"),
    "created_at": INTEGER,
    "name": TEXT,
    "url": TEXT,
    "event_types": array(TEXT),
    "signing_secret_hint": TEXT,
}
_FINDINGS = array(_record(code=TEXT, message=TEXT))

REPLIES: dict[str, Schema] = {
    "Error": _record(error=_record(**_ERROR_FIELDS)),
    "Job": _record(
        {"attempts": array(_ATTEMPT)},  # of one asked for by its id
        id=TEXT,
        object=_kind("job"),
        custom_id=_or_null(TEXT),
        url=TEXT,
        model=TEXT,
        status={"enum": [str(state) for state in JobState]},
        priority=INTEGER,
        attempt=_COUNT,
        max_attempts=_COUNT,
        retry_on=array({"enum": list(map(str, RETRYABLE))}),
        not_before=_or_null(_TIME),
        batch_id=_or_null(TEXT),
        metadata=_LABELS,
        created_at=_TIME,
        started_at=_or_null(_TIME),
        first_token_at=_or_null(_TIME),
        finished_at=_or_null(_TIME),
        deadline_at=_or_null(_TIME),
        queue_position=_or_null(_COUNT),
        start_s=_INTERVAL,
        eta_s=_INTERVAL,
        response=_or_null(_record(status_code={"const": 200}, request_id=TEXT, body=_OBJECT)),
        error=_or_null(_record(**_ERROR_FIELDS)),
        usage=_record(
            prompt_tokens=_COUNT,
            cached_tokens=_COUNT,
            completion_tokens=_COUNT,
            wasted_tokens=_COUNT,
            total_tokens=_COUNT,
        ),
        timings=_record(
            queue_s=_or_null(NUMBER),
            ttft_s=_or_null(NUMBER),
            tpot_s=_or_null(NUMBER),
            total_s=_or_null(NUMBER),
        ),
    ),
    "DeadJobs": _list(
        _record(
            object=_kind("dead_job"),
            id=TEXT,
            tenant=TEXT,
            model=TEXT,
            custom_id=_or_null(TEXT),
            error=TEXT,
            reason=TEXT,
            attempt=_COUNT,
            max_attempts=_COUNT,
            crash_count=_COUNT,
            created_at=_TIME,
            failed_at=_TIME,
        )
    ),
    "Requeued": _list(_record(id=TEXT, requeued=BOOLEAN, reason=_or_null(TEXT))),
    "JobOrJobs": {"anyOf": [ref("Job"), _list(ref("Job"))]},
    "JobPage": _page(ref("Job")),
    "ChatCompletion": _record(_CHAT_MORE, **_CHAT),
    "StoredCompletion": _record(_CHAT_MORE, **_CHAT, metadata=_LABELS),
    "StoredPage": _page(ref("StoredCompletion")),
    "StoredDeleted": _deleted("chat.completion.deleted"),
    "MessagePage": _page({"type": "object", "required": ["id", "role"]}),
    "Completion": _record(
        id=TEXT,
        object=_kind("text_completion"),
        created=INTEGER,
        model=TEXT,
        choices=array(
            _record({"stop_reason": TEXT, "prompt_logprobs": array(_ANY)}, text=TEXT, **_ENDED), 1
        ),
        usage=_USAGE,
    ),
    "Response": _record(
        {"tokenmill": _STANDING},  # until its end
        id=TEXT,
        object=_kind("response"),
        created_at=INTEGER,
        completed_at=_or_null(_TIME),
        status={
            "enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
        },
        background=BOOLEAN,
        error=_or_null(_record(code=TEXT, message=TEXT)),
        incomplete_details=_or_null(_record(reason=TEXT)),
        instructions=_or_null(TEXT),
        max_output_tokens=_or_null(INTEGER),
        metadata=_LABELS,
        model=TEXT,
        output=array(_ITEM),
        parallel_tool_calls=BOOLEAN,
        previous_response_id=_or_null(TEXT),
        reasoning=_record(effort={"type": "null"}, summary={"type": "null"}),
        service_tier=_kind("default"),
        store=BOOLEAN,
        temperature=NUMBER,
        text=_OBJECT,
        tool_choice=_ANY,
        tools=array(_OBJECT),
        top_logprobs=_COUNT,
        top_p=NUMBER,
        truncation=_kind("disabled"),
        usage=_or_null(
            _record(
                input_tokens=_COUNT,
                input_tokens_details=_record(cached_tokens=_COUNT, cache_write_tokens=_COUNT),
                output_tokens=_COUNT,
                output_tokens_details=_record(reasoning_tokens=_COUNT),
                total_tokens=_COUNT,
            )
        ),
        user=_or_null(TEXT),
    ),
    "ResponseDeleted": _deleted("response"),
    "InputItems": _page({"type": "object", "required": ["id", "type"]}),
    "InputTokens": _record(object=_kind("response.input_tokens"), input_tokens=_COUNT),
    "File": _record(
        id=TEXT,
        object=_kind("file"),
        bytes=_COUNT,
        created_at=INTEGER,
        expires_at=_or_null(INTEGER),
        filename=TEXT,
        purpose={"enum": list(PURPOSES)},
        status=_kind("processed"),
    ),
    "FilePage": _page(ref("File")),
    "FileDeleted": _deleted("file"),
    "Content": {"type": "string", "contentMediaType": "application/octet-stream"},
    "Batch": _record(
        id=TEXT,
        object=_kind("batch"),
        endpoint=TEXT,
        model=_or_null(TEXT),
        errors=_or_null(_list(_OBJECT)),
        input_file_id=TEXT,
        completion_window=_kind("24h"),
        status={"enum": [str(state) for state in BatchState]},
        output_file_id=_or_null(TEXT),
        error_file_id=_or_null(TEXT),
        created_at=INTEGER,
        expires_at=INTEGER,
        **dict.fromkeys(_BATCH_TIMES, _or_null(INTEGER)),
        request_counts=_record(total=_COUNT, completed=_COUNT, failed=_COUNT),
        usage=_or_null(_OBJECT),
        metadata=_or_null(_LABELS),
        priority=INTEGER,
        token_budget=_or_null(_COUNT),
        max_error_rate=_or_null({"type": "number"}),
        stop_reason=_or_null({"enum": [str(reason) for reason in StopReason]}),
        progress=_or_null(_OBJECT),
        dedupe=BOOLEAN,
        **dict.fromkeys(("rows_ttl_s", "rows_expire_at", "rows_removed_at"), _or_null(INTEGER)),
    ),
    "BatchPage": _page(ref("Batch")),
    "Rows": _list(
        {"type": "object", "required": ["row", "custom_id"]},
        last_row=_or_null(_COUNT),
        has_more=BOOLEAN,
    ),
    "Model": _record(
        id=TEXT,
        object=_kind("model"),
        created=INTEGER,
        owned_by=TEXT,
        max_model_len=_COUNT,
        fingerprint=TEXT,
    ),
    "Models": _list(ref("Model")),
    "Live": _record(status=_kind("live")),
    "Ready": _record(
        status={"enum": ["ready", "not ready"]}, reasons=_FINDINGS, warnings=_FINDINGS
    ),
    "Key": _record(**_KEY),
    "KeyMade": _record(**_KEY, key=TEXT),
    "Keys": _list(ref("Key")),
    "Tenant": _record(id=TEXT, object=_kind("tenant"), created_at=_TIME, **_QUOTAS),
    "Tenants": _list(ref("Tenant")),
    "Endpoint": _record(**_ENDPOINT),
    "EndpointWithSecret": _record(**_ENDPOINT, signing_secret=TEXT),
    "EventTypes": _list(TEXT),
    "Endpoints": _page(ref("Endpoint")),
    "EndpointDeleted": _deleted("webhook_endpoint.deleted"),
    "Delivery": _record(
        object=_kind("webhook_delivery"),
        status={"enum": ["pending", "delivered", "failed"]},
        id=TEXT,
        event_id=TEXT,
        event_type={"enum": [str(each) for each in EventType]},
        endpoint_id=TEXT,
        created_at=_TIME,
        num_tries=_COUNT,
        next_try_at=_or_null(_TIME),
        delivered_at=_or_null(_TIME),
        tried_at=_or_null(_TIME),
        status_code=_or_null(INTEGER),
        error=_or_null(TEXT),
    ),
    "Deliveries": _page(ref("Delivery")),
    "Metrics": TEXT,
    "Events": {"description": "server-sent events: the data of each is JSON, or [DONE]"},
    "Document": _OBJECT,
}
