"""Each option's arithmetic against a naive one in float64, and the draws that follow from it."""

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch

from engine.logits_processors import TokenHistory, process
from engine.sampler import NothingAllowedError, SampledRow, sample
from engine.sampling_params import SamplingParams
from engine.token_rules import NO_RULES, TokenRules

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = 30


def row(prompt=(), generated=(), *, rules=NO_RULES, stops=(), position=0, **options):
    params = SamplingParams(max_tokens=1, **options)
    history = TokenHistory(params, rules, len(prompt))
    token_ids = [*prompt, *generated]
    history.catch_up(token_ids)
    return SampledRow(
        params=params,
        seed=3,
        position=position,
        banned=history.banned(token_ids) + tuple(stops),
        tally=history.tally,
        forced=history.forced,
    )


def naive(logits, prompt, generated, params, banned=()):
    """The definitions, one token at a time."""
    found = []
    for v, x in enumerate(logits):
        if v in prompt or v in generated:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        count = list(generated).count(v)
        x -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        x += dict(params.logit_bias).get(v, 0.0)
        allowed = params.allowed_token_ids is None or v in params.allowed_token_ids
        found.append(x if allowed and v not in banned else -math.inf)
    return found


def random_options(draw):
    options = {}
    if draw.random() < 0.5:
        options["presence_penalty"] = draw.uniform(-2, 2)
    if draw.random() < 0.5:
        options["frequency_penalty"] = draw.uniform(-2, 2)
    if draw.random() < 0.5:
        options["repetition_penalty"] = draw.uniform(0.1, 2)
    if draw.random() < 0.5:
        ids = draw.sample(range(VOCAB_SIZE), draw.randint(1, 9))
        options["logit_bias"] = tuple((v, draw.uniform(-100, 100)) for v in ids)
    if draw.random() < 0.5:
        options["allowed_token_ids"] = tuple(draw.choices(range(VOCAB_SIZE), k=9))
    return options


def test_all_options_of_all_rows_together_are_what_each_is_by_definition():
    draw = random.Random(1)
    torch.manual_seed(1)
    logits = torch.randn(60, VOCAB_SIZE) * 3
    before = logits.clone()
    rows, expected = [], []
    for x in logits.tolist():
        prompt = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 9))]
        generated = [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice((0, 0, 3, 40)))]
        stops = draw.choice(((), (), (4, 7)))
        rows.append(row(prompt, generated, stops=stops, **random_options(draw)))
        expected.append(naive(x, prompt, generated, rows[-1].params, stops))
    changed = process(logits, rows)
    torch.testing.assert_close(logits.double(), torch.tensor(expected, dtype=torch.float64))
    untouched = [i for i in range(60) if i not in changed]
    assert untouched
    assert torch.equal(logits[untouched], before[untouched])


def test_presence_and_frequency_look_at_the_output_only_and_repetition_at_the_prompt_too():
    logits = torch.tensor([[1.0, -1.0, 1.0, 1.0]] * 3)
    options = ({"presence_penalty": 2.0}, {"frequency_penalty": 0.5}, {"repetition_penalty": 2.0})
    process(logits, [row([0, 1], [2, 2], **each) for each in options])
    assert logits.tolist() == [[1, -1, -1, 1], [1, -1, 0, 1], [0.5, -2, 0.5, 1]]


def test_a_history_taken_in_token_by_token_is_the_one_taken_in_at_once():
    draw = random.Random(2)
    params = SamplingParams(
        max_tokens=9, frequency_penalty=1.0, repetition_penalty=1.3, thinking_token_budget=3
    )
    rules = TokenRules(bad_words=((1, 2, 3), (2, 3), (5,), (9, 9, 9, 4)), thinking=(7, 8))
    for _ in range(50):
        token_ids = [draw.randrange(10) for _ in range(40)]
        num_prompt_tokens = draw.randint(1, 20)
        grown = TokenHistory(params, rules, num_prompt_tokens)
        for length in range(num_prompt_tokens, 41):
            grown.catch_up(token_ids[:length])
            whole = TokenHistory(params, rules, num_prompt_tokens)
            whole.catch_up(token_ids[:length])
            assert grown.forced == whole.forced
            assert grown.banned(token_ids[:length]) == whole.banned(token_ids[:length])
            pairs = [zip(h.tally.ids, h.tally.counts, strict=True) for h in (grown, whole)]
            assert dict(pairs[0]) == dict(pairs[1])


@pytest.mark.parametrize(
    ("prompt", "generated", "banned"),
    [
        ([9], [], {6}),
        ([9], [1], {6}),
        ([9], [1, 2], {6, 3}),
        ([1, 2], [], {6}),  # a prefix in the prompt is none
        ([1], [2], {6, 4}),
        ([9], [0, 2, 1, 2], {6, 3}),
    ],
)
def test_the_last_token_of_a_bad_word_is_banned_behind_the_others(prompt, generated, banned):
    rules = TokenRules(bad_words=((1, 2, 3), (6,), (2, 2, 5)))
    if banned == {6, 4}:
        rules = TokenRules(bad_words=((1, 2, 3), (6,), (2, 4)))
    logits = torch.zeros(1, VOCAB_SIZE)
    process(logits, [row(prompt, generated, rules=rules)])
    assert set(np.flatnonzero(logits[0].isinf().numpy())) == banned


