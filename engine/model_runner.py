"""One step on the device: from a plan to a token for each row that samples.

Owns the model and the KV cache's memory. Knows nothing of text, or of which sequence comes next.
"""

import logging
import math
from collections import abc
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from engine.beam_search import Candidates, num_candidates
from engine.config import EngineConfig
from engine.kernels.registry import select_kernels
from engine.kv_cache import KVCache, KVCacheShape
from engine.layers.attention import AttentionMetadata
from engine.logits_processors import TokenHistory
from engine.logprobs import token_logprobs
from engine.models.model import Model, load_model
from engine.models.packing import (
    cache_dtype,
    compiled_draws,
    compute_dtype,
    packing_of,
    telling_of_compilation,
)
from engine.models.step_times import max_num_batched_tokens
from engine.outputs import TokenLogprobs
from engine.sampler import (
    NothingAllowedError,
    NumericalError,
    SampledRow,
    sample,
)
from engine.sampling_params import MAX_LOGPROBS, SamplingParams
from engine.sequence import Sequence
from engine.step_plan import ScheduledSequence, StepPlan
from engine.token_rules import NO_RULES
from engine.weights import Checkpoint, resolve_folder

logger = logging.getLogger(__name__)

MAX_SCORED_LOGITS = 1 << 25  # 128 MiB of float32, and as much for their log-probabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """A plan as tensors: the step's tokens of all sequences, end to end."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    metadata: AttentionMetadata
    # [R + S] int64: the last token of each row that samples, then those whose logits score the next
    logit_rows: Tensor


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave its rows, each at its place in the plan.

    A row's token is None where it does not sample, a NumericalError where its logits are not
    numbers; a beam has its candidates there. Scores are of known tokens first, then of the one
    drawn; only rows that ask have any.
    """

    tokens: list[int | Candidates | NumericalError | None]
    scores: dict[int, list[TokenLogprobs]]


class ModelRunner:
    """A model on one device. Raises CheckpointError or ValueError when it cannot be set up."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        eos_token_ids: frozenset[int] = frozenset(),  # the tokenizer's, beside the checkpoint's
        on_compile: abc.Callable[[], None] = lambda: None,  # before kernels are compiled, if any
    ) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.device = _device(config.device)
        self._kernels = select_kernels(self.device)
        with Checkpoint(resolve_folder(config.model)) as checkpoint:
            dtype = compute_dtype(config.dtype, self.device, checkpoint)
            kv_dtype = cache_dtype(config, self.device, dtype)
            packing = packing_of(config, self.device, checkpoint, kv_dtype)
            with telling_of_compilation(packing, on_compile):
                self._model = load_model(
                    checkpoint,
                    dtype=dtype,
                    device=self.device,
                    kernels=self._kernels,
                    packing=packing,
                )
                self._draws = compiled_draws(packing)
            self.eos_token_ids = checkpoint.eos_token_ids | eos_token_ids
            # a cache filled in another type, or by other kernels, holds other numbers
            self.model_id = checkpoint.fingerprint + f"{dtype} {kv_dtype} {packing}".encode()
        self.vocab_size = self._model.vocab_size
        self.max_model_len = _max_model_len(config, self._model)
        self._histories: WeakKeyDictionary[Sequence, TokenHistory] = WeakKeyDictionary()
        self._block_size = config.block_size
        shape = KVCacheShape(
            layers=self._model.kv_layers, block_size=config.block_size, dtype=kv_dtype
        )
        self.max_num_batched_tokens = max_num_batched_tokens(config, self._model, packing, shape)
        self.num_blocks = config.num_blocks or shape.num_blocks(self._cache_bytes(config, shape))
        self.kv_cache = KVCache(shape, self.num_blocks, self.device)
        logger.info(
            "model %s loaded: device=%s dtype=%s kv_dtype=%s computed_by=%s num_blocks=%d "
            "max_model_len=%d",
            config.model, self.device, dtype, kv_dtype, type(self._model).__name__,
            self.num_blocks, self.max_model_len,
        )  # fmt: skip

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Copy the plan's blocks, compute its tokens, and draw the next token of rows that sample.

        Changes the KV cache.
        """
        self.kv_cache.copy_blocks(plan.block_copies, self._kernels)
        result = StepResult([None] * len(plan.scheduled), {})
        if plan.empty:
            return result
        scheduled = plan.scheduled
        sampling = [i for i, row in enumerate(scheduled) if row.samples]
        logits = self.logits(scheduled)
        # masks are made here, while a GPU computes the logits
        masks = [_mask(scheduled[i].sequence) for i in sampling]
        drawable, known = logits[: len(sampling)], logits[len(sampling) :]
        asked = [
            (r, i)
            for r, i in enumerate(sampling)
            if scheduled[i].sequence.params.logprobs is not None
        ]
        # a copy: to draw changes logits where a row has options
        raw = drawable[[r for r, _ in asked]] if asked else drawable[:0]
        rows = [
            self._sampled_row(scheduled[i].sequence, mask)
            for i, mask in zip(sampling, masks, strict=True)
        ]
        for i, drawn, mask in zip(
            sampling, sample(drawable, rows, self._draws), masks, strict=True
        ):
            result.tokens[i] = mask if isinstance(mask, NumericalError) else drawn
        _score_known(result, scheduled, known)
        _score_drawn(result, scheduled, [i for _, i in asked], raw)
        return result

    @torch.inference_mode()
    def logits(self, scheduled: abc.Sequence[ScheduledSequence]) -> Tensor:
        """[R + S, vocab] float32: of the rows that sample, in order, then of what they score.

        Changes the KV cache.
        """
        batch = self._batch(scheduled)
        return self._model.forward(
            batch.token_ids,
            batch.positions,
            batch.metadata,
            self.kv_cache.layers,
            batch.logit_rows,
        )

    def _batch(self, scheduled: abc.Sequence[ScheduledSequence]) -> StepBatch:
        token_ids: list[int] = []
        for row in scheduled:
            start = row.sequence.num_computed_tokens
            token_ids += row.sequence.token_ids[start : start + row.num_scheduled_tokens]
        tokens = np.array(token_ids, dtype=np.int64)
        query_lens = np.array([row.num_scheduled_tokens for row in scheduled], dtype=np.int64)
        computed = np.array([row.sequence.num_computed_tokens for row in scheduled], dtype=np.int64)
        samples = np.array([row.samples for row in scheduled], dtype=np.bool_)
        # the logits at a place are for the token behind it
        scoring = [
            start - row.sequence.num_computed_tokens + place - 1
            for start, row in zip(np.cumsum(query_lens) - query_lens, scheduled, strict=True)
            for place in row.scored
        ]
        seq_lens = computed + query_lens
        cu_query_lens = np.concatenate(([0], query_lens.cumsum()))
        # a row's tokens are consecutive: count through the batch, then move each row to its start
        positions = np.arange(len(tokens)) + np.repeat(computed - cu_query_lens[:-1], query_lens)
        num_blocks = -(-seq_lens // self._block_size)
        block_tables = np.zeros((len(scheduled), int(num_blocks.max())), dtype=np.int64)
        for table, row, count in zip(block_tables, scheduled, num_blocks, strict=True):
            table[:count] = row.sequence.block_table[:count]
        owner = np.repeat(np.arange(len(scheduled)), query_lens)
        blocks = block_tables[owner, positions // self._block_size]
        # what becomes an index on the device is checked here: out of range it would take down all
        assert len(tokens) == cu_query_lens[-1]
        assert tokens.min() >= 0
        assert tokens.max() < self.vocab_size
        assert block_tables.min() >= 0
        assert block_tables.max() < self.num_blocks
        assert seq_lens.max() <= self.max_model_len
        return StepBatch(
            token_ids=self._tensor(tokens, torch.int64),
            positions=self._tensor(positions, torch.int64),
            metadata=AttentionMetadata(
                cu_query_lens=self._tensor(cu_query_lens, torch.int32),
                seq_lens=self._tensor(seq_lens, torch.int32),
                slot_mapping=self._tensor(
                    blocks * self._block_size + positions % self._block_size, torch.int64
                ),
                block_tables=self._tensor(block_tables, torch.int32),
            ),
            logit_rows=self._tensor(
                np.concatenate((cu_query_lens[1:][samples] - 1, np.array(scoring, dtype=np.int64))),
                torch.int64,
            ),
        )

    def _sampled_row(
        self, sequence: Sequence, mask: bytes | NothingAllowedError | None
    ) -> SampledRow:
        params = sequence.params
        stop_ids = params.stop_ids(self.eos_token_ids)
        banned: tuple[int, ...] = ()
        history = self._history(sequence)
        if history is not None:
            banned = history.banned(sequence.token_ids)
        if sequence.num_generated_tokens < params.min_tokens:
            # what would end the generation is not drawn; passed over, it would stand in the text
            banned += tuple(sorted(stop_ids))
        return SampledRow(
            params=params,
            seed=sequence.seed,
            position=sequence.num_tokens,
            banned=banned,
            mask=b"" if isinstance(mask, NothingAllowedError) else mask,
            tally=None if history is None else history.tally,
            forced=None if history is None else history.forced,
            num_candidates=num_candidates(params, len(stop_ids)),
        )

    def _history(self, sequence: Sequence) -> TokenHistory | None:
        """What is known of the tokens of a sequence with options that depend on them."""
        if not sequence.params.penalizes and sequence.token_rules is NO_RULES:
            return None
        history = self._histories.get(sequence)
        if history is None or not history.precedes(sequence.token_ids):
            history = self._histories[sequence] = TokenHistory(
                sequence.params, sequence.token_rules, sequence.num_prompt_tokens
            )
        history.catch_up(sequence.token_ids)
        return history

    def _tensor(self, array: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(array).to(self.device, dtype)

    def _cache_bytes(self, config: EngineConfig, shape: KVCacheShape) -> int:
        """Memory for the KV cache: what the settings say on a CPU, what is left on a GPU."""
        if self.device.type != "cuda":
            return config.kv_cache_bytes
        torch.cuda.reset_peak_memory_stats(self.device)
        self._run_largest_step(config, shape)
        free, total = torch.cuda.mem_get_info(self.device)
        held = torch.cuda.memory_reserved(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        others = total - free - held  # the context, and other processes
        torch.cuda.empty_cache()
        return int(total * config.gpu_memory_utilization) - others - peak

    @torch.inference_mode()
    def _run_largest_step(self, config: EngineConfig, shape: KVCacheShape) -> None:
        """One step with as many tokens, and as many rows with logits, as a plan may have."""
        num_tokens = min(self.max_num_batched_tokens, self.max_model_len)
        num_blocks = -(-num_tokens // shape.block_size)
        scratch = KVCache(shape, num_blocks, self.device)
        positions = torch.arange(num_tokens, device=self.device)
        num_sampling = min(config.max_num_seqs, num_tokens)
        num_rows = min(num_sampling + max_num_scored_tokens(self.vocab_size), num_tokens)
        logits = self._model.forward(
            torch.zeros_like(positions),
            positions,
            AttentionMetadata(
                cu_query_lens=torch.tensor([0, num_tokens], dtype=torch.int32, device=self.device),
                seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=self.device),
                slot_mapping=positions,
                block_tables=torch.arange(num_blocks, dtype=torch.int32, device=self.device)[None],
            ),
            scratch.layers,
            positions[:num_rows],
        )
        row = SampledRow(params=SamplingParams(max_tokens=1), seed=0, position=0)
        sample(logits[:num_sampling], [row] * num_sampling)
        token_logprobs(logits[-num_rows:], [0] * num_rows, [MAX_LOGPROBS] * num_rows)
        torch.cuda.synchronize(self.device)


def _mask(sequence: Sequence) -> bytes | NothingAllowedError | None:
    """What the sequence's form allows next, or why it allows nothing; None without a form."""
    if sequence.token_filter is None:
        return None
    try:
        return sequence.token_filter.mask(sequence.generated_ids)
    except ValueError as error:
        param = sequence.params.structured_outputs and sequence.params.structured_outputs.param
        return NothingAllowedError(f"{param} allows no further token: {error}")


