"""Checkpoints with weights in few bits: AWQ (Lin et al. 2023) and GPTQ (Frantar et al. 2022).

Their files hold 32-bit words: GPTQ's of neighbouring inputs, AWQ's of outputs in an order of their
own. Here they become this engine's `PackedWeight`; nothing is rounded on the way.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint_files import shown
from engine.kernels.packed_weight import PackedWeight, pack
from engine.models.config_values import count, flag
from engine.weights import Checkpoint, MalformedCheckpointError, UnsupportedModelError

WORD_BITS = 32
# the output that each four bits of AWQ's word hold, lowest first: (0, 2, 4, 6, 1, 3, 5, 7) inverted
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """What config.json says of how weights are stored."""

    method: str  # awq or gptq
    bits: int  # 4, or GPTQ's 8
    group_size: int | None  # inputs that share a scale; None: all
    zero_offset: int  # of GPTQ's first form: what is stored is one less than the zero

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "StoredQuantization | None":
        """Raises UnsupportedModelError for what is not read, by name."""
        stored = config.get("quantization_config")
        if not stored:
            return None
        if not isinstance(stored, dict):
            raise MalformedCheckpointError(
                f"quantization_config must be an object, got {shown(stored)}"
            )
        method = stored.get("quant_method")
        if method not in ("awq", "gptq"):
            raise UnsupportedModelError(
                f"quantization_config has quant_method {shown(method)}; known are awq, gptq"
            )
        bits = count(stored, "bits", 4)
        if bits not in ((4,) if method == "awq" else (4, 8)):
            raise UnsupportedModelError(f"quantization_config has {bits} bits, with {method}")
        version = stored.get("version" if method == "awq" else "checkpoint_format")
        known = ("gemm", "GEMM", None) if method == "awq" else ("gptq", "gptq_v2", "", None)
        if version not in known:
            raise UnsupportedModelError(
                f"quantization_config has the format {shown(version)} of {method}"
            )
        if method == "awq" and not flag(stored, "zero_point", True):
            raise UnsupportedModelError("quantization_config has zero_point false")
        groups = stored.get("group_size", 128)
        return cls(
            method=method,
            bits=bits,
            group_size=None if groups == -1 else count(stored, "group_size", 128),
            zero_offset=1 if method == "gptq" and version != "gptq_v2" else 0,
        )

    def holds(self, checkpoint: Checkpoint, names: list[str]) -> bool:
        """Whether these weights are stored in few bits: all of them, or none."""
        found = [name for name in names if f"{name}.qweight" in checkpoint.names]
        if found and len(found) < len(names):
            raise UnsupportedModelError(f"of {', '.join(names)} only some are quantised")
        return bool(found)

    def take(
        self, checkpoint: Checkpoint, name: str, num_outputs: int, num_inputs: int
    ) -> PackedWeight:
        """Raises a TensorError, or UnsupportedModelError where its groups cannot be computed."""
        group_size = self.group_size or num_inputs
        each = WORD_BITS // self.bits
        if num_inputs % group_size or num_inputs % each or num_outputs % each:
            raise UnsupportedModelError(
                f"{name}: {num_outputs} x {num_inputs} is no multiple of its groups and words"
            )
        num_groups = num_inputs // group_size
        zeros = checkpoint.take_integers(f"{name}.qzeros", (num_groups, num_outputs // each))
        scales = checkpoint.take(f"{name}.scales", (num_groups, num_outputs))
        inputs = None
        if self.method == "awq":
            words = checkpoint.take_integers(f"{name}.qweight", (num_inputs, num_outputs // each))
            integers, zero = (_unpacked(x, 4)[..., AWQ_PLACES] for x in (words, zeros))
            integers, zero = integers.flatten(1), zero.flatten(1)
        else:
            words = checkpoint.take_integers(f"{name}.qweight", (num_inputs // each, num_outputs))
            integers = _unpacked(words, self.bits).transpose(1, 2).flatten(0, 1)
            zero = _unpacked(zeros, self.bits).flatten(1) + self.zero_offset
            if f"{name}.g_idx" in checkpoint.names:
                group_of = checkpoint.take_integers(f"{name}.g_idx", (num_inputs,))
                inputs = _by_group(name, group_of, group_size)
        if inputs is not None:
            integers = integers[inputs]
        if self.bits == 8:  # to int8: both numbers less, their difference the same
            integers, zero = integers - 128, zero - 128
        kind = torch.uint8 if self.bits == 4 else torch.int8
        if zero.max() > 127:
            raise UnsupportedModelError(f"{name} has a zero beyond 8 bits")
        try:
            return pack(integers.T.to(kind).contiguous(), scales.T, zero.T, inputs)
        except ValueError as error:
            raise UnsupportedModelError(f"{name}: {error}") from error


def _unpacked(
    words: Tensor,  # [rows, columns] int32
    bits: int,
) -> Tensor:  # [rows, columns, 32 // bits] int32, lowest bits first
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)


def _by_group(name: str, group_of: Tensor, group_size: int) -> Tensor | None:
    """Inputs in the order of their groups; None where they are so already."""
    inputs = group_of.argsort(stable=True)
    expected = torch.arange(len(group_of)) // group_size
    if not torch.equal(group_of[inputs].long(), expected):
        raise MalformedCheckpointError(f"{name}.g_idx has groups of other sizes than {group_size}")
    return None if torch.equal(group_of.long(), expected) else inputs
