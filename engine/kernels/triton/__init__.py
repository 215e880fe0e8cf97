"""Kernels for NVIDIA GPUs, in Triton.

Nothing of it has run on a GPU yet: Triton's interpreter computes with it in tests, and its compiler
compiles it for sm_80, sm_90 and sm_100. `docs/gpu.md` says what that proves.
"""

from dataclasses import replace

import torch

from engine.kernels.registry import Kernels
from engine.kernels.triton import (
    attention,
    copy,
    draws,
    experts,
    fp8,
    gates,
    norm,
    packed_linear,
    store,
)

OLDEST = (8, 0)  # compute capability: older ones have no bfloat16, and no copies that run beside


def unavailable() -> str | None:
    """Why these kernels cannot run on this machine; None where they can."""
    if torch.version.cuda is None:
        return "this torch is not built for CUDA"
    if torch.cuda.get_device_capability() < OLDEST:
        return "the GPU is older than compute capability {}.{}".format(*OLDEST)
    return None


def provide(kernels: Kernels) -> Kernels:
    return replace(
        kernels,
        paged_attention=attention.paged_attention,
        store_kv=store.store_kv,
        rotary_store_kv=store.rotary_store_kv,
        copy_blocks=copy.copy_blocks,
        rms_norm=norm.rms_norm,
        add_rms_norm=norm.add_rms_norm,
        silu_mul=gates.silu_mul,
        gelu_mul=gates.gelu_mul,
        moe=experts.moe,
        packed_linear=packed_linear.packed_linear,
        fp8_linear=fp8.fp8_linear,
        draw=draws.draw,
        penalize=draws.penalize,
    )
