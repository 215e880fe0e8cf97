"""From bodies to prompts, on a thread of its own: a long text takes a while to tokenize.

What it learns of a job that came whole in a message goes into the row, like what the API's door
counts: how long the prompt is, and what the job may generate.
"""

import queue
from collections.abc import Callable
from typing import Any

from engine.tokenizer import Tokenizer
from jobs.accounting import Counted
from jobs.records import NewJob
from worker.attempt import Attempt
from worker.generation import Limits, Refusal, prepare
from worker.guard import start_thread
from worker.ledger import Count, Entry
from worker.prompt import Prompt


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
                prompt = self._prompt(job.id, job.url, job.body, num_known=job.prompt_tokens)
                self._prepared(asked, prompt)

    def _prompt(
        self, job_id: str, url: str, body: dict[str, Any], *, num_known: int
    ) -> Prompt | Refusal:
        assert self.limits is not None, "a job was taken before there was an engine"
        prompt: Prompt | Refusal
        try:
            prompt = prepare(job_id, url, body, self._tokenizer, self.limits)
            counted = Counted(job_id, len(prompt.token_ids), prompt.params.max_tokens)
        except Refusal as refusal:
            prompt = refusal
            counted = Counted(job_id, refusal.prompt_tokens, 0)
        if counted.prompt_tokens and not num_known:
            self._post(Count(counted=counted))
        return prompt
