"""What goes into the store of batches and comes out of it: frozen values."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class BatchState(StrEnum):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


class StopReason(StrEnum):
    """Which of its limits a batch ran into."""

    TOKEN_BUDGET = "token_budget"
    ERROR_RATE = "error_rate"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """A batch's row, its JSON columns decoded."""

    id: str
    tenant_id: str
    endpoint: str
    input_file_id: str
    metadata: dict[str, str] | None
    priority: int
    output_ttl_s: int | None
    state: BatchState
    ending: str | None = None
    model: str | None = None
    errors: list[dict[str, Any]] | None = None
    num_rows: int = 0
    num_inserted: int = 0
    num_completed: int = 0
    num_failed: int = 0
    usage: dict[str, int] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: float
    expires_at: float
    in_progress_at: float | None = None
    finalizing_at: float | None = None
    cancelling_at: float | None = None
    closed_at: float | None = None
    paused_at: float | None = None
    paused_s: float = 0.0
    token_budget: int | None = None
    max_error_rate: float | None = None
    stop_reason: str | None = None  # a StopReason
    progress: dict[str, Any] | None = None  # see jobs.batch_progress
    rows_ttl_s: int | None = None  # once it has ended; None: for ever
    rows_expire_at: float | None = None  # of one that has
    rows_removed_at: float | None = None
    dedupe: bool = False  # identical rows are run once
    num_same: int = 0  # rows like an earlier one; known when the file has been read
