"""One step on the device: from a plan to a token for each row that samples.

Owns the model and the KV cache's memory. Knows nothing of text, or of which sequence comes next.
"""

import logging
from collections import abc
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from engine.assumed import UNKNOWN
from engine.collectives import ALONE, Group
from engine.config import EngineConfig
from engine.crew import Crew
from engine.cuda_graphs import Shape, StepGraphs, cuda_capture, shapes_for
from engine.kernels.memory import sent
from engine.kernels.registry import REFERENCE, select_kernels
from engine.kv_cache import KVCache, KVCacheShape
from engine.models.decoder import Decoder
from engine.models.model import Model, load_model
from engine.models.packing import (
    cache_dtype,
    compiled_draws,
    compute_dtype,
    packing_of,
    telling_of_compilation,
)
from engine.models.step_times import max_num_batched_tokens
from engine.step_batch import StepArrays, StepBatch, plan_arrays
from engine.step_draws import StepDraws
from engine.step_memory import StepMemory
from engine.step_message import decode_step, encode_step
from engine.step_plan import ScheduledSequence, StepPlan
from engine.step_result import Drawn, Known, Launched, StepResult
from engine.weights import Checkpoint, resolve_folder

logger = logging.getLogger(__name__)

CATCHING_UP = 2  # tokens that a draft model lacks, at most, where its drafts were confirmed


class Runner(Protocol):
    """What the engine needs of a ModelRunner."""

    num_blocks: int
    max_model_len: int
    max_num_batched_tokens: int  # where the engine's config leaves it open
    vocab_size: int
    eos_token_ids: frozenset[int]
    model_id: bytes

    def run(self, plan: StepPlan) -> StepResult: ...

    def close(self) -> None: ...


@runtime_checkable
class OverlappingRunner(Runner, Protocol):
    """One that can begin a step before the one before it is read."""

    overlaps: bool  # and is to do so

    def launch(self, plan: StepPlan, before: Launched | None) -> Launched: ...