def max_num_scored_tokens(vocab_size: int) -> int:
    """Known tokens that one step may score: their logits are kept from growing with the prompt."""
    return max(1, MAX_SCORED_LOGITS // vocab_size)


def _score_known(
    result: StepResult,
    scheduled: abc.Sequence[ScheduledSequence],
    logits: Tensor,  # [S, vocab]
) -> None:
    """Score prompts, and what an earlier attempt has generated."""
    if logits.shape[0] == 0:
        return
    places = [(i, row.sequence, place) for i, row in enumerate(scheduled) for place in row.scored]
    num_top = [
        (s.params.prompt_logprobs if place < s.num_prompt_tokens else s.params.logprobs) or 0
        for _, s, place in places
    ]
    scores = token_logprobs(logits, [s.token_ids[place] for _, s, place in places], num_top)
    for (i, _, place), score in zip(places, scores, strict=True):
        if math.isnan(score.logprob):
            result.tokens[i] = NumericalError(
                f"the logits for token {place} are not finite numbers"
            )
        result.scores.setdefault(i, []).append(score)


def _score_drawn(
    result: StepResult,
    scheduled: abc.Sequence[ScheduledSequence],
    asked: list[int],
    logits: Tensor,  # [len(asked), vocab], as the model gave them
) -> None:
    """Score the tokens that this step drew for rows that ask for it."""
    drawn = [result.tokens[i] for i in asked]
    kept = [n for n, token in enumerate(drawn) if isinstance(token, int)]
    if not kept:
        return
    token_ids = [token for token in drawn if isinstance(token, int)]
    num_top = [scheduled[asked[n]].sequence.params.logprobs or 0 for n in kept]
    for n, score in zip(kept, token_logprobs(logits[kept], token_ids, num_top), strict=True):
        result.scores.setdefault(asked[n], []).append(score)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name}, but this torch finds no CUDA device")
    return torch.device(name)


def _max_model_len(config: EngineConfig, model: Model) -> int:
    if config.max_model_len is None:
        return model.max_position_embeddings
    if config.max_model_len > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len must be at most the model's {model.max_position_embeddings}, "
            f"got {config.max_model_len}"
        )
    return config.max_model_len
