"""What steps take of a GPU's memory, found by running the largest: the KV cache gets the rest.

Knows no plan and no sequence; of the model what computes a batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cuda_graphs import Shape, padding
from engine.kernels.registry import Kernels
from engine.kv_cache import KVCache, KVCacheShape
from engine.layers.attention import AttentionMetadata
from engine.logprobs import token_logprobs
from engine.sampler import SampledRow, sample
from engine.sampling_params import MAX_LOGPROBS, SamplingParams
from engine.step_batch import StepBatch

MAX_SCORED_LOGITS = 1 << 25  # 128 MiB of float32, and as much for their log-probabilities


def max_num_scored_tokens(vocab_size: int) -> int:
    """Known tokens that one step may score: their logits are kept from growing with the prompt."""
    return max(1, MAX_SCORED_LOGITS // vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """The steps of one model on one GPU, by the most there can be of everything in them."""

    forward: Callable[[StepBatch, Sequence[Tensor]], Tensor]
    device: torch.device
    shape: KVCacheShape
    vocab_size: int
    max_model_len: int
    max_num_tokens: int  # in a step
    max_num_draws: int  # in a step
    graphs: Sequence[Shape]  # that are to be captured
    kernels: Kernels | None  # to draw with; None on a rank that draws nothing

    def left(self, utilization: float) -> int:
        """Bytes for the KV cache, of a share of the GPU's memory."""
        torch.cuda.reset_peak_memory_stats(self.device)
        self.run_largest()
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        held = torch.cuda.memory_reserved(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        others = total - free - held  # the context, and other processes
        captured = self.captured_bytes()
        torch.cuda.empty_cache()
        return int(total * utilization) - others - peak - captured

    @torch.inference_mode()
    def captured_bytes(self) -> int:
        """What captured steps keep for themselves: as much as the largest takes, for they share."""
        if not self.graphs:
            return 0
        scratch = KVCache(self.shape, 1, self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        most_sequences = max(shape.num_sequences for shape in self.graphs)
        most_tokens = max(shape.num_tokens for shape in self.graphs)
        max_blocks = self.max_model_len // self.shape.block_size + 1
        batch = padding(most_sequences, most_tokens, max_blocks, self.device)
        self.forward(batch, scratch.layers)
        return torch.cuda.max_memory_allocated(self.device) - before

    @torch.inference_mode()
    def run_largest(self) -> None:
        """One step with as many tokens, draws and scores as a plan may have."""
        num_tokens = min(self.max_num_tokens, self.max_model_len)
        num_blocks = -(-num_tokens // self.shape.block_size)
        scratch = KVCache(self.shape, num_blocks, self.device)
        positions = torch.arange(num_tokens, device=self.device)
        num_draws = min(self.max_num_draws, num_tokens)
        num_rows = min(num_draws + max_num_scored_tokens(self.vocab_size), num_tokens)
        batch = StepBatch(
            token_ids=torch.zeros_like(positions),
            positions=positions,
            metadata=AttentionMetadata(
                cu_query_lens=torch.tensor([0, num_tokens], dtype=torch.int32, device=self.device),
                seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=self.device),
                slot_mapping=positions,
                block_tables=torch.arange(num_blocks, dtype=torch.int32, device=self.device)[None],
            ),
            logit_rows=positions[:num_rows],
        )
        logits = self.forward(batch, scratch.layers)
        if self.kernels is not None:
            row = SampledRow(params=SamplingParams(max_tokens=1), seed=0, position=0)
            sample(logits[:num_draws], [row] * num_draws, None, self.kernels)
            token_logprobs(logits[-num_rows:], [0] * num_rows, [MAX_LOGPROBS] * num_rows)