class ModelRunner:
    """A model on one device. Raises CheckpointError or ValueError when it cannot be set up."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        eos_token_ids: frozenset[int] = frozenset(),  # the tokenizer's, beside the checkpoint's
        on_compile: abc.Callable[[], None] = lambda: None,  # before kernels are compiled, if any
        group: Group | None = None,  # of a rank that follows rank 0; None: this is rank 0
        on_loaded: abc.Callable[[], None] = lambda: None,  # for a rank that follows
        beside: "ModelRunner | None" = None,  # that has as many blocks of the same memory
        without_blocks: bool = False,  # they are made later, with `make_blocks`
        drafts: bool = False,  # for another model, step by step
    ) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.device = device_of(config, 0 if group is None else group.shard.rank)
        self._config = config
        # tokens of a sequence in steps that are worth capturing
        verified = 1 + (config.num_draft_tokens if config.speculation != "off" else 0)
        self._width = CATCHING_UP if drafts else verified
        self._crew: Crew | None = None
        if group is None and config.tensor_parallel > 1:
            if config.quantization != "none" and self.device.type == "cpu":
                raise ValueError(
                    f"quantization {config.quantization} needs tensor_parallel 1 on a CPU, "
                    f"got {config.tensor_parallel}"
                )
            self._crew = Crew(config, self.device)
        self._group = group or (self._crew.group if self._crew else ALONE)
        try:
            self._load(config, eos_token_ids, on_compile)
            on_loaded()
            if self._crew is not None:
                self._crew.wait_until_loaded()
            if not without_blocks:
                self.make_blocks(self._num_blocks(beside))
        except BaseException:
            self.close()
            raise

    def _load(
        self,
        config: EngineConfig,
        eos_token_ids: frozenset[int],
        on_compile: abc.Callable[[], None],
    ) -> None:
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
                    quantization="none" if packing is not None else config.quantization,
                    group=self._group,
                )
                compiled = compiled_draws(packing)
            self.eos_token_ids = checkpoint.eos_token_ids | eos_token_ids
            # a cache filled in another type, or by other kernels, holds other numbers
            kept_as = f"{dtype} {kv_dtype} {packing} {config.quantization}"
            self.model_id = checkpoint.fingerprint + kept_as.encode()
        self.vocab_size = self._model.vocab_size
        self.max_model_len = _max_model_len(config, self._model)
        self._draws = StepDraws(
            self.eos_token_ids, self._kernels, compiled, by_kernels=self.device.type == "cuda"
        )
        self._block_size = config.block_size
        self._shape = KVCacheShape(
            layers=self._model.kv_layers, block_size=config.block_size, dtype=kv_dtype
        )
        self.max_num_batched_tokens = max_num_batched_tokens(
            config, self._model, packing, self._shape
        )

    def make_blocks(self, num_blocks: int) -> None:
        """The KV cache, as large on every rank, and the steps that are captured with it."""
        config, shape = self._config, self._shape
        self.num_blocks = num_blocks
        self.kv_cache = KVCache(shape, self.num_blocks, self.device)
        self.overlaps = self._overlaps()
        self._graphs = self._captured()
        logger.info(
            "model %s loaded: device=%s ranks=%d kv_dtype=%s computed_by=%s num_blocks=%d "
            "max_model_len=%d",
            config.model, self.device, self._group.shard.size, shape.dtype,
            type(self._model).__name__, self.num_blocks, self.max_model_len,
        )  # fmt: skip

    def close(self) -> None:
        """End what other processes there are of this model; no step can be run after."""
        if self._crew is not None:
            self._crew.close()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Copy the plan's blocks, compute its tokens, and draw the next token of rows that sample.

        Changes the KV cache.
        """
        if self._crew is not None and plan.block_copies:
            with self._crew.in_step():
                self._crew.send(encode_step(plan.block_copies, None))
        self.kv_cache.copy_blocks(plan.block_copies, self._kernels)
        if plan.empty:
            return StepResult([], {})
        return self._draws.made(plan.scheduled, self.logits(plan.scheduled))

    @torch.inference_mode()
    def launch(self, plan: StepPlan, before: Launched | None) -> Launched:
        """Begin a step, with tokens that the one before draws and that only the device knows yet.

        Draws that hang on these tokens begin later, with the step's own `draw`.
        """
        self.kv_cache.copy_blocks(plan.block_copies, self._kernels)
        if plan.empty:
            return Known(StepResult([], {}))
        logits = self.logits(plan.scheduled, None if before is None else before.drawn)
        return self._draws.launched(plan.scheduled, logits)

    @torch.inference_mode()
    def logits(
        self, scheduled: abc.Sequence[ScheduledSequence], before: Drawn | None = None
    ) -> Tensor:
        """[R + S, vocab] float32: of the rows that sample, in order, then of what they score.

        Changes the KV cache. `before` is what the step before draws, for tokens not known yet.
        """
        arrays = plan_arrays(scheduled, self._block_size)
        unknown = np.flatnonzero(arrays.token_ids == UNKNOWN)
        arrays.token_ids[unknown] = 0
        arrays.check(
            vocab_size=self.vocab_size,
            num_blocks=self.num_blocks,
            max_model_len=self.max_model_len,
        )
        if self._crew is not None:  # which has no graphs, and no tokens that it does not know
            with self._crew.in_step():
                self._crew.send(encode_step((), arrays))
                return self._computed(arrays)
        graphs = self._graphs
        shape = None if graphs is None else graphs.shape_for(arrays)
        if graphs is None or shape is None:
            batch = arrays.to(self.device)
        else:
            batch = graphs.inputs(arrays, shape)
        if len(unknown):
            assert before is not None
            owners = np.searchsorted(arrays.cu_query_lens, unknown, side="right") - 1
            sources = [before.places[scheduled[i].sequence.seq_id] for i in owners]
            at, of = sent(torch.from_numpy(np.stack((unknown, sources))), self.device)
            # a row that could draw no token is told so, one step late: until then any will do
            batch.token_ids.index_copy_(0, at, before.ids[of].clamp(min=0))
        if graphs is not None and shape is not None:
            return graphs.replay(shape, len(arrays.logit_rows))
        return self._forward(batch, self.kv_cache.layers)

    @torch.inference_mode()
    def follow(self, message: bytes) -> None:
        """This rank's part of a step that rank 0 has planned."""
        copies, arrays = decode_step(message)
        self.kv_cache.copy_blocks(copies, self._kernels)
        if arrays is not None:
            self._computed(arrays)

    def _computed(self, arrays: StepArrays) -> Tensor:
        return self._forward(arrays.to(self.device), self.kv_cache.layers)

    def _forward(self, batch: StepBatch, kv_caches: abc.Sequence[Tensor]) -> Tensor:
        return self._model.forward(
            batch.token_ids,
            batch.positions,
            batch.metadata,
            kv_caches,
            batch.logit_rows,
        )

    def _overlaps(self) -> bool:
        # several ranks take each other's steps as they are known: one after the other
        alone = self._group.shard.size == 1
        return self._config.overlap_steps and self.device.type == "cuda" and alone

    def _captures(self) -> bool:
        # plain PyTorch's kernels read lengths back to the host, and transformers' code may
        own = isinstance(self._model, Decoder) and self._kernels is not REFERENCE
        return self._config.cuda_graphs and own and self._group.shard.size == 1

    def _shapes(self) -> list[Shape]:
        """Of the steps that are to be captured, if any are."""
        return shapes_for(self._config.max_num_seqs, self._width) if self._captures() else []

    @torch.inference_mode()
    def _captured(self) -> StepGraphs | None:
        """Steps of few tokens, captured; None where they are not to be, or cannot."""
        shapes = self._shapes() if self.device.type == "cuda" else []
        if not shapes:
            return None
        with torch.cuda.device(self.device):
            return StepGraphs(
                lambda batch: self._forward(batch, self.kv_cache.layers),
                cuda_capture(),
                shapes=shapes,
                max_blocks=-(-self.max_model_len // self._block_size),
                device=self.device,
            )

    def _num_blocks(self, beside: "ModelRunner | None") -> int:
        """Blocks that fit, with as many of another model beside them; the least of all ranks."""
        config, num_blocks = self._config, self._config.num_blocks
        if num_blocks is None:
            num_bytes, other_bytes = config.kv_cache_bytes, 0
            if self.device.type == "cuda":
                num_bytes = self._memory().left(config.gpu_memory_utilization)
            if beside is not None:
                other_bytes = beside._shape.block_bytes
                if beside.device.type == "cuda":
                    num_bytes -= beside._memory().captured_bytes()
            num_blocks = self._shape.num_blocks(num_bytes, beside=other_bytes)
        return self._group.least(num_blocks)

    def _memory(self) -> StepMemory:
        return StepMemory(
            forward=self._forward,
            device=self.device,
            shape=self._shape,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            max_num_tokens=self.max_num_batched_tokens,
            max_num_draws=self._config.max_num_seqs * self._width,
            graphs=self._shapes(),
            kernels=self._kernels if self._group.shard.rank == 0 else None,
        )


def device_of(config: EngineConfig, rank: int) -> torch.device:
    """Where a rank computes. Raises ValueError where there is no such device."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device(name)
    if not torch.cuda.is_available():
        raise ValueError(f"device is {name}, but this torch finds no CUDA device")
    if config.tensor_parallel > torch.cuda.device_count():
        raise ValueError(
            f"tensor_parallel is {config.tensor_parallel}, but there are "
            f"{torch.cuda.device_count()} CUDA devices"
        )
    return torch.device(f"cuda:{rank}" if config.tensor_parallel > 1 else name)


def _max_model_len(config: EngineConfig, model: Model) -> int:
    if config.max_model_len is None:
        return model.max_position_embeddings
    if config.max_model_len > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len must be at most the model's {model.max_position_embeddings}, "
            f"got {config.max_model_len}"
        )
    return config.max_model_len
