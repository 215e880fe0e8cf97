"""OpenAI's shapes of a batch: the object, and an ended row as a line of its files.

What the endpoint refused or could not do is a response with its status and error object, as over
HTTP; `error` beside it is for rows that never came to be answered: expired, cancelled.
"""

from collections.abc import Mapping
from typing import Any

from jobs.batch_record import BatchRecord, BatchState
from jobs.lifecycle import ErrorCode, JobState
from jobs.records import JobRecord
from jobs.rows import encode

_NOT_ANSWERED = {
    JobState.CANCELLED: ("batch_cancelled", "the row was cancelled before it was done"),
    JobState.EXPIRED: (
        "batch_expired", "this request could not be executed before the completion window expired"
    ),
}  # fmt: skip


def line(record: JobRecord) -> dict[str, Any]:
    """Of a row that has ended."""
    assert record.ended, record.id
    number = record.id.removeprefix("job_")
    response = error = None
    if record.state in _NOT_ANSWERED:
        code, message = _NOT_ANSWERED[record.state]
        if record.error is not None and record.error["code"] == ErrorCode.BATCH_STOPPED:
            code, message = str(ErrorCode.BATCH_STOPPED), record.error["message"]
        error = {"code": code, "message": message}
    else:
        succeeded = record.state == JobState.SUCCEEDED
        assert succeeded or record.error is not None
        response = {
            "status_code": 200 if succeeded else _status(record.error or {}),
            "request_id": f"req_{number}",
            "body": record.output if succeeded else {"error": record.error},
        }
    return {
        "id": f"batch_req_{number}",
        "custom_id": record.custom_id,
        "response": response,
        "error": error,
    }


def request_line(record: JobRecord) -> bytes:
    """The row as a line of an input file, once more."""
    assert record.body is not None
    request = {
        "custom_id": record.custom_id, "method": "POST", "url": record.url, "body": record.body
    }  # fmt: skip
    return encode(request).encode() + b"\n"


def is_worth_another_try(record: JobRecord) -> bool:
    """It has not succeeded, and that was not the request's own fault."""
    if record.state == JobState.SUCCEEDED or not record.ended:
        return False
    return record.state in _NOT_ANSWERED or _status(record.error or {}) != 400


def encoded(record: JobRecord) -> bytes:
    """With its newline."""
    return encode(line(record)).encode() + b"\n"


def _status(error: Mapping[str, Any]) -> int:
    if error["type"] == "invalid_request_error":
        return 400
    return 503 if error["code"] == ErrorCode.COMPILER_BUSY else 500


def batch_object(batch: BatchRecord) -> dict[str, Any]:
    """In OpenAI's shape; what is from `priority` on is ours."""
    at = {
        f"{state}_at": _second(batch.closed_at) if batch.state == state else None
        for state in (
            BatchState.COMPLETED, BatchState.FAILED, BatchState.EXPIRED, BatchState.CANCELLED
        )
    }  # fmt: skip
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": None if batch.errors is None else {"object": "list", "data": batch.errors},
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": str(batch.state),
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": int(batch.created_at),
        "in_progress_at": _second(batch.in_progress_at),
        "expires_at": int(batch.expires_at),
        "finalizing_at": _second(batch.finalizing_at),
        "cancelling_at": _second(batch.cancelling_at),
        **at,
        "request_counts": {
            "total": batch.num_rows,
            "completed": batch.num_completed,
            "failed": batch.num_failed,
        },
        "usage": None if batch.usage is None else _usage(batch.usage),
        "metadata": batch.metadata,
        "priority": batch.priority,
        "paused_at": _second(batch.paused_at),
        "token_budget": batch.token_budget,
        "max_error_rate": batch.max_error_rate,
        "stop_reason": batch.stop_reason,
        "progress": batch.progress,
        "dedupe": batch.dedupe,
        "rows_ttl_s": batch.rows_ttl_s,
        "rows_expire_at": _second(batch.rows_expire_at),
        "rows_removed_at": _second(batch.rows_removed_at),
    }


def _usage(tokens: Mapping[str, int]) -> dict[str, Any]:
    return {
        "input_tokens": tokens["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": tokens["cached_tokens"]},
        "output_tokens": tokens["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens["prompt_tokens"] + tokens["completion_tokens"],
    }


def _second(moment: float | None) -> int | None:
    return None if moment is None else int(moment)
