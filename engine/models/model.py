"""What the engine asks of a model, and which of the two tiers computes a checkpoint.

Tier 1 is this project's own lean decoder. What it does not express, tier 2 runs as transformers
wrote it, with attention and the KV cache of this engine. docs/models.md lists both.
"""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.collectives import ALONE, Group
from engine.kernels.registry import Kernels
from engine.kv_cache import LayerShape
from engine.layers.attention import AttentionMetadata
from engine.models.decoder import Decoder
from engine.models.packing import Packing
from engine.models.quantization import StoredQuantization
from engine.models.settings import DecoderSettings
from engine.weights import Checkpoint, UnsupportedModelError

logger = logging.getLogger(__name__)


class Model(Protocol):
    """A loaded model."""

    vocab_size: int
    max_position_embeddings: int  # tokens of the longest sequence
    kv_layers: tuple[LayerShape, ...]

    def forward(
        self,
        token_ids: Tensor,  # [T] int64, in [0, vocab)
        positions: Tensor,  # [T] int64, of each token in its own sequence
        metadata: AttentionMetadata,
        kv_caches: Sequence[Tensor],  # of each layer, changed
        logit_rows: Tensor,  # [R] int64, the tokens of the batch whose logits are wanted
    ) -> Tensor:  # [R, vocab] float32
        ...


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    packing: Packing | None = None,  # where compiled kernels are to compute what they can
    quantization: str = "none",  # of weights on a GPU: int8, int4 or fp8
    group: Group = ALONE,  # the ranks that compute the model together
) -> Model:
    """Raises a CheckpointError that names what cannot be computed, or is missing or too much."""
    if checkpoint.config.get("compression_config"):
        raise UnsupportedModelError(
            f"compression_config is not supported: {checkpoint.config['compression_config']!r:.200}"
        )
    stored = StoredQuantization.from_config(checkpoint.config)
    if "text_config" in checkpoint.config:
        # transformers takes seconds to import, and most checkpoints do without
        from engine.models.hf_text_part import text_part

        if stored is not None:
            raise UnsupportedModelError(
                "quantization_config is not supported of a model of text and images"
            )
        checkpoint = text_part(checkpoint)
    try:
        settings = DecoderSettings.from_config(checkpoint.config)
    except UnsupportedModelError as tier_1:
        if group.shard.size > 1:
            raise UnsupportedModelError(
                f"tensor_parallel is {group.shard.size}, but transformers computes this model, "
                f"whole: {tier_1}"
            ) from tier_1
        _check_unpacked(packing, "transformers computes the model")
        if stored is not None or quantization != "none":
            raise UnsupportedModelError(
                f"weights in few bits need this engine's own decoder: {tier_1}"
            ) from tier_1
        from engine.models.hf_decoder import HFDecoder

        try:
            return HFDecoder(checkpoint, dtype=dtype, device=device, kernels=kernels)
        except UnsupportedModelError as tier_2:
            raise tier_2 from tier_1
    if settings.experts is not None:
        _check_unpacked(packing, "they have no experts")
    elif packing is not None:
        # Numba takes a second to import, and a GPU does without
        from engine.models.packed_decoder import PackedDecoder

        return PackedDecoder(checkpoint, settings, **dataclasses.asdict(packing))
    return Decoder(
        checkpoint,
        settings,
        dtype=dtype,
        device=device,
        kernels=kernels,
        quantization=quantization,
        group=group,
    )


def _check_unpacked(packing: Packing | None, reason: str) -> None:
    """Say that a model is not packed where others are; refuse what only packed ones have."""
    if packing is None:
        return
    if packing.weight_dtype == torch.int8:
        raise UnsupportedModelError(f"quantization int8 needs compiled CPU kernels: {reason}")
    logger.warning("slow kernels in use, no compiled ones: %s", reason)
