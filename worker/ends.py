"""Ends that the worker itself decides on: outcomes of jobs it will not run, or not any longer."""

from jobs.lifecycle import ErrorCode, JobState
from worker.attempt import Attempt
from worker.generation import Outcome, Refusal


def when_refused(refusal: Refusal) -> Outcome:
    return Outcome(
        state=JobState.FAILED,
        code=refusal.code,
        message=str(refusal),
        param=refusal.param,
        finish_reason="error",
    )


def when_limited(attempt: Attempt) -> Outcome:
    assert attempt.limit is not None
    return Outcome(
        state=JobState.FAILED,
        code=ErrorCode.TIME_LIMIT,
        message=attempt.limit,
        finish_reason="abort",
        prompt_tokens=0 if attempt.prompt is None else len(attempt.prompt.token_ids),
    )
