"""Tier 2: a decoder of transformers, run as it is written, over the paged KV cache.

Only classes of transformers itself are run, never a checkpoint's code, and nothing is fetched. A
class has to pass `hf_guard` first. Owns the weights; keys and values are in the engine's blocks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from engine.kernels.memory import allocate
from engine.kernels.registry import Kernels
from engine.layers.attention import AttentionMetadata
from engine.models.config_values import in_one_line
from engine.models.hf_attention import NAME, PagedStep, attention_of
from engine.models.hf_guard import check_class, survey
from engine.weights import (
    Checkpoint,
    MalformedCheckpointError,
    MissingTensorError,
    TensorShapeError,
    UnexpectedTensorError,
    UnsupportedModelError,
)

# settings of transformers' own running, which a checkpoint has no say in: some fetch code
NOT_OF_THE_MODEL = (
    "attn_implementation",
    "experts_implementation",
    "distributed_config",
    "fusion_config",
    "transformers_weights",
)


class HFDecoder:
    """A loaded model of transformers."""

    def __init__(
        self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, kernels: Kernels
    ) -> None:
        """Raises a CheckpointError that says why the model cannot be served, or what is amiss."""
        model_class, config = _class_and_config(checkpoint)
        try:
            check_class(model_class, config)
            self._model = _load(checkpoint, model_class, config, dtype, device)
            self.kv_layers = survey(self._model)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(
                f"{model_class.__name__} cannot be served: {error}"
            ) from error
        self._kernels = kernels
        self.vocab_size: int = config.vocab_size
        self.max_position_embeddings = _max_position_embeddings(config)

    def forward(
        self,
        token_ids: Tensor,  # [T] int64, in [0, vocab)
        positions: Tensor,  # [T] int64, of each token in its own sequence
        metadata: AttentionMetadata,
        kv_caches: Sequence[Tensor],  # of each layer, changed
        logit_rows: Tensor,  # [R] int64, the tokens of the batch whose logits are wanted
    ) -> Tensor:  # [R, vocab] float32
        step = PagedStep(metadata=metadata, kv_caches=kv_caches, kernels=self._kernels)
        with attention_of(step):
            out = self._model(
                input_ids=token_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=logit_rows,
            )
        logits: Tensor = out.logits[0].float()
        return logits


def _class_and_config(checkpoint: Checkpoint) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    read: dict[str, Any] = {
        key: value
        for key, value in checkpoint.config.items()
        if not key.startswith("_") and key not in NOT_OF_THE_MODEL
    }
    (architecture,) = read.get("architectures") or [None]
    model_type = read.pop("model_type", None)
    try:
        config = CONFIG_MAPPING[model_type].from_dict(read)
    except Exception as error:
        # unknown types, and settings that a class refuses, each with an error of its own
        raise UnsupportedModelError(
            f"{architecture}: transformers does not take its config.json: {in_one_line(error)}"
        ) from error
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None or model_class.__name__ != architecture:
        raise UnsupportedModelError(
            f"{architecture!r} is not the class of transformers that generates text for "
            f"model_type {model_type!r}"
        )
    return model_class, config


def _load(
    checkpoint: Checkpoint,
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    """The model with all of the checkpoint's tensors, each held once, in a type and on a device."""
    progress: Any = logging  # its functions carry no types
    progress.disable_progress_bar()
    try:
        loaded: Any = model_class.from_pretrained(
            None,
            config=config,
            state_dict=checkpoint.take_all(),
            dtype=dtype,
            attn_implementation=NAME,
            ignore_mismatched_sizes=True,  # they are reported, and refused below
            output_loading_info=True,
        )
    except Exception as error:
        raise MalformedCheckpointError(f"{checkpoint.folder}: {in_one_line(error)}") from error
    model, report = loaded
    for kind, error_of in (
        ("missing_keys", MissingTensorError),
        ("unexpected_keys", UnexpectedTensorError),
        ("mismatched_keys", TensorShapeError),
    ):
        if names := sorted(map(str, report[kind])):
            raise error_of(f"{checkpoint.folder}: {kind}: {', '.join(names[:5])}")
    for parameter in model.parameters():
        # one by one off the mapped file: into huge pages on a CPU, which it may change under
        parameter.data = allocate(parameter.shape, parameter.dtype, device).copy_(parameter)
    moved: PreTrainedModel = model.to(device)  # the buffers
    return moved


def _max_position_embeddings(config: PreTrainedConfig) -> int:
    """Tokens of the longest sequence whose keys stay what they are as it grows."""
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int):
        raise UnsupportedModelError("its config.json has no max_position_embeddings")
    rope = getattr(config, "rope_parameters", None) or {}
    for read in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if read.get("rope_type") == "longrope":
            # past this length all angles change, those of cached keys too
            longest = min(longest, read["original_max_position_embeddings"])
    return longest
