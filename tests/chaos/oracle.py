"""Which jobs a chaos run asks for, and what text each must get, known before anything runs.

The model is the tiny Llama. Greedy jobs come from prompts whose two likeliest tokens lie apart
at every place, so that no batch, preemption or resume may change a bit that matters; a few sampled
ones are short. Each prompt carries a canary that must turn up nowhere but in its row.
"""

import random
from dataclasses import dataclass
from pathlib import Path

from engine.config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams
from tests.worker.deployment import MODEL

MARGIN = 3e-4  # of log-probability; sums in another order differ by a hundredth of it
NUM_DRAWN = 64
SAMPLED_TOKENS = 24
CANARY = "kanarie"  # what every prompt begins with, and no log may hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One job of a client's, and its answer."""

    prompt: str
    max_tokens: int
    seed: int | None  # None: greedy

    def body(self) -> dict[str, object]:
        sampling = {"temperature": 0.0} if self.seed is None else {"seed": self.seed}
        return {
            "model": MODEL,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            **sampling,
        }


@dataclass(frozen=True, slots=True)
class Known:
    """A prompt and the tokens that follow it."""

    prompt: str
    seed: int | None
    token_ids: tuple[int, ...]


class Oracle:
    """Draws jobs and knows their texts."""

    def __init__(
        self,
        model_dir: Path,
        *,
        most_tokens: int,
        kernels: str = "reference",
        num_drawn: int = NUM_DRAWN,
    ) -> None:
        self._most_tokens, self._num_drawn = most_tokens, num_drawn
        config = EngineConfig(
            model=str(model_dir), kernels=kernels, num_blocks=4000, max_num_seqs=NUM_DRAWN,
            max_num_batched_tokens=2048, num_threads=1,
        )  # fmt: skip
        self._engine = LLMEngine(config)
        self.greedy = self._greedy()
        self.sampled = self._sampled()

    def draw(self, rng: random.Random, low: int, high: int) -> Ask:
        """A job of `low` to `high` tokens; one in ten is sampled, and short."""
        if rng.random() < 0.1:
            known = rng.choice(self.sampled)
            return Ask(
                prompt=known.prompt, max_tokens=rng.randint(1, SAMPLED_TOKENS), seed=known.seed
            )
        known = rng.choice(self.greedy)
        return Ask(prompt=known.prompt, max_tokens=rng.randint(low, high), seed=None)

    def text(self, ask: Ask) -> str:
        known = next(
            each
            for each in (self.greedy if ask.seed is None else self.sampled)
            if (each.prompt, each.seed) == (ask.prompt, ask.seed)
        )
        return self._engine.tokenizer.decode(known.token_ids[: ask.max_tokens])

    def _greedy(self) -> list[Known]:
        prompts = [f"{canary(i)} once upon a time" for i in range(self._num_drawn)]
        params = SamplingParams(
            max_tokens=self._most_tokens, temperature=0.0, ignore_eos=True, logprobs=2
        )
        found = []
        for prompt, output in zip(prompts, self._engine.generate(prompts, params), strict=True):
            (completion,) = output.completions
            margins = [at.top[0][1] - at.top[1][1] for at in completion.logprobs or ()]
            if min(margins) > MARGIN:
                found.append(Known(prompt, None, completion.token_ids))
        assert len(found) >= 3, "the model cannot make up its mind"
        return found

    def _sampled(self) -> list[Known]:
        prompts = [f"{canary(i)} what is the capital" for i in range(8)]
        params = [
            SamplingParams(max_tokens=SAMPLED_TOKENS, seed=i, ignore_eos=True)
            for i in range(len(prompts))
        ]
        together = self._engine.generate(prompts, params)
        alone = [self._engine.generate([p], s)[0] for p, s in zip(prompts, params, strict=True)]
        return [
            Known(prompt, index, ours.completions[0].token_ids)
            for index, (prompt, ours, other) in enumerate(
                zip(prompts, together, alone, strict=True)
            )
            if ours.completions[0].token_ids == other.completions[0].token_ids
        ]


def canary(index: int) -> str:
    return f"{CANARY}{index:03d}"
