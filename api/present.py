"""A job's row as the job object of the API, with where it stands and when it may end."""

import threading
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection

from jobs import attempts
from jobs.attempts import AttemptRecord
from jobs.forecast import Forecast, forecast
from jobs.lifecycle import JobState
from jobs.records import JobRecord

STANDING = ("queue_position", "start_s", "eta_s")  # of a job object, until its end


COMMITTED_S = 5.0  # a row has its time before its transaction is committed


class Presenter:
    """Builds job objects. Keeps each model's last forecast. Threads may share it."""

    def __init__(self) -> None:
        self._forecasts: dict[str, Forecast] = {}
        self._making: dict[str, threading.Lock] = {}

    def objects(
        self, records: Sequence[JobRecord], connection: Connection, now: float
    ) -> list[dict[str, Any]]:
        forecasts = {
            model: self._forecast(connection, model, records, now)
            for model in {record.model for record in records if not record.ended}
        }
        return [
            job_object(record)
            if record.ended
            else job_object(
                record,
                forecasts[record.model].position(record),
                forecasts[record.model].eta_s(record, now),
                forecasts[record.model].start_s(record),
            )
            for record in records
        ]

    def seconds_for(self, model: str | None, num_jobs: int) -> float:
        """About how long so many jobs take to leave the model's queue; 1 where nobody knows."""
        seen = self._forecasts.get(model or "")
        return 1.0 if seen is None else seen.seconds_for(num_jobs)

    def seconds_for_next(self) -> float:
        """About how long until a job of any model leaves its queue; 1 where nobody knows."""
        return min((seen.seconds_for(1) for seen in self._forecasts.values()), default=1.0)

    def _forecast(
        self, connection: Connection, model: str, records: Sequence[JobRecord], now: float
    ) -> Forecast:
        """One that is fresh enough, and knows the given jobs even if they came after it.

        While one thread makes a new one the others go on with the earlier: under many calls each
        would else read the whole queue, all at the same time.
        """
        earlier = self._forecasts.get(model)
        making = self._making.setdefault(model, threading.Lock())
        if making.acquire(blocking=earlier is None):
            try:
                seen = forecast(connection, model, now, self._forecasts.get(model))
                self._forecasts[model] = seen
            finally:
                making.release()
        else:
            assert earlier is not None
            seen = earlier
        joined = seen.with_jobs(job for job in records if _joined(job, model, seen))
        if joined is not seen:
            self._forecasts[model] = joined
        return joined


def _joined(record: JobRecord, model: str, seen: Forecast) -> bool:
    """Whether the job may have come into the model's queue after it was looked at."""
    queued = record.model == model and record.state == JobState.QUEUED
    return queued and record.created_at >= seen.taken_at - COMMITTED_S


def list_object(found: Sequence[dict[str, Any]], limit: int | None = None) -> dict[str, Any]:
    """A page as OpenAI lists: up to `limit` of what was found; one beyond says there is more."""
    data = list(found[:limit])
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(found) > len(data),
    }


def with_attempts(job: dict[str, Any], record: JobRecord, connection: Connection) -> dict[str, Any]:
    """The job object of one job that was asked for by its id; of a record that was claimed, with a
    statement more."""
    tried: list[AttemptRecord] = []
    if record.fence > 0:
        tried = attempts.of_job(connection, record.id, tenant=record.tenant_id)
    return job | {"attempts": [_attempt(each) for each in tried]}


def _attempt(record: AttemptRecord) -> dict[str, Any]:
    return {
        "attempt": record.attempt,
        "fence": record.fence,
        "worker": record.worker_id,
        "started_at": record.started_at,
        "ended_at": record.ended_at,
        "outcome": record.outcome,
        "error": record.error_code,
        "kept_tokens": record.kept_tokens,
        "wasted_tokens": record.wasted_tokens,
    }


def job_object(
    record: JobRecord,
    queue_position: int | None = None,
    eta_s: tuple[float, float] | None = None,
    start_s: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """Every field is listed: nothing of the row is shown that is not meant to be."""
    response = None
    if record.output is not None:
        request_id = "req_" + record.id.removeprefix("job_")
        response = {"status_code": 200, "request_id": request_id, "body": record.output}
    return {
        "id": record.id,
        "object": "job",
        "custom_id": record.custom_id,
        "url": record.url,
        "model": record.model,
        "status": str(record.state),
        "priority": record.priority,
        "attempt": record.attempt,
        "max_attempts": record.max_attempts,
        "retry_on": list(record.retry_on),
        "not_before": record.not_before,
        "batch_id": record.batch_id,
        "metadata": record.metadata,
        "created_at": record.created_at,
        "started_at": record.started_at,
        "first_token_at": record.first_token_at,
        "finished_at": record.finished_at,
        "deadline_at": record.deadline_at,
        "queue_position": queue_position,
        "start_s": _interval(start_s),
        "eta_s": _interval(eta_s),
        "response": response,
        "error": record.error,
        "usage": record.usage,
        "timings": record.timings,
    }


def _interval(seconds: tuple[float, float] | None) -> dict[str, float] | None:
    if seconds is None:
        return None
    low, high = seconds
    return {"low": round(low, 3), "high": round(high, 3)}
