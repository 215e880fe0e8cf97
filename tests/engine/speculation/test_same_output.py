"""Drafts change nothing: each row is, token for token, what it is alone and without them.

The guesses come from an oracle that knows each row's output and errs at random, so that runs of
every length are confirmed, at every place: at the end of a text, in a form, in a thought. Or they
come from a draft model that shares a layer with the model.
"""

import json
import math
import random
import re
from collections import Counter
from itertools import product

import pytest

from engine import EngineConfig, LLMEngine, SamplingParams
from engine.speculation.speculator import Speculator
from tests.engine import test_all_features as all_features
from tests.engine.mixes import FIRST_WORD, TinyModel, write_model
from tests.tiny_llama import HEAD_DIM, NUM_KV_HEADS, VOCAB_SIZE

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return TinyModel(write_model(tmp_path_factory.mktemp("model"), num_layers=1))


@pytest.fixture(scope="module")
def drafts(tmp_path_factory):
    """Settings of an engine with a draft model of another depth."""
    draft_model = write_model(tmp_path_factory.mktemp("draft-model"), num_layers=2)
    return {"speculation": "draft", "draft_model": str(draft_model), "num_draft_tokens": 5}


class Oracle:
    """Guesses what a row's output alone has next, often wrongly."""

    def __init__(self, draw, pairs):
        self.draw = draw
        self.lone = {id(ask.params): lone for ask, lone in pairs}

    def propose(self, plan, counts, pays):
        drafts = [self.guess(r.sequence, n) for r, n in zip(plan.scheduled, counts, strict=True)]
        return drafts if pays(sum(map(len, drafts))) else [()] * len(drafts)

    def guess(self, sequence, count):
        if not count:
            return ()
        known = self.lone[id(sequence.params)].completions[sequence.sample_index].token_ids
        ahead = [*known[sequence.num_generated_tokens :], *self.draw.choices(range(200), k=count)]
        if self.draw.random() < 0.6:
            ahead[self.draw.randrange(len(ahead))] = self.draw.randrange(VOCAB_SIZE)
        return tuple(ahead[:count])


@pytest.mark.parametrize("kind", ["oracle", "draft model"])
def test_every_row_among_all_others_is_as_it_is_alone(model, drafts, monkeypatch, kind):
    seed = 1
    monkeypatch.setattr(all_features, "NUM_ASKS", 40)
    crowd = all_features.Crowd(model, random.Random(seed))
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 60}
    if kind == "oracle":
        crowd.engine = model.engine(clock=lambda: crowd.now, **limits)
        oracle = Oracle(random.Random(seed), crowd.pairs)
        crowd.engine._stepper.speculator = Speculator(oracle, 5, lambda: 0.0)
    else:
        crowd.engine = model.engine(clock=lambda: crowd.now, **limits, **drafts)
    num_steps = 0
    while num_steps < 600 or crowd.engine.has_unfinished:
        crowd.step(more=num_steps < 600)
        num_steps = crowd.engine.stats().num_steps
        if kind == "draft model":
            crowd.engine._stepper.speculator.proposer.check()
    stats = crowd.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.confirmed_tokens > 300
    assert stats.draft_tokens - stats.confirmed_tokens > 100
    assert stats.num_preemptions >= 10
    assert crowd.drawn["like alone"] > 100


def test_a_text_found_in_the_prompt_takes_fewer_steps(model):
    def run(**config):
        engine = model.engine(clock=lambda: 0.0, **config)
        [output] = engine.generate([prompt], params)
        return output, engine.stats()

    prompt = [FIRST_WORD + 3, FIRST_WORD + 1, *[FIRST_WORD + 2] * 8]
    params = SamplingParams(max_tokens=30, allowed_token_ids=(FIRST_WORD + 2,), ignore_eos=True)
    plain, _ = run()
    quick, stats = run(speculation="ngram", num_draft_tokens=5)
    assert quick.completions == plain.completions
    assert stats.generated_tokens == 30
    assert stats.drawing_seqs < 15
    assert stats.confirmed_tokens == stats.generated_tokens - stats.drawing_seqs


