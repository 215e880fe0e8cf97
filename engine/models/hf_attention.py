"""The attention that transformers' decoders are given instead of their own.

A decoder of transformers calls the attention function that its config names, once a layer, with
queries, keys and values. The function registered here hands them to whoever runs the step: the
paged cache when the model serves, a note of their shapes when it is looked over.

No mask is made, so causality, window, soft cap and sinks are applied by the kernel, from what the
layer passes along. Whose step it is stands in a context variable: a keyword would do as well for
most classes, but StableLM and Nemotron do not pass unknown keywords on.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from engine.kernels.registry import Kernels
from engine.kv_cache import LayerShape
from engine.layers.attention import AttentionMetadata

NAME = "tokenmill_paged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What a layer does to its scores, query × key, before the softmax."""

    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: Tensor | None  # [H]


class Attend(Protocol):
    """Who computes the attention of a step's layers."""

    def attend(
        self,
        layer: int,
        query: Tensor,  # [T, H, D]
        key: Tensor,  # [T, H_kv, D]
        value: Tensor,  # [T, H_kv, D_v]
        scores: Scores,
    ) -> Tensor:  # [T, H, D_v]
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedStep:
    """One step over the paged cache."""

    metadata: AttentionMetadata
    kv_caches: Sequence[Tensor]  # of each layer, changed
    kernels: Kernels

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores
    ) -> Tensor:
        cache, value_dim = self.kv_caches[layer], value.shape[2]
        width = max(key.shape[2], value_dim)
        # where keys and values differ in size (MLA), zeros fill the smaller; they add nothing
        query, key, value = (F.pad(x, (0, width - x.shape[2])) for x in (query, key, value))
        self.kernels.store_kv(key, value, cache, self.metadata.slot_mapping)
        attended = self.kernels.paged_attention(
            query.contiguous(),
            cache,
            self.metadata.block_tables,
            self.metadata.cu_query_lens,
            self.metadata.seq_lens,
            scale=scores.scale,
            sliding_window=scores.sliding_window,
            softcap=scores.softcap,
            sinks=scores.sinks,
        )
        return attended[..., :value_dim]


@dataclass(frozen=True, slots=True)
class Survey:
    """Notes which layers ask for attention, and what they would keep. Computes none."""

    calls: list[tuple[int, LayerShape]] = field(default_factory=list)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores
    ) -> Tensor:
        assert query.shape[1] % key.shape[1] == 0
        assert key.shape[1] == value.shape[1]
        head_dim = max(key.shape[2], value.shape[2])
        self.calls.append((layer, LayerShape(num_kv_heads=key.shape[1], head_dim=head_dim)))
        return query.new_zeros(*query.shape[:2], value.shape[2])


_step: ContextVar[Attend] = ContextVar("_step")


@contextmanager
def attention_of(step: Attend) -> Iterator[None]:
    """Layers called inside get their attention from `step`."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def _attention(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, H_kv, T, D]
    value: Tensor,  # [1, H_kv, T, D_v]
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_rest: Any,
) -> tuple[Tensor, None]:  # [1, T, H, D_v]
    layer = module.layer_idx
    assert isinstance(layer, int)
    scores = Scores(
        scale=query.shape[3] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    attended = _step.get().attend(layer, query, key, value, scores)
    return attended.unsqueeze(0).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, lambda *_args, **_rest: None)