@pytest.mark.parametrize(
    ("prompt", "generated", "budget", "forced"),
    [
        ([1, 7], [], 0, True),
        ([1, 7], [], 1, False),
        ([1, 7, 2, 2], [], 1, False),  # what the prompt thinks is free
        ([1, 7], [2], 1, True),
        ([1], [7, 2, 2], 2, True),
        ([1], [7, 2], 2, False),
        ([1], [2, 2, 2, 2], 2, False),  # no thoughts
        ([1], [7, 2, 2, 8, 3, 3], 2, False),
        ([1], [7, 2, 8, 7, 3], 2, True),  # one budget for all thoughts
        ([7, 2, 8], [2, 2, 2], 1, False),
        ([1, 7], [7, 7], 2, True),  # saying <think> again does not begin anew
    ],
)
def test_the_end_of_thinking_is_forced_when_its_budget_is_spent(prompt, generated, budget, forced):
    rules = TokenRules(thinking=(7, 8), bad_words=((8,),))
    logits = torch.randn(1, VOCAB_SIZE)
    thinker = row(prompt, generated, rules=rules, thinking_token_budget=budget, temperature=0.0)
    assert (sample(logits, [thinker]) == [8]) == forced


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"temperature": 0.0}])
def test_a_row_whose_options_leave_nothing_fails_alone(options):
    torch.manual_seed(1)
    logits = torch.randn(3, VOCAB_SIZE)
    rules = TokenRules(bad_words=((5,), (6,)))
    stuck = row([1], [2], rules=rules, allowed_token_ids=(5, 6), **options)
    healthy = [row([1], [2], **options), row([1], [2], allowed_token_ids=(9,), **options)]
    expected = sample(logits[[0, 2]].clone(), healthy)
    tokens = sample(logits, [healthy[0], stuck, healthy[1]])
    assert isinstance(tokens[1], NothingAllowedError)
    assert [tokens[0], tokens[2]] == expected
    assert expected[1] == 9


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_options_hide_no_broken_row(value):
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 5] = value
    rules = TokenRules(thinking=(7, 8))
    broken = row(
        [5, 7], [5], rules=rules, repetition_penalty=1e-300, allowed_token_ids=(1,),
        logit_bias=((5, -100.0),), thinking_token_budget=0,
    )  # fmt: skip
    (result,) = sample(logits, [broken])
    assert not isinstance(result, NothingAllowedError)
    assert "not finite" in str(result)


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e-40])
def test_the_smallest_repetition_penalty_gives_a_token(penalty):
    logits = torch.tensor([[3.0, 1.0, -1.0, -math.inf, 0.0]] * 2)
    repeated = [row([0, 2, 3, 4], repetition_penalty=penalty, temperature=t) for t in (0.0, 1.0)]
    assert sample(logits, repeated) == [0, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"frequency_penalty": 0.5},
        {"presence_penalty": -1.0, "temperature": 0.7},
        {"repetition_penalty": 1.5, "top_k": 6},
        {"frequency_penalty": 0.3, "repetition_penalty": 0.8, "top_p": 0.85},
        {"logit_bias": ((0, -1.0), (7, 2.5)), "min_p": 0.1},
        {"allowed_token_ids": (1, 3, 5, 6, 7), "presence_penalty": 1.0, "temperature": 1.4},
    ],
    ids=str,
)
def test_tokens_come_as_often_as_the_processed_softmax_says(options):
    draws = 6_000
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0])
    prompt, generated = [0, 4], [1, 1, 2]
    rows = [row(prompt, generated, position=position, **options) for position in range(draws)]
    params = rows[0].params
    expected = exact_distribution(naive(logits.tolist(), prompt, generated, params), params)
    counts = Counter(sample(logits.repeat(draws, 1), rows))
    assert counts.keys() <= expected.keys()
    chi_square = sum((counts[v] - draws * p) ** 2 / (draws * p) for v, p in expected.items())
    # beyond 40 with probability below 1e-5 for 7 degrees of freedom, less for fewer
    assert chi_square < 40


def exact_distribution(logits, params):
    """Temperature, then top_k, top_p and min_p, in float64: token -> probability."""
    weights = {v: math.exp(x / params.temperature) for v, x in enumerate(logits)}
    falling = sorted((v for v in weights if weights[v] > 0), key=lambda v: -weights[v])
    if params.top_k > 0:
        falling = falling[: params.top_k]
    total, before, kept = sum(weights[v] for v in falling), 0.0, []
    for v in falling:
        if before < params.top_p * total and weights[v] >= params.min_p * weights[falling[0]]:
            kept.append(v)
        before += weights[v]
    total = sum(weights[v] for v in kept)
    return {v: weights[v] / total for v in kept}
