"""For a fixed seed the tokens are the same, whatever happens around them.

Random mixes of sampling options, each request alone and then in batches of 2, 8 and 44, shuffled,
preempted at random steps, and aborted and resumed from the tokens so far: token ids, text and ends
are equal byte for byte, in float32 on a CPU.
"""

import random

import pytest

from engine import SamplingParams
from engine.sequence import FinishReason
from tests.engine.mixes import (
    Ask,
    TinyModel,
    assert_same,
    names_of,
    some_options,
    some_prompt,
    some_sampling,
    words,
    write_model,
)

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_REQUESTS = 44
MAX_TOKENS = 14
OPTIONS = {
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "allowed_token_ids", "bad_words", "stop_token_ids", "min_tokens", "ignore_eos",
    "skip_special_tokens", "include_stop_str_in_output", "top_k", "top_p", "min_p", "stop",
    "repetition_detection", "logprobs", "prompt_logprobs", "thinking_token_budget", "temperature",
    "n", "seed",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return TinyModel(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def requests(model):
    """Pairs of a request and its output alone."""
    draw = random.Random(3)
    found = []
    for _ in range(NUM_REQUESTS + 4):
        options = some_options(draw, MAX_TOKENS) | some_sampling(draw, MAX_TOKENS)
        params = SamplingParams(max_tokens=MAX_TOKENS, seed=draw.getrandbits(63), **options)
        ask = Ask(some_prompt(draw), params)
        output = model.alone(ask)
        if output is not None:
            found.append((ask, output))
    return found[:NUM_REQUESTS]


def run(engine, requests, draw, disturb):
    """Outputs by request id; the books are checked after each step, and after each disturbance."""
    for request_id, (ask, _) in requests.items():
        engine.add_request(request_id, ask.prompt, ask.params)
    outputs = {}
    while engine.has_unfinished:
        for update in engine.step():
            if update.output is not None:
                outputs[update.request_id] = update.output
        engine.check()
        disturb(engine, draw)
        engine.check()
    return outputs


def preempt_one(engine, draw):
    scheduler = engine._scheduler
    if scheduler._running and draw.random() < 0.3:
        scheduler._preempt(draw.choice(scheduler._running))


def test_the_requests_ask_for_every_option_and_end_in_every_way(requests):
    assert len(requests) == NUM_REQUESTS, "too many hang on a rounding"
    assert set().union(*(names_of(ask.params) for ask, _ in requests)) - {"max_tokens"} == OPTIONS
    ends = {c.finish_reason for _, output in requests for c in output.completions}
    assert ends >= {FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION}
    texts = {c.token_ids for _, output in requests for c in output.completions}
    assert len(texts) > NUM_REQUESTS


@pytest.mark.parametrize("config", [{}, {"max_num_seqs": 7, "max_num_batched_tokens": 13}])
@pytest.mark.parametrize("size", [2, 8, NUM_REQUESTS])
def test_in_any_batch_shuffled_and_preempted_each_is_as_alone(model, requests, size, config):
    draw = random.Random(size)
    shuffled = draw.sample(requests, len(requests))
    engine = model.engine(**config)
    for first in range(0, len(shuffled), size):
        batch = {str(n): pair for n, pair in enumerate(shuffled[first : first + size])}
        outputs = run(engine, batch, draw, preempt_one)
        for request_id, (ask, lone) in batch.items():
            assert words(outputs[request_id]) == words(lone), ask
            assert_same(outputs[request_id], lone)
    assert engine.stats().num_preemptions > 20


@pytest.mark.parametrize("config", [{}, {"enable_prefix_caching": False, "max_num_seqs": 5}])
def test_aborted_and_resumed_from_its_tokens_each_ends_as_if_nothing_had_happened(
    model, requests, config
):
    draw = random.Random(4)
    batch = {str(n): pair for n, pair in enumerate(requests)}
    engine = model.engine(**config)
    num_resumed = 0

    def resume_one(engine, draw):
        nonlocal num_resumed
        if not engine._requests or draw.random() < 0.5:
            return
        request_id = draw.choice(list(engine._requests))
        generated = engine.checkpoint(request_id)
        engine.abort(request_id)
        num_resumed += any(map(len, generated))
        ask, _ = batch[request_id]
        engine.add_request(request_id, ask.prompt, ask.params, generated=generated)

    outputs = run(engine, batch, draw, resume_one)
    for request_id, (ask, lone) in batch.items():
        assert words(outputs[request_id]) == words(lone), ask
        assert_same(outputs[request_id], lone)
    assert num_resumed > 10
