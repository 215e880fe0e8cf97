"""Random mixes of options for a tiny model that thinks and calls tools, and their output alone."""

import copy
import math
from dataclasses import dataclass, fields

import torch

from engine import EngineConfig, LLMEngine, SamplingParams
from engine.model_runner import ModelRunner
from engine.sampling_params import RepetitionDetection
from engine.tokenizer import Tokenizer
from tests.engine.chat_models import TAGGED
from tests.tiny_llama import SPECIAL_TOKENS, VOCAB_SIZE, write_tiny_llama

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
THINK, END_OF_THINK = 3, 4
FIRST_WORD = 7  # ids below are of special tokens
BLOCK_SIZE, NUM_BLOCKS = 16, 16  # of blocks that the compiled kernels take
ROUNDING = 2e-5  # more than the logits of a row differ with what else is in its batch


def write_model(folder, **shape):
    write_tiny_llama(folder, special_tokens=(*SPECIAL_TOKENS, *TAGS), **shape)
    (folder / "chat_template.jinja").write_text(TAGGED)
    return folder


@dataclass(frozen=True)
class Ask:
    """A request that names all that its output depends on."""

    prompt: tuple[int, ...]
    params: SamplingParams


def some_prompt(draw, longest=24):
    """Often the beginning of another one."""
    story = [FIRST_WORD + i * 37 % (VOCAB_SIZE - FIRST_WORD) for i in range(longest)]
    own = [draw.randrange(FIRST_WORD, VOCAB_SIZE) for _ in range(draw.randint(1, 6))]
    return (*story[: draw.choice((0, 5, 8, 16, longest - 6))], *own)


def some_options(draw, max_tokens):
    """Options that act on tokens and text, a few of them at once, whatever else is asked for."""
    ids = [draw.randrange(VOCAB_SIZE) for _ in range(40)]
    choices = (
        {"presence_penalty": draw.uniform(-2, 2)},
        {"frequency_penalty": draw.uniform(-2, 2)},
        {"repetition_penalty": draw.uniform(0.5, 2)},
        {"logit_bias": tuple((v, draw.uniform(-5, 5)) for v in sorted(set(ids[:6])))},
        {"allowed_token_ids": tuple(range(draw.randrange(7), VOCAB_SIZE, 3))},
        {"bad_words": tuple(draw.sample(("in", "?", " upon", "do", "a job is"), 2))},
        {"stop_token_ids": tuple(ids[6 : 6 + draw.choice((3, 30))])},
        {"min_tokens": draw.randint(1, max_tokens)},
        {"ignore_eos": True},
        {"skip_special_tokens": False},
        {"include_stop_str_in_output": True},
    )
    options = {}
    for choice in draw.sample(choices, draw.choice((0, 1, 2, 3, 5))):
        options |= choice
    return options


def some_sampling(draw, max_tokens):
    """How tokens are drawn, and what is read and told of them while they come."""
    choices = (
        {"top_k": draw.choice((1, 3, 40, 200))},
        {"top_p": draw.uniform(0.3, 1)},
        {"min_p": draw.uniform(0, 0.2)},
        {"stop": tuple(draw.sample(("in", "do", "?", "e", " the", "queue"), 2))},
        {"repetition_detection": RepetitionDetection(max_pattern_size=3, min_count=3)},
        {"logprobs": draw.choice((0, 3))},
        {"prompt_logprobs": draw.choice((0, 2))},
        {
            "thinking_token_budget": draw.randint(0, max_tokens),
            "logit_bias": ((THINK, 6.0), (END_OF_THINK, -100.0)),
        },
    )
    options = {"temperature": draw.choice((0.0, 0.7, 1.0, 1.5)), "n": draw.choice((1, 1, 1, 2, 3))}
    for choice in draw.sample(choices, draw.choice((0, 1, 2, 4))):
        options |= choice
    return options


def some_beams(draw):
    num_beams, num_groups = draw.choice(((2, 1), (3, 1), (4, 1), (4, 2), (3, 3)))
    return {
        "num_beams": num_beams,
        "n": draw.randint(1, num_beams),
        "length_penalty": draw.choice((-1.0, 0.0, 1.0, 2.0)),
        "early_stopping": draw.choice((False, True, "never")),
        "num_beam_groups": num_groups,
        "diversity_penalty": draw.uniform(0.1, 3) if num_groups > 1 else 0.0,
    }


class ShakenRunner(ModelRunner):
    """Moves each logit at random by as much as rounding may."""

    noise = torch.Generator().manual_seed(0)

    def logits(self, scheduled, before=None):
        found = super().logits(scheduled, before)
        return found + ROUNDING * (2 * torch.rand(found.shape, generator=self.noise) - 1)


class TinyModel:
    """Engines that share one model and its little KV cache."""

    def __init__(self, folder):
        self.config = {
            "model": str(folder), "device": "cpu", "num_threads": 1, "num_blocks": NUM_BLOCKS,
            "block_size": BLOCK_SIZE,
        }  # fmt: skip
        self.tokenizer = Tokenizer.load(folder)
        eos_token_ids = self.tokenizer.eos_token_ids
        self.runner = ModelRunner(EngineConfig(**self.config), eos_token_ids=eos_token_ids)
        shaken = copy.copy(self.runner)
        shaken.__class__ = ShakenRunner
        still = {"enable_prefix_caching": False, "clock": lambda: 0.0}
        self._alone = self.engine(**still)
        self._shaken = self.engine(**still, runner=shaken)

    def engine(self, *, runner=None, clock=None, **config):
        return LLMEngine(
            EngineConfig(**self.config | config),
            tokenizer=self.tokenizer,
            runner=runner or self.runner,
            **({} if clock is None else {"clock": clock}),
        )

    def alone(self, ask):
        """A request's output when there is no other; None where it hangs on a rounding.

        A product of a whole batch rounds otherwise than that of one row. Where the two best tokens,
        or beams, are closer than that, the row may go either way. Such requests prove nothing.
        """
        prompt = list(ask.prompt)
        (output,) = self._alone.generate([prompt], ask.params)
        for _ in range(2):
            (shaken,) = self._shaken.generate([prompt], ask.params)
            if words(shaken) != words(output):
                return None
        return output


def words(output):
    """What may not differ at all."""
    return [
        (c.token_ids, c.text, c.finish_reason, c.stop_reason, c.error) for c in output.completions
    ]


def assert_same(output, lone):
    assert words(output) == words(lone)
    assert_close(output.prompt_logprobs, lone.prompt_logprobs)
    for completion, expected in zip(output.completions, lone.completions, strict=True):
        assert_close(completion.logprobs, expected.logprobs)


def assert_close(scores, expected):
    """Log-probabilities of the same tokens; their last bits depend on the batch."""
    assert (scores is None) == (expected is None)
    for score, wanted in zip(scores or (), expected or (), strict=True):
        assert (score is None) == (wanted is None)
        if score is not None:
            assert (score.token_id, len(score.top)) == (wanted.token_id, len(wanted.top))
            assert math.isclose(score.logprob, wanted.logprob, abs_tol=1e-4)


def names_of(params):
    """The options that are not as they are by default."""
    return {field.name for field in fields(params) if getattr(params, field.name) != field.default}
