"""How long steps of a packed model take on this machine, and how many tokens they should have.

What is timed are prompts, with logits for as many of their tokens as sequences might decode in
their place: a step that both have part in. Where contexts are long it takes longer. What counts is
the processor's time, a thread: that of the clock would be other processes' on a busy machine.
"""

import functools
import hashlib
import logging
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.calibration import (
    DEFAULT_NUM_TOKENS,
    SIZES,
    cache_folder,
    kept_or_measured,
    measured,
    suitable_num_tokens,
)
from engine.config import EngineConfig
from engine.kv_cache import KVCache, KVCacheShape
from engine.layers.attention import AttentionMetadata
from engine.models.model import Model
from engine.models.packing import Packing

logger = logging.getLogger(__name__)

LEAST_WEIGHTS = 4_000_000  # a smaller model's step is Python's time, and there is nothing to choose
NUM_LOGITS = 64
PROMPT_TOKENS = 128  # of each sequence: larger steps have more of them, not longer ones
CPU = torch.device("cpu")


def max_num_batched_tokens(
    config: EngineConfig, model: Model, packing: Packing | None, shape: KVCacheShape
) -> int:
    """Tokens in one step: the setting, what suits this machine, or the default."""
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    if packing is None or not config.step_target_ms:
        return DEFAULT_NUM_TOKENS
    # Numba takes a second to import, and a GPU does without
    from engine.models.packed_decoder import PackedDecoder

    if not isinstance(model, PackedDecoder) or model.num_multiplied < LEAST_WEIGHTS:
        return DEFAULT_NUM_TOKENS
    target_s = config.step_target_ms / 1e3
    key = {
        **model.cost_key,
        "cpu": _cpu(),
        "kernels": _kernels(),
        "kv_dtype": str(shape.dtype),
        "target_ms": config.step_target_ms,
    }
    times, anew = kept_or_measured(
        key,
        lambda: measured(_timed(model, shape, model.num_workers), SIZES, target_s=target_s),
        cache_folder(),
    )
    chosen = suitable_num_tokens(times, max_num_seqs=config.max_num_seqs, target_s=target_s)
    logger.info(
        "steps have at most %d tokens: %s (tokens: ms) %s target_ms=%d",
        chosen, "measured" if anew else "measured earlier",
        " ".join(f"{size}: {seconds * 1e3:.1f}" for size, seconds in sorted(times.items())),
        config.step_target_ms,
    )  # fmt: skip
    return chosen


def _timed(model: Model, shape: KVCacheShape, num_threads: int) -> Callable[[int], float]:
    """Computes prompts of so many tokens, in a cache of their own; tells each thread's seconds."""
    most = min(PROMPT_TOKENS, model.max_position_embeddings)
    num_blocks = -(-most // shape.block_size)  # of each prompt
    cache = KVCache(shape, -(-SIZES[-1] // most) * num_blocks, CPU)

    @torch.inference_mode()
    def step(num_tokens: int) -> float:
        token = torch.arange(num_tokens)
        owner, positions = token // most, token % most
        ends = torch.tensor([*range(0, num_tokens, most), num_tokens], dtype=torch.int32)
        num_prompts = len(ends) - 1
        metadata = AttentionMetadata(
            cu_query_lens=ends,
            seq_lens=ends.diff(),
            slot_mapping=owner * (num_blocks * shape.block_size) + positions,
            block_tables=torch.arange(num_prompts * num_blocks, dtype=torch.int32).view(
                num_prompts, num_blocks
            ),
        )
        token_ids = token % model.vocab_size
        started = time.process_time()
        model.forward(token_ids, positions, metadata, cache.layers, token[-NUM_LOGITS:])
        return (time.process_time() - started) / num_threads

    return step


def _cpu() -> str:
    """The processor by the name that it has for people, and by what kernels are compiled for."""
    from engine.kernels.cpu.machine import FEATURES, HAS_AMX

    try:
        names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text("utf-8"), re.M)
    except (OSError, UnicodeDecodeError):
        names = []
    features = hashlib.sha256(f"{sorted(FEATURES)} {HAS_AMX}".encode()).hexdigest()
    return f"{names[0] if names else platform.processor() or platform.machine()} {features[:8]}"


@functools.cache
def _kernels() -> str:
    """What the kernels are compiled from."""
    from engine.kernels import cpu

    digest = hashlib.sha256()
    for source in sorted(Path(cpu.__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
