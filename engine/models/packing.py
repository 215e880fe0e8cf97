"""In which types a model is kept and computed, and whether compiled kernels do it."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from engine.config import EngineConfig
from engine.sampler import CompiledDraws
from engine.weights import Checkpoint

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How a CPU's compiled kernels keep a model; their sums are in float32."""

    block_size: int  # tokens of a KV block
    weight_dtype: torch.dtype
    in_pairs: bool = False  # weights in 16 bits are multiplied by such, two at a time
    kv_in_pairs: bool = False  # likewise a bfloat16 KV cache
    kv_dtype: torch.dtype


def compute_dtype(name: str, device: torch.device, checkpoint: Checkpoint) -> torch.dtype:
    """The compute type. On a CPU float32 unless asked: half types have no fast products there."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    return checkpoint.dtype


def cache_dtype(config: EngineConfig, device: torch.device, computed: torch.dtype) -> torch.dtype:
    """In which type keys and values are kept by a model that computes in one."""
    name = config.kv_cache_dtype
    if name == "auto":
        small = config.quantization == "int8" and config.dtype == "auto"
        return _small_cache_dtype() if small and device.type == "cpu" else computed
    kept = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(name) or DTYPES[name]
    if device.type == "cpu":
        if name == "fp8":
            raise ValueError("kv_cache_dtype fp8 needs a GPU")
    elif kept.itemsize > 1 and kept != computed:
        raise ValueError(
            f"kv_cache_dtype {name} needs a CPU: on {device} the KV cache has the model's type, "
            "or is int8 or fp8"
        )
    elif name == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError("kv_cache_dtype fp8 needs a GPU of compute capability 8.9 or later")
    return kept


def _multiplied_in_pairs() -> set[torch.dtype]:
    """Types in 16 bits that this CPU multiplies faster than float32."""
    from engine.kernels.cpu.int16 import HAS_INT16
    from engine.kernels.cpu.pairs import HAS_PAIRS

    each = ((torch.bfloat16, HAS_PAIRS), (torch.float16, HAS_INT16))
    return {dtype for dtype, has_it in each if has_it}


def _small_cache_dtype() -> torch.dtype:
    """Keys and values beside 8-bit weights, which have cost more than their rounding does."""
    from engine.kernels.cpu.pairs import HAS_PAIRS

    return torch.bfloat16 if HAS_PAIRS else torch.float16


def packing_of(
    config: EngineConfig, device: torch.device, checkpoint: Checkpoint, kv_dtype: torch.dtype
) -> Packing | None:
    """How compiled kernels keep the model, where they can run.

    Raises ValueError where weights cannot be kept as a setting says.
    """
    if device.type == "cpu" and config.quantization in ("int4", "fp8"):
        raise ValueError(f"quantization {config.quantization} needs a GPU")
    reason = _not_packed_because(config, device)
    if reason is None:
        # weights as the checkpoint has them: nothing is lost, and no byte read that was not there
        kept = checkpoint.dtype if config.dtype == "auto" else DTYPES[config.dtype]
        small = config.quantization == "int8"
        if small:
            kept = torch.int8
        pairs = _multiplied_in_pairs()
        # only where it is asked for: by itself nothing is rounded that the checkpoint is not
        rounded = config.dtype in ("bfloat16", "float16")
        return Packing(
            block_size=config.block_size,
            weight_dtype=kept,
            in_pairs=rounded and kept in pairs,
            kv_in_pairs=(rounded or small) and kv_dtype == torch.bfloat16 and kv_dtype in pairs,
            kv_dtype=kv_dtype,
        )
    if config.quantization != "none" and device.type == "cpu":
        raise ValueError(f"quantization {config.quantization} needs compiled CPU kernels: {reason}")
    if config.quantization == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError("quantization fp8 needs a GPU of compute capability 8.9 or later")
    if device.type == "cpu" and config.kernels != "reference":
        logger.warning("slow kernels in use, no compiled ones: %s", reason)
    return None


def compiled_draws(packing: Packing | None) -> CompiledDraws | None:
    """The draws from whole rows of logits that go with compiled kernels."""
    if packing is None:
        return None
    from engine.kernels.cpu.draw import argmax, gumbel_argmax

    # once, so that it is compiled before a request waits for it
    logits = torch.zeros(1, 1)
    argmax(logits)
    gumbel_argmax(logits, np.ones(1, np.float32), np.zeros((1, 3), np.uint64))
    return CompiledDraws(argmax, gumbel_argmax)


def telling_of_compilation(
    packing: Packing | None, tell: Callable[[], None]
) -> AbstractContextManager[None]:
    """Inside it, `tell` is called once if kernels have to be compiled, before they are."""
    if packing is None:
        return nullcontext()
    from engine.kernels import cpu

    return cpu.telling_of_compilation(tell)


def _not_packed_because(config: EngineConfig, device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"the device is {device}"
    if config.kernels == "reference":
        return "kernels is reference"
    if config.tensor_parallel > 1:
        return f"tensor_parallel is {config.tensor_parallel}"
    # Numba takes a second to import, and a GPU does without
    from engine.kernels.cpu import unavailable
    from engine.kernels.cpu.emit import PANEL

    if config.block_size % PANEL:
        return f"block_size is no multiple of {PANEL}: {config.block_size}"
    return unavailable()
