"""The whole engine but for text, on real shapes with random weights made on the device.

Scheduler, stepper and model runner as in `LLMEngine`; no tokenizer, so no word is made of the ids.
"""

import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor

from bench.gpu_split import Split, splitting
from engine import model_runner
from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.speculation.ngram import NgramProposer
from engine.speculation.speculator import Speculator
from engine.step_memory import max_num_scored_tokens
from engine.step_plan import StepPlan
from engine.step_result import StepResult
from engine.stepper import Stepper
from engine.totals import Totals

Row = dict[str, object]
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": LLAMA,
    "Qwen3-0.6B": QWEN | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "Qwen3-8B": QWEN | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
}  # fmt: skip
TINY: dict[str, Any] = LLAMA | {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
PROMPT_TOKENS, NEW_TOKENS = 125, 108  # the means of workload W1


class RandomCheckpoint:
    """Stands for a checkpoint's files: every tensor that is asked for is there, and noise."""

    names = frozenset[str]()
    eos_token_ids = frozenset[int]()
    fingerprint = b"random"

    def __init__(self, config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = dtype
        self.num_bytes = {"embedding": 0, "projections": 0, "rest": 0}  # that were taken
        self._device = device

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=self.dtype, device=self._device)
        part = "projections" if "_proj." in name else "rest"
        self.num_bytes["embedding" if "embed_tokens" in name else part] += tensor.nbytes
        if name.endswith("norm.weight"):
            return tensor.fill_(1.0)
        return tensor.normal_(std=shape[-1] ** -0.5)

    def bytes_read(self, quantization: str) -> float:
        """Of weights, in a step of decodes: of an embedding that is no head, too, only rows are."""
        kept = {"none": 1.0, "fp8": 0.5, "int4": 0.27}[quantization]
        head = self.num_bytes["embedding"] if self.config["tie_word_embeddings"] else 0
        return self.num_bytes["projections"] * kept + self.num_bytes["rest"] + head

    def check_all_taken(self, ignored: object) -> None:
        pass


def runner_of(
    config: dict[str, Any], device: torch.device, **settings: Any
) -> tuple[ModelRunner, RandomCheckpoint]:
    exact = device.type == "cpu" or settings.get("dtype") == "float32"
    dtype = torch.float32 if exact else torch.bfloat16
    checkpoint = RandomCheckpoint(config, device, dtype)
    with mock.patch.multiple(
        model_runner, Checkpoint=lambda folder: checkpoint, resolve_folder=Path
    ):
        runner = ModelRunner(EngineConfig(model="random", device=str(device), **settings))
    runner.overlaps = runner.overlaps or device.type == "cpu"  # the same way, where it only counts
    return runner, checkpoint


@dataclass(slots=True)
class Times:
    """Of one sequence, by the clock."""

    arrived_at: float
    token_at: list[float] = field(default_factory=list)


class Engine:
    """Sequences in, times of their tokens out."""

    def __init__(
        self,
        runner: ModelRunner,
        max_num_seqs: int,
        num_tokens: int,
        speculator: Speculator | None = None,
    ) -> None:
        self.runner = runner
        self.times: dict[str, Times] = {}
        self.token_ids: dict[str, list[int]] = {}
        self.num_steps = 0
        self.totals = Totals()
        self._scheduler = Scheduler(
            num_blocks=runner.num_blocks, block_size=16, max_num_seqs=max_num_seqs,
            max_num_batched_tokens=num_tokens, max_model_len=runner.max_model_len,
            max_num_scored_tokens=max_num_scored_tokens(runner.vocab_size),
            enable_prefix_caching=False,
        )  # fmt: skip
        self._stepper = Stepper(
            runner, self._scheduler, self.totals, time.perf_counter,
            speculator=speculator, has_waiting=lambda sequence: False,
            on_start=lambda plan, now: None,
        )  # fmt: skip

    def add(self, name: str, prompt: list[int], max_tokens: int, **options: Any) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)
        self.times[name] = Times(time.perf_counter())
        self._scheduler.add(name, prompt, params, seed=options.get("seed") or 0)

    @property
    def busy(self) -> bool:
        return self._scheduler.unfinished

    def step(self) -> None:
        self._stepper.step(time.perf_counter(), self._take_in)

    def _take_in(self, plan: StepPlan, result: StepResult) -> None:
        self.num_steps += 1
        tokens = [token if isinstance(token, int | list) else None for token in result.tokens]
        for row, token in zip(plan.scheduled, result.tokens, strict=True):
            assert token is None or isinstance(token, int | list), token
            if token is not None:
                self.times[row.sequence.request_id].token_at.append(time.perf_counter())
        changed: list[Sequence] = self._scheduler.update(plan, tokens, time.perf_counter())
        for sequence in changed:
            self.token_ids[sequence.request_id] = sequence.generated_ids

    @contextmanager
    def split(self) -> Iterator[Split]:
        """Inside it the parts of steps are timed, and steps are counted from its begin."""
        self.num_steps = 0
        with splitting(self.runner, self._scheduler) as split:
            yield split


