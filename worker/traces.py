"""What an attempt was, as spans: told when it has ended, from the times it was seen at.

generate            from the claim to the end
├── queue           from the job's acceptance to its first claim
├── admit           until the engine took it: the prompt's tokens, and its turn
├── prefill         until the first token
└── decode          until the last
"""

import time

from jobs.lifecycle import JobState
from jobs.tracing import Tracing, traceparent
from worker.attempt import Attempt
from worker.generation import Outcome


class Traces:
    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def tell(self, attempt: Attempt, outcome: Outcome) -> None:
        """Of an attempt that has ended, just now."""
        job, offset = attempt.job, time.time() - time.monotonic()
        claimed = attempt.claimed_at + offset
        ended = time.time()
        whole = self._tracing.begin(
            "generate",
            parent=job.trace_parent,
            at=claimed,
            attributes={
                "tokenmill.job.id": job.id,
                "tokenmill.job.attempt": job.attempt,
                "tokenmill.job.state": str(outcome.state),
                "tokenmill.tenant": job.tenant_id,
                "gen_ai.request.model": job.model,
                "gen_ai.usage.input_tokens": outcome.prompt_tokens,
                "gen_ai.usage.output_tokens": outcome.completion_tokens,
                "tokenmill.cached_tokens": outcome.cached_tokens,
            },
        )
        parts: list[tuple[str, float, float]] = []
        if job.attempt == 1:
            parts.append(("queue", job.created_at, claimed))
        if attempt.running_at is not None:
            running = attempt.running_at + offset
            parts.append(("admit", claimed, running))
            first = attempt.first_token_at
            parts.append(("prefill", running, ended if first is None else first + offset))
            if first is not None:
                parts.append(("decode", first + offset, ended))
        parent = traceparent(whole)
        for name, began, over in parts:
            span = self._tracing.begin(name, parent=parent, at=began)
            self._tracing.end(span, at=max(began, over))
        self._tracing.end(whole, at=ended, failed=outcome.state != JobState.SUCCEEDED)
