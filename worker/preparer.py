"""From bodies to prompts, on threads of their own: a long text takes a while to tokenize.

What it learns of a job that came whole in a message goes into the row, like what the API's door
counts: how long the prompt is, and what the job may generate.

A job that takes too long is refused, and the thread that is at it is left to itself: a thread
cannot be ended, and the jobs behind it must not wait for it.
"""

import queue
from collections.abc import Callable
from typing import Any

from engine.tokenizer import Tokenizer
from jobs.accounting import Counted
from jobs.lifecycle import ErrorCode
from jobs.records import NewJob
from worker.attempt import Attempt
from worker.entries import Count, Entry
from worker.generation import Limits, Refusal, prepare
from worker.guard import start_thread
from worker.prompt import Prompt

# of one job. A chat template ends by itself after a few seconds, and the longest text that a model
# takes needs less, on a machine that does much else too
PREPARE_LIMIT_S = 30.0


class Preparer:
    """Thread-safe."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        post: Callable[[Entry], None],  # to the ledger
        prepared: Callable[[Attempt, Prompt | Refusal], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._post = post
        self._prepared = prepared
        self._inbox: queue.SimpleQueue[Attempt | NewJob] = queue.SimpleQueue()
        self._hand = _Hand()
        self.limits: Limits | None = None  # until there has been an engine

    def start(self) -> None:
        start_thread("prepare", self._run)

    def prepare(self, attempt: Attempt) -> None:
        """It will be `prepared`."""
        self._inbox.put(attempt)

    def count(self, new_job: NewJob) -> None:
        """Of a job that ended before anybody could prepare it."""
        self._inbox.put(new_job)

    def _run(self) -> None:
        while True:
            asked = self._inbox.get()
            if isinstance(asked, NewJob):
                self._prompt(asked.id, asked.url, dict(asked.body), num_known=0)
            elif asked.refusal is not None:
                self._prepared(asked, asked.refusal)
            else:
                job = asked.job
                prompt = self._prompt(
                    job.id,
                    job.url,
                    job.body,
                    num_known=job.prompt_tokens,
                    streams=job.stream is not None,
                )
                self._prepared(asked, prompt)

    def _prompt(
        self, job_id: str, url: str, body: dict[str, Any], *, num_known: int, streams: bool = False
    ) -> Prompt | Refusal:
        limits = self.limits
        assert limits is not None, "a job was taken before there was an engine"
        prompt = self._hand.do(
            lambda: self._prepare(job_id, url, body, limits, streams), PREPARE_LIMIT_S
        )
        if prompt is None:
            self._hand = _Hand()
            prompt = Refusal(
                ErrorCode.INVALID_REQUEST,
                f"the prompt was not ready after {PREPARE_LIMIT_S:g} seconds of work on it",
            )
        counted = (
            Counted(job_id, prompt.prompt_tokens, 0)
            if isinstance(prompt, Refusal)
            else Counted(job_id, len(prompt.token_ids), prompt.params.max_tokens)
        )
        if counted.prompt_tokens and not num_known:
            self._post(Count(counted=counted))
        return prompt

    def _prepare(
        self, job_id: str, url: str, body: dict[str, Any], limits: Limits, streams: bool
    ) -> Prompt | Refusal:
        try:
            return prepare(job_id, url, body, self._tokenizer, limits, streams=streams)
        except Refusal as refusal:
            return refusal
        except (MemoryError, RecursionError) as error:
            # about this job alone, however it came to it: the others go on
            kind = "memory" if isinstance(error, MemoryError) else "nesting"
            return Refusal(ErrorCode.INVALID_REQUEST, f"the prompt takes too much {kind} to make")


class _Hand:
    """A thread that does one thing after another for one other thread."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Callable[[], Prompt | Refusal]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Prompt | Refusal] = queue.SimpleQueue()
        self._started = False

    def do(self, work: Callable[[], Prompt | Refusal], limit_s: float) -> Prompt | Refusal | None:
        """What `work` returns; None after the limit, and then this hand is not to be used again."""
        if not self._started:
            self._started = True
            start_thread("prompt", self._run)
        self._asked.put(work)
        try:
            return self._done.get(timeout=limit_s)
        except queue.Empty:
            self._asked.put(_leave)
            return None

    def _run(self) -> None:
        while (work := self._asked.get()) is not _leave:
            self._done.put(work())


def _leave() -> Refusal:
    raise AssertionError
