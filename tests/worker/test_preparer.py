"""Prompts are made one after another, and no body keeps the others from becoming one."""

import queue
import threading
from typing import Any

import pytest

import worker.preparer
from engine.tokenizer import Tokenizer
from jobs.claims import ClaimedJob
from jobs.lifecycle import ErrorCode
from jobs.records import NewJob
from tests.tiny_llama import write_tiny_llama
from worker.attempt import Attempt
from worker.delivery import CeleryCallbacks, Delivery
from worker.entries import Count
from worker.generation import Limits, Refusal
from worker.preparer import Preparer
from worker.prompt import Prompt

# each would take a machine's memory or hours of its time, with one message or another
TEMPLATE = (
    "{% if 'large' in messages[0].content %}{{ 'a'|center(10 ** 11) }}{% endif %}"
    "{% if 'deep' in messages[0].content %}{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
    "{% endif %}{{ messages[0].content }}"
)


class Slow(Tokenizer):
    """Does not come back from some prompts, and has no memory for others."""

    release = threading.Event()

    def encode_input(self, *, prompt: Any = None, **others: Any) -> list[int]:
        if prompt == "stuck":
            self.release.wait()
        if prompt == "memory":
            raise MemoryError
        return super().encode_input(prompt=prompt, **others)


class World:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.posted: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.prepared: queue.SimpleQueue[Prompt | Refusal] = queue.SimpleQueue()
        self.preparer = Preparer(
            tokenizer=tokenizer,
            post=self.posted.put,
            prepared=lambda attempt, prompt: self.prepared.put(prompt),
        )
        self.preparer.limits = Limits(max_model_len=512, kv_tokens=512)
        self.preparer.start()

    def result(self, body: dict[str, Any], url: str = "/v1/completions") -> Prompt | Refusal:
        self.preparer.prepare(attempt(body, url))
        return self.prepared.get(timeout=30)


def attempt(body: dict[str, Any], url: str) -> Attempt:
    def nothing(*_: Any) -> None:
        pass

    job = ClaimedJob(
        id="job_1",
        fence=1,
        attempt=1,
        url=url,
        model="tiny",
        body={"model": "tiny", "max_tokens": 2} | body,
        priority=0,
        deadline_at=None,
        checkpoint=None,
        crash_count=0,
        created_at=0.0,
        prompt_tokens=0,
        tenant_id="default",
    )
    delivery = Delivery(
        "job_1",
        CeleryCallbacks(accept=nothing, end=nothing, time_out=nothing),
        soft_limit_s=None,
        hard_limit_s=None,
        in_hub=lambda call: call(),
        on_terminate=nothing,
    )
    return Attempt(job=job, delivery=delivery, deadline_at=None, refusal=None)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_llama(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Slow.load(folder)


@pytest.fixture
def world(tokenizer):
    return World(tokenizer)


def chat(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def assert_refused(result: Prompt | Refusal, said: str) -> None:
    assert isinstance(result, Refusal)
    assert result.code == ErrorCode.INVALID_REQUEST
    assert said in str(result)


def test_a_prompt_is_prepared_and_counted(world):
    prompt = world.result({"prompt": "hello"})
    assert isinstance(prompt, Prompt)
    counted = world.posted.get(timeout=10)
    assert isinstance(counted, Count)
    assert counted.counted.prompt_tokens == len(prompt.token_ids) > 0
    assert counted.counted.max_tokens == 2


@pytest.mark.parametrize(
    ("content", "said"), [("large", "over the limit of"), ("deep", "recursion")]
)
def test_a_chat_that_the_template_makes_too_much_of_fails_alone(world, content, said):
    url = "/v1/chat/completions"
    assert_refused(world.result(chat(content), url), said)
    assert isinstance(world.result(chat("hello"), url), Prompt)


def test_a_prompt_that_memory_does_not_hold_fails_alone(world):
    assert_refused(world.result({"prompt": "memory"}), "too much memory")
    assert isinstance(world.result({"prompt": "hello"}), Prompt)


def test_a_prompt_that_takes_too_long_is_refused_and_the_next_ones_are_made(world, monkeypatch):
    monkeypatch.setattr(worker.preparer, "PREPARE_LIMIT_S", 0.2)
    try:
        for _ in range(2):
            assert_refused(world.result({"prompt": "stuck"}), "not ready after 0.2 seconds")
        monkeypatch.undo()
        assert isinstance(world.result({"prompt": "hello"}), Prompt)
    finally:
        Slow.release.set()
    # what the abandoned threads made in the end is nobody's
    assert isinstance(world.result({"prompt": "hello there"}), Prompt)
    assert world.prepared.empty()


def test_a_job_that_only_has_to_be_counted_is_under_the_limit_too(world, monkeypatch):
    monkeypatch.setattr(worker.preparer, "PREPARE_LIMIT_S", 0.2)
    Slow.release.clear()
    try:
        body = {"model": "tiny", "prompt": "stuck"}
        world.preparer.count(NewJob(url="/v1/completions", model="tiny", body=body))
        assert_refused(world.result({"prompt": "stuck"}), "not ready")
    finally:
        Slow.release.set()
