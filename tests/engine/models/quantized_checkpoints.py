"""Tiny checkpoints in the formats of AutoAWQ and AutoGPTQ, and the same weights in the open.

Written word by word, as those programs' packing loops do: what is read back by vectorised code of
the engine's own is proven against it.
"""

import json
import random
import shutil

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.tiny_llama import write_tiny_llama

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(values, bits, order):
    """Rows of numbers as 32-bit words: place i of a word holds number order[i]."""
    each = 32 // bits
    packed = np.zeros((len(values), values.shape[1] // each), np.uint32)
    for row, into in zip(values, packed, strict=True):
        for word in range(packed.shape[1]):
            for place in range(each):
                into[word] |= np.uint32(row[word * each + order[place]]) << np.uint32(bits * place)
    return packed.view(np.int32)


class Quantized:
    """One weight in random integers; `tensors` as a format has them, `weight` in the open."""

    def __init__(self, draw, shape, method, bits, group_size, *, desc_act=False, version=1):
        num_outputs, num_inputs = shape
        num_groups = num_inputs // group_size
        top = 2**bits
        rng = np.random.default_rng(draw.randrange(2**32))
        integers = rng.integers(0, top, (num_inputs, num_outputs), np.uint32)
        zeros = rng.integers(1, top, (num_groups, num_outputs), np.uint32)
        spread = 1 / (top / 4 * num_inputs**0.5)
        scales = (rng.uniform(0.5, 1.5, (num_groups, num_outputs)) * spread).astype(np.float16)
        group_of = np.arange(num_inputs) // group_size
        if desc_act:
            group_of = draw.permuted[num_inputs] // group_size
        difference = integers.astype(np.float32) - zeros[group_of].astype(np.float32)
        self.weight = (difference * scales[group_of].astype(np.float32)).T.copy()
        plain = tuple(range(32 // bits))
        self.tensors = {"scales": scales}
        if method == "awq":
            self.tensors["qweight"] = words(integers, 4, AWQ_ORDER)
            self.tensors["qzeros"] = words(zeros, 4, AWQ_ORDER)
        else:
            self.tensors["qweight"] = words(integers.T, bits, plain).T.copy()
            self.tensors["qzeros"] = words(zeros - (version == 1), bits, plain)
            self.tensors["g_idx"] = group_of.astype(np.int32)
            self.tensors["bias"] = np.zeros(num_outputs, np.float16)  # AutoGPTQ writes it always


class Draw(random.Random):
    """With one order of inputs for each number of them: projections of one input share theirs."""

    def __init__(self, seed):
        super().__init__(seed)
        rng = np.random.default_rng(seed)
        self.permuted = {size: rng.permutation(size) for size in (64, 128)}


def write_quantized(folder, seed, *, method, bits=4, group_size=32, desc_act=False, version=1):
    """Writes folder/quantized and folder/open, float32; returns both."""
    packed = write_tiny_llama(folder / "quantized", seed=seed % 2**32)
    weights = load_file(packed / "model.safetensors")
    draw, kept = Draw(seed % 2**32), {}
    for name in list(weights):
        if name.split(".")[-2] in PROJECTIONS:
            shape = weights[name].shape
            made = Quantized(
                draw, shape, method, bits, min(group_size, shape[1]),
                desc_act=desc_act, version=version,
            )  # fmt: skip
            del weights[name]
            stem = name.removesuffix(".weight")
            kept |= {f"{stem}.{part}": tensor for part, tensor in made.tensors.items()}
            weights[name] = made.weight
    whole = folder / "open"
    shutil.copytree(packed, whole)
    save_file(weights, whole / "model.safetensors", metadata={"format": "pt"})
    rest = {name: w for name, w in weights.items() if name.split(".")[-2] not in PROJECTIONS}
    save_file(rest | kept, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": method, "bits": bits, "group_size": group_size, "desc_act": desc_act,
    } | (
        {"version": "gemm", "zero_point": True}
        if method == "awq"
        else {"checkpoint_format": "gptq" if version == 1 else "gptq_v2", "sym": False}
    )  # fmt: skip
    (packed / "config.json").write_text(json.dumps(config))
    return packed, whole
