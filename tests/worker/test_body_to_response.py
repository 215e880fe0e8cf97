"""A body through a real engine to its response: what a client reads of scores and endings."""

import math

import pytest

from engine import EngineConfig, LLMEngine
from jobs.lifecycle import JobState
from worker.engine_process import ended
from worker.generation import Limits, outcome_of, prepare

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIMITS = Limits(max_model_len=512, kv_tokens=1024)
TEXT = "the quick brown é"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture(scope="module")
def engine(tiny_llama_dir):
    config = EngineConfig(model=str(tiny_llama_dir), num_blocks=64, num_threads=1)
    return LLMEngine(config, clock=Clock())


@pytest.fixture
def outcome_for(engine):
    def outcome_for(url, *, steps_before_timeout=None, **body):
        usual = {"model": "m", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        prompt = prepare("job_1", url, usual | body, engine.tokenizer, LIMITS)
        engine.add_request("job_1:1", prompt.token_ids, prompt.params)
        num_steps = 0
        while engine.has_unfinished:
            for update in engine.step():
                output = update.output
            num_steps += 1
            if num_steps == steps_before_timeout:
                engine._clock.now += 100.0
        return outcome_of(
            ended(output), prompt, engine.tokenizer,
            job_id="job_1", url=url, model="m", created=1.5,
        )  # fmt: skip

    return outcome_for


def only_choice(outcome):
    assert outcome.state == JobState.SUCCEEDED
    [choice] = outcome.output["choices"]
    return choice


def test_a_completions_offsets_say_where_its_tokens_stand(outcome_for, engine):
    choice = only_choice(outcome_for(COMPLETIONS, prompt=TEXT, logprobs=3, max_tokens=20))
    logprobs = choice["logprobs"]
    assert [len(logprobs[name]) for name in logprobs] == [20] * 4
    assert all(3 <= len(top) <= 4 for top in logprobs["top_logprobs"])
    assert logprobs["text_offset"][0] == 0
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert choice["text"][offset:].startswith(token)


def test_an_echo_has_the_prompt_and_its_scores_in_front(outcome_for, engine):
    plain = only_choice(outcome_for(COMPLETIONS, prompt=TEXT, logprobs=2))
    echoed = only_choice(outcome_for(COMPLETIONS, prompt=TEXT, logprobs=2, echo=True))
    assert echoed["text"] == TEXT + plain["text"]
    prompt_ids = engine.tokenizer.encode(TEXT)
    first, own = echoed["logprobs"], plain["logprobs"]
    assert first["tokens"][len(prompt_ids) :] == own["tokens"]
    assert first["token_logprobs"][0] is None
    assert first["top_logprobs"][0] is None
    assert all(x < 0 for x in first["token_logprobs"][1:])
    assert first["token_logprobs"][len(prompt_ids) :] == pytest.approx(own["token_logprobs"])
    offsets = first["text_offset"]
    assert offsets[len(prompt_ids) :] == [len(TEXT) + at for at in own["text_offset"]]
    assert "prompt_logprobs" not in echoed
    for token, offset in zip(first["tokens"], offsets[: len(prompt_ids)], strict=False):
        assert token.startswith("bytes:") or TEXT[offset:].startswith(token)


def test_a_prompt_of_ids_is_echoed_as_their_text(outcome_for, engine):
    ids = engine.tokenizer.encode(TEXT)
    choice = only_choice(outcome_for(COMPLETIONS, prompt=ids, echo=True))
    assert choice["text"].startswith(TEXT)
    assert choice["logprobs"] is None


def test_an_echo_alone_scores_a_text(outcome_for, engine):
    outcome = outcome_for(COMPLETIONS, prompt=TEXT, echo=True, logprobs=0, max_tokens=0)
    choice = only_choice(outcome)
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
    assert outcome.output["usage"]["completion_tokens"] == 0
    by_prompt = outcome_for(COMPLETIONS, prompt=TEXT, prompt_logprobs=0, max_tokens=0)
    choice_by_prompt = only_choice(by_prompt)
    assert (choice_by_prompt["text"], choice_by_prompt["logprobs"]) == ("", None)
    scores = choice_by_prompt["prompt_logprobs"]
    assert scores[0] is None
    ids = engine.tokenizer.encode(TEXT)
    assert [entry[str(i)]["logprob"] for i, entry in zip(ids[1:], scores[1:], strict=True)] == (
        choice["logprobs"]["token_logprobs"][1:]
    )


def test_a_chat_has_scores_of_its_answer_and_of_the_whole_prompt(outcome_for, engine):
    messages = [{"role": "user", "content": "hello"}]
    outcome = outcome_for(
        CHAT, messages=messages, logprobs=True, top_logprobs=2, prompt_logprobs=1, n=2
    )
    for choice in outcome.output["choices"]:
        content = choice["logprobs"]["content"]
        assert len(content) == 6
        for entry in content:
            assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]
            assert len(entry["top_logprobs"]) == 2
            assert math.exp(entry["logprob"]) <= 1
        spelled = b"".join(bytes(entry["bytes"]) for entry in content)
        assert spelled.decode(errors="replace") == choice["message"]["content"]
        assert "prompt_logprobs" not in choice
    scores = outcome.output["prompt_logprobs"]
    assert len(scores) == outcome.prompt_tokens


def test_a_loop_is_a_stop_that_says_more_and_the_row_says_the_word(outcome_for):
    outcome = outcome_for(
        COMPLETIONS,
        prompt=TEXT,
        max_tokens=50,
        allowed_token_ids=[70, 71],
        repetition_detection={"max_pattern_size": 4, "min_count": 3},
    )
    assert outcome.finish_reason == "repetition"
    choice = only_choice(outcome)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "repetition_detected")
    assert outcome.completion_tokens < 50


def test_a_timeout_is_a_result_with_the_text_so_far(outcome_for):
    outcome = outcome_for(COMPLETIONS, prompt=TEXT, timeout_s=50.0, steps_before_timeout=4)
    assert (outcome.state, outcome.finish_reason) == (JobState.SUCCEEDED, "deadline")
    choice = only_choice(outcome)
    assert choice["finish_reason"] == "deadline"
    assert choice["text"]
    assert 0 < outcome.output["usage"]["completion_tokens"] < 6


def test_options_that_leave_no_token_fail_the_job_by_name(outcome_for):
    outcome = outcome_for(
        COMPLETIONS, prompt=TEXT, allowed_token_ids=[2], ignore_eos=False, min_tokens=3
    )
    assert outcome.state == JobState.FAILED
    assert outcome.code == "invalid_request"
    assert "allow no token" in outcome.message