@pytest.mark.parametrize("kind", ["always the same", "draft model"])
def test_what_is_drawn_with_drafts_has_the_model_s_own_distribution(model, drafts, kind):
    """Pearson's chi-square over pairs of tokens, whose probabilities the model tells itself."""
    allowed, prompt, num_draws = (10, 40, 90, 200), [9, 30, 77], 3000
    settings = drafts if kind == "draft model" else {}
    engine = model.engine(clock=lambda: 0.0, max_num_seqs=6, **settings)
    scored = engine.generate(
        [[*prompt, first, second] for first, second in product(allowed, allowed)],
        SamplingParams(max_tokens=0, prompt_logprobs=0),
    )
    weights = {
        pair: [score.logprob for score in output.prompt_logprobs[-2:]]
        for pair, output in zip(product(allowed, allowed), scored, strict=True)
    }
    first_of = {pair[0]: math.exp(scores[0]) for pair, scores in weights.items()}
    expected = {
        (first, second): first_of[first] / sum(first_of.values())
        * math.exp(scores[1])
        / sum(math.exp(weights[first, other][1]) for other in allowed)
        for (first, second), scores in weights.items()
    }  # fmt: skip
    assert min(expected.values()) * num_draws > 5

    class Guess:
        """The same two tokens always: right as often as the model is to draw them."""

        def propose(self, plan, counts, pays):
            return [(40, 200)[:count] for count in counts]

    if kind != "draft model":
        engine._stepper.speculator = Speculator(Guess(), 2, lambda: 0.0)
    outputs = engine.generate(
        [prompt] * num_draws,
        [
            SamplingParams(max_tokens=3, allowed_token_ids=allowed, seed=seed, ignore_eos=True)
            for seed in range(num_draws)
        ],
    )
    assert engine.stats().confirmed_tokens > num_draws / 10
    drawn = Counter(output.completions[0].token_ids[:2] for output in outputs)
    chi_square = sum(
        (drawn[pair] - num_draws * share) ** 2 / (num_draws * share)
        for pair, share in expected.items()
    )
    assert chi_square < 37.7, "15 degrees of freedom: one in a thousand is beyond"


def test_what_cannot_be_guessed_is_refused_by_name():
    for config, message in (
        ({"speculation": "magic"}, "speculation must be off, ngram or draft, got 'magic'"),
        ({"speculation": "draft"}, "draft_model must name a checkpoint with speculation draft"),
        ({"num_draft_tokens": 0}, "num_draft_tokens must be at least 1"),
        ({"num_draft_tokens": 33}, "num_draft_tokens must be at most 32"),
    ):
        with pytest.raises(ValueError, match=message):
            EngineConfig(model="m", **config)


def test_a_draft_model_of_another_vocabulary_is_refused_by_name(model, tmp_path):
    other = write_model(tmp_path / "other", num_layers=1)
    file = other / "tokenizer.json"
    said = json.loads(file.read_text())
    [word, *_] = [word for word, token_id in said["model"]["vocab"].items() if token_id == 300]
    said["model"]["vocab"]["Grist"] = said["model"]["vocab"].pop(word)
    said["model"]["merges"] = []
    file.write_text(json.dumps(said))
    message = f"draft_model {other} has another vocabulary: token 300 is 'Grist', the model's is"
    with pytest.raises(ValueError, match=re.escape(message)):
        model.engine(speculation="draft", draft_model=str(other))


def test_a_draft_model_with_more_logits_is_refused_by_name(model, drafts, monkeypatch):
    monkeypatch.setattr(model.runner, "vocab_size", VOCAB_SIZE - 1)
    message = f"{VOCAB_SIZE} logits, the model has {VOCAB_SIZE - 1}"
    with pytest.raises(ValueError, match=message):
        model.engine(**drafts)


def test_the_memory_of_the_kv_cache_is_shared_with_the_draft_model(model, drafts):
    block_bytes = 16 * 2 * NUM_KV_HEADS * HEAD_DIM * 4  # of a layer, float32
    config = EngineConfig(
        **model.config | drafts | {"num_blocks": None, "kv_cache_bytes": 10 * 3 * block_bytes + 9}
    )
    engine = LLMEngine(config)
    draft = engine._stepper.speculator.proposer._runner
    assert engine.stats().num_blocks == draft.num_blocks == 10
    assert len(draft.kv_cache.layers) == 2