def some_prompt(draw: random.Random, vocab: int, length: int) -> list[int]:
    return [draw.randrange(vocab) for _ in range(length)]


def steady_decode(engine: Engine, batch: int, num_steps: int, vocab: int) -> Row:
    """Steps of `batch` decodes alone, and what they are made of."""
    draw = random.Random(0)
    for i in range(batch):
        engine.add(f"decode {batch} {i}", some_prompt(draw, vocab, 8), num_steps + 12)
    for _ in range(8):
        engine.step()
    with engine.split() as split:
        started = time.perf_counter()
        for _ in range(num_steps):
            engine.step()
        wall_s = time.perf_counter() - started
        steps = max(1, engine.num_steps)
    on_device = split.on_device()
    while engine.busy:
        engine.step()
    parts = {f"{name}_ms": s / steps * 1e3 for name, s in split.on_processor.items()}
    parts |= {f"gpu_{name}_ms": s / steps * 1e3 for name, s in on_device.items()}
    gpu_s = sum(on_device.values())
    return {
        "measured": "steady decode", "batch": batch, "step_ms": wall_s / steps * 1e3,
        "gpu_ms": gpu_s / steps * 1e3, "gpu_idle": 1 - gpu_s / wall_s, **parts,
    }  # fmt: skip


def offline(engine: Engine, count: int, vocab: int, prompt: int, new: int) -> Row:
    draw = random.Random(1)
    for i in range(count):
        engine.add(f"offline {i}", some_prompt(draw, vocab, prompt), new)
    started = time.perf_counter()
    while engine.busy:
        engine.step()
    seconds = time.perf_counter() - started
    return {
        "measured": "offline", "requests": count, "prompt": prompt, "new": new,
        "tokens_s": count * new / seconds, "seconds": seconds,
    }  # fmt: skip


def under_load(
    engine: Engine, rate: float, seconds: float, vocab: int, sizes: tuple[int, int]
) -> Row:
    """Requests that arrive at random, so many a second on average."""
    draw = random.Random(2)
    prompt, new = sizes
    arrivals = [draw.expovariate(rate)]
    while arrivals[-1] < seconds:
        arrivals.append(arrivals[-1] + draw.expovariate(rate))
    names: list[str] = []
    started = time.perf_counter()
    while arrivals or engine.busy:
        while arrivals and time.perf_counter() - started >= arrivals[0]:
            names.append(f"load {len(names)}")
            engine.add(names[-1], some_prompt(draw, vocab, prompt), new)
            arrivals.pop(0)
        if engine.busy:
            engine.step()
    times = [engine.times[name] for name in names]
    first = sorted(t.token_at[0] - t.arrived_at for t in times)
    gaps = sorted(b - a for t in times for a, b in zip(t.token_at, t.token_at[1:], strict=False))
    return {
        "measured": "under load", "requests_s": rate, "requests": len(names),
        "ttft_p50_ms": statistics.median(first) * 1e3,
        "ttft_p99_ms": first[len(first) * 99 // 100] * 1e3,
        "itl_p50_ms": statistics.median(gaps or [0.0]) * 1e3,
        "itl_p99_ms": (gaps or [0.0])[len(gaps) * 99 // 100] * 1e3,
    }  # fmt: skip


def same_texts(config: dict[str, Any], device: torch.device, **settings: Any) -> Iterator[Row]:
    """Tokens with graphs, overlap and drafts, and without: the same draws of the same logits."""
    draw = random.Random(3)
    prompts = [some_prompt(draw, config["vocab_size"], 5 + 9 * i) for i in range(5)]

    def texts(fast: bool, speculation: str) -> Engine:
        torch.manual_seed(0)  # of the weights
        runner, _ = runner_of(
            config, device, cuda_graphs=fast, overlap_steps=fast, dtype="float32",
            speculation=speculation, **settings,
        )  # fmt: skip
        runner.overlaps = fast
        speculator = None
        if speculation != "off":
            speculator = Speculator(NgramProposer(), 4, time.perf_counter)
        engine = Engine(runner, 8, 64, speculator)
        for i, prompt in enumerate(prompts):
            engine.add(
                str(i), prompt, 24, temperature=0.5 * (i % 3), seed=i,
                # it hangs on the token before
                presence_penalty=0.5 * (i % 2),
                # few ids, so that texts repeat themselves
                allowed_token_ids=(7, 8, 9, 10) if i > 2 else None,
            )  # fmt: skip
        while engine.busy:
            engine.step()
        return engine

    wanted = texts(False, "off").token_ids
    for name, speculation in (("graphs and overlap", "off"), ("graphs and drafts", "ngram")):
        engine = texts(True, speculation)
        yield {
            "kernel": name, "ok": engine.token_ids == wanted, "of": len(prompts),
            "confirmed": engine.totals.confirmed_tokens,
        }  # fmt: skip
