"""Which implementation of each operation a device uses. Decided once, when a model is loaded.

The reference is always there. A provider replaces the operations it does better on its device, and
knows itself whether it can run there.
"""

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.kernels import draws, fp8, packed_weight, reference
from engine.kernels.packed_weight import PackedWeight

logger = logging.getLogger(__name__)


class PagedAttention(Protocol):
    def __call__(
        self,
        query: Tensor,
        kv_cache: Tensor,
        block_tables: Tensor,
        cu_query_lens: Tensor,
        seq_lens: Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One implementation of each operation.

    Shapes and meaning are those of `reference`, of `draws`, `packed_weight` and `fp8`.
    """

    paged_attention: PagedAttention
    store_kv: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    copy_blocks: Callable[[Tensor, Tensor, Tensor], None]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    rotary_store_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    silu_mul: Callable[[Tensor], Tensor]
    gelu_mul: Callable[[Tensor], Tensor]
    moe: Callable[[Tensor, Tensor, Tensor | PackedWeight, Tensor | PackedWeight, int, bool], Tensor]
    packed_linear: Callable[[Tensor, PackedWeight, Tensor | None], Tensor]
    fp8_linear: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    draw: Callable[[Tensor, Tensor, Tensor], Tensor]
    penalize: Callable[[Tensor, Tensor, Tensor], None]


REFERENCE = Kernels(
    paged_attention=reference.paged_attention,
    store_kv=reference.store_kv,
    copy_blocks=reference.copy_blocks,
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    rotary_store_kv=reference.rotary_store_kv,
    silu_mul=reference.silu_mul,
    gelu_mul=reference.gelu_mul,
    moe=reference.moe,
    packed_linear=packed_weight.packed_linear,
    fp8_linear=fp8.fp8_linear,
    draw=draws.draw,
    penalize=draws.penalize,
)


def triton_kernels(kernels: Kernels) -> Kernels:
    """Triton comes with PyTorch's CUDA builds; elsewhere the kernels stay as they are."""
    if importlib.util.find_spec("triton") is None:
        logger.warning("slow kernels in use, no compiled ones: triton is not installed")
        return kernels
    from engine.kernels import triton

    reason = triton.unavailable()
    if reason is not None:
        logger.warning("slow kernels in use, no compiled ones: %s", reason)
        return kernels
    return triton.provide(kernels)


# device type -> providers, applied in order; one that cannot run here returns what it was given
PROVIDERS: dict[str, list[Callable[[Kernels], Kernels]]] = {"cpu": [], "cuda": [triton_kernels]}


def select_kernels(device: torch.device) -> Kernels:
    """The best implementation of each operation for a device."""
    kernels = REFERENCE
    for provide in PROVIDERS.get(device.type, []):
        kernels = provide(kernels)
    return kernels
