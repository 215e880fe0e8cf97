"""Which state a job may go to next, and why it ended. Nothing else in the project decides this."""

from enum import StrEnum


class JobState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


NEXT: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.CANCELLED, JobState.EXPIRED}),
    # back to QUEUED: handed back by its worker, or taken from one whose lease ran out
    JobState.RUNNING: frozenset(JobState) - {JobState.RUNNING},
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
    JobState.EXPIRED: frozenset(),
}

TERMINAL = frozenset(state for state, following in NEXT.items() if not following)


class ErrorCode(StrEnum):
    """Why a job did not succeed: `error.code` of the job object."""

    INVALID_REQUEST = "invalid_request"  # the worker's door check refused what came past the API
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"  # more tokens than the model takes
    EXCEEDS_CAPACITY = "exceeds_capacity"  # can never fit this engine's KV pool
    COMPILER_BUSY = "compiler_busy"  # no time for its form now: the same job may succeed later
    NUMERICAL_ERROR = "numerical_error"  # NaN or infinity in this row's logits
    RESOURCE_EXHAUSTED = "resource_exhausted"  # no device memory for a step of it alone
    ENGINE_ERROR = "engine_error"
    ENGINE_CRASH = "engine_crash"  # the engine process died with it
    WORKER_LOST = "worker_lost"  # its worker's lease ran out
    POISONED = "poisoned"  # the engine process died with it too often
    MAX_ATTEMPTS = "max_attempts"
    TIME_LIMIT = "time_limit"  # Celery's soft or hard limit
    DEADLINE_EXCEEDED = "deadline_exceeded"
    BATCH_STOPPED = "batch_stopped"  # its batch ran into a limit first
    UNSTORABLE = "unstorable"  # the database refused the result


# what another attempt may bring to a good end, and so what a job's `retry_on` may name
RETRYABLE = (
    ErrorCode.ENGINE_CRASH,
    ErrorCode.WORKER_LOST,
    ErrorCode.RESOURCE_EXHAUSTED,
    ErrorCode.ENGINE_ERROR,
    ErrorCode.NUMERICAL_ERROR,
    ErrorCode.COMPILER_BUSY,
)
# the others are as good as certain to come again: trying them anyway is for the client to ask
RETRIED = (ErrorCode.ENGINE_CRASH, ErrorCode.WORKER_LOST)

_CLIENTS_FAULT = frozenset({
    ErrorCode.INVALID_REQUEST, ErrorCode.CONTEXT_LENGTH_EXCEEDED, ErrorCode.EXCEEDS_CAPACITY,
})  # fmt: skip


def error_object(code: ErrorCode, message: str, *, param: str | None = None) -> dict[str, object]:
    """The `error` of a job object, in OpenAI's four keys."""
    kind = "invalid_request_error" if code in _CLIENTS_FAULT else "server_error"
    return {"message": message, "type": kind, "param": param, "code": str(code)}
