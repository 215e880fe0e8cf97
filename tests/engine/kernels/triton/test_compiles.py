"""Every kernel, as the provider launches it, compiled for GPUs that are not there.

Read from what the compiler says: nothing spills from registers to memory, shared memory is within
the device's, and products are the matrix units'. Here bfloat16 is looked at, too, which the
interpreter cannot compute with.
"""

import pytest
import torch

from engine.kernels.packed_weight import PackedWeight, pack
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
from tests.engine.kernels.triton.compiler import SHARED_BYTES, compiled

CAPABILITIES = [
    pytest.param(each, marks=pytest.mark.long) if each == 100 else each for each in SHARED_BYTES
]
# what models ask for, by a head's size: (type, window, cap, sinks)
ATTENTION = {
    64: [("bfloat16", None, None, False), ("float16", 128, None, True)],  # Llama 3.2, gpt-oss
    80: [("bfloat16", None, None, False)],  # Phi 2
    96: [("bfloat16", 2047, None, False)],  # Phi 3
    128: [  # Llama 3, Mistral, Gemma 2 27B
        ("bfloat16", None, None, False),
        ("bfloat16", 4096, None, False),
        ("bfloat16", 4096, 50.0, True),
        ("float32", None, None, False),
    ],
    256: [  # Gemma 2 9B
        ("bfloat16", None, 50.0, False),
        ("float16", 4096, 50.0, False),
    ],
}
CASES = [(head_dim, *case) for head_dim, cases in ATTENTION.items() for case in cases]
# and over 8 bits, with so many query heads to a KV head: (head's size, heads, window, cap, sinks)
IN_8_BITS = [
    (64, 8, 128, None, True),  # gpt-oss
    (256, 2, 4096, 50.0, False),  # Gemma 2 9B
    (128, 7, None, None, False),  # Qwen2.5 7B
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in (
            (64, 8, None, None, True),
            (64, 7, None, None, False),  # Qwen2.5 0.5B
            (64, 3, None, None, False),  # Llama 3.2 1B has 4, SmolLM2 3
            (80, 1, None, None, False),  # Phi 2
            (96, 1, 2047, None, False),  # Phi 3
            (128, 1, None, None, False),  # Llama 2
            (128, 2, 4096, 50.0, False),  # Gemma 2 27B
            (128, 2, None, 50.0, False),
            (128, 4, 4096, None, False),  # Mistral
            (128, 5, None, None, False),  # Qwen2.5 32B
            (128, 8, 4096, 50.0, True),  # all at once, and Llama 3 70B's heads
            (256, 2, None, 50.0, False),  # Gemma 2's layers without a window
            (256, 4, 512, None, False),  # Gemma 3 1B
            (256, 8, None, None, False),  # Gemma 2B
            (256, 8, 4096, 50.0, True),
        )
    ),
]

pytestmark = pytest.mark.parametrize("capability", CAPABILITIES)


def kv_cache(num_blocks, num_kv_heads, head_dim, dtype, block_size=16):
    width = head_dim + 4 if dtype.itemsize == 1 else head_dim
    return torch.empty(num_blocks, num_kv_heads, 2, block_size, width, dtype=dtype)


def launch_attention(
    dtype,
    head_dim,
    *,
    window=None,
    softcap=None,
    sinks=False,
    kv_dtype=None,
    block_size=16,
    group=4,
):
    """A prompt's chunk beside decodes with long contexts: all four launches."""
    num_kv_heads, num_tokens, num_sequences = 2, 40, 16
    num_heads = num_kv_heads * group
    fused = torch.empty(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    attention.paged_attention(
        fused[:, :num_heads],
        kv_cache(2, num_kv_heads, head_dim, kv_dtype or dtype, block_size),
        torch.zeros(num_sequences, 512, dtype=torch.int32),
        torch.zeros(num_sequences + 1, dtype=torch.int32),
        torch.zeros(num_sequences, dtype=torch.int32),
        scale=0.1,
        sliding_window=window,
        softcap=softcap,
        sinks=torch.empty(num_heads, dtype=dtype) if sinks else None,
    )


def check(kernels, capability, most_spilled=0):
    for kernel in kernels:
        assert kernel.cubin[:4] == b"\x7fELF"
        assert kernel.spilled_bytes <= most_spilled, (kernel.name, kernel.num_registers)
        assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel.name


@pytest.mark.parametrize(
    ("head_dim", "dtype", "window", "softcap", "sinks"), CASES, ids=lambda value: str(value)
)
def test_attention(capability, head_dim, dtype, window, softcap, sinks):
    kernels = compiled(
        capability,
        lambda: launch_attention(
            getattr(torch, dtype), head_dim, window=window, softcap=softcap, sinks=sinks
        ),
    )
    assert [kernel.name for kernel in kernels] == ["attend", "merge"] * 2
    check(kernels, capability)
    few, many = kernels[0], kernels[2]
    if dtype != "float32":
        assert "mma.sync" in few.ptx
        units = {80: "mma.sync", 90: "wgmma", 100: "tcgen05" if head_dim < 256 else "mma.sync"}
        assert units[capability] in many.ptx
        # keys go straight to shared memory, 16 bytes at a time, while others are multiplied
        assert "cp.async" in few.ptx
        assert "cp.async" in many.ptx


@pytest.mark.long
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("block_size", [8, 32])
def test_attention_over_blocks_of_other_sizes(capability, block_size, kv_dtype):
    kernels = compiled(
        capability,
        lambda: launch_attention(torch.bfloat16, 128, kv_dtype=kv_dtype, block_size=block_size),
    )
    assert [kernel.name for kernel in kernels] == ["attend", "merge"] * 2
    check(kernels, capability)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    "head_dim", [*(pytest.param(each, marks=pytest.mark.long) for each in (64, 80, 96)), 128, 256]
)
def test_attention_over_eight_bits(capability, head_dim, kv_dtype):
    if capability == 80 and kv_dtype == torch.float8_e4m3fn:
        pytest.skip("compute capability 8.0 has no float8")
    kernels = compiled(
        capability, lambda: launch_attention(torch.bfloat16, head_dim, kv_dtype=kv_dtype)
    )
    assert [kernel.name for kernel in kernels] == ["attend", "merge"] * 2
    check(kernels, capability)
    for kernel in kernels[::2]:
        assert any(unit in kernel.ptx for unit in ("mma.sync", "wgmma", "tcgen05"))
        assert "cp.async" in kernel.ptx


@pytest.mark.parametrize(
    "kv_dtype",
    [torch.int8, pytest.param(torch.float8_e4m3fn, marks=pytest.mark.long)],
    ids=str,
)
@pytest.mark.parametrize(("head_dim", "group", "window", "softcap", "sinks"), IN_8_BITS)
def test_attention_over_eight_bits_as_models_ask_for_it(
    capability, head_dim, group, window, softcap, sinks, kv_dtype
):
    if capability == 80 and kv_dtype == torch.float8_e4m3fn:
        pytest.skip("compute capability 8.0 has no float8")
    options = {"window": window, "softcap": softcap, "sinks": sinks, "group": group}
    kernels = compiled(
        capability,
        lambda: launch_attention(torch.bfloat16, head_dim, kv_dtype=kv_dtype, **options),
    )
    assert [kernel.name for kernel in kernels] == ["attend", "merge"] * 2
    check(kernels, capability, most_spilled=320)  # see docs/gpu.md


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kernels_beside_it(capability, dtype):
    num_tokens, num_heads, num_kv_heads, head_dim, hidden = 7, 32, 8, 128, 4096

    def launch():
        x = torch.empty(num_tokens, hidden, dtype=dtype)
        norm.rms_norm(x, x[0], 1e-6)
        norm.add_rms_norm(x, torch.empty_like(x), x[0], 1e-6)
        gates.silu_mul(torch.empty(num_tokens, 2 * 14336, dtype=dtype))
        gates.gelu_mul(torch.empty(num_tokens, 2 * 14336, dtype=dtype))
        fused = torch.empty(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
        query, key, value = fused.split((num_heads, num_kv_heads, num_kv_heads), 1)
        norm.rms_norm(query, key[0, 0], 1e-6)
        cache = kv_cache(4, num_kv_heads, head_dim, dtype)
        slots = torch.zeros(num_tokens, dtype=torch.int64)
        for rotary_dim in (head_dim, head_dim // 2):
            angles = torch.empty(num_tokens, rotary_dim // 2)
            store.rotary_store_kv(query, key, value, angles, angles, cache, slots)
        store.store_kv(key, value, cache, slots)
        for kv_dtype in (torch.int8, torch.float8_e4m3fn)[: 1 if capability == 80 else 2]:
            small = kv_cache(4, num_kv_heads, head_dim, kv_dtype)
            store.store_kv(key, value, small, slots)
            store.rotary_store_kv(query, key, value, angles, angles, small, slots)
        for num_copies in copy.MOST_COPIES:
            blocks = torch.zeros(num_copies, dtype=torch.int64)
            copy.copy_blocks(cache, blocks, blocks)

    kernels = compiled(capability, launch)
    assert {kernel.name for kernel in kernels} == {
        "norm_row", "gate_row", "turn_and_store", "copy_slices",
    }  # fmt: skip
    check(kernels, capability)
    for kernel in kernels:
        if kernel.name == "turn_and_store" and "e4m3" in kernel.ptx:
            assert "satfinite.e4m3" in kernel.ptx
        if kernel.name in ("norm_row", "gate_row"):
            # 8 bytes at a time or 16: alignment was seen
            assert ".v2.b32" in kernel.ptx or ".v4.b32" in kernel.ptx, kernel.name


@pytest.mark.parametrize("num_tokens", [4, 1000, 4000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_experts(capability, dtype, num_tokens):
    """Of Qwen3-30B-A3B's sizes; with a few pairs to each expert, some and many."""
    hidden, width, num_experts = 2048, 768, 128

    def launch():
        # memory that is never touched: nothing is launched
        experts.moe(
            torch.empty(num_tokens, hidden, dtype=dtype),
            torch.zeros(num_tokens, num_experts, dtype=dtype),
            torch.empty(num_experts, 2 * width, hidden, dtype=dtype),
            torch.empty(num_experts, hidden, width, dtype=dtype),
            8,
            True,
        )

    kernels = compiled(capability, launch)
    check(kernels, capability)
    products = [kernel for kernel in kernels if kernel.name == "multiply_groups"]
    assert len(products) == 2
    if dtype == torch.bfloat16:
        few = {80: "mma.sync", 90: "mma.sync", 100: "mma.sync"}
        many = {80: "mma.sync", 90: "wgmma", 100: "tcgen05"}
        for kernel in products:
            assert (few if num_tokens == 4 else many)[capability] in kernel.ptx
            assert "cp.async" in kernel.ptx


@pytest.mark.parametrize(
    ("kind", "dtype", "num_tokens"),
    [
        ("int4", torch.bfloat16, 4),
        ("int8", torch.float16, 1000),
        ("fp8", torch.bfloat16, 4),
        ("fp8", torch.bfloat16, 1000),
        pytest.param("int4", torch.bfloat16, 1000, marks=pytest.mark.long),
        pytest.param("int8", torch.float16, 4, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_experts_in_few_bits(capability, kind, dtype, num_tokens):
    """Of Qwen3-30B-A3B's sizes, in groups of 128; a whole row where there are 8 bits."""
    if kind == "fp8" and capability == 80:
        pytest.skip("compute capability 8.0 has no float8")
    hidden, width, num_experts, bits = 2048, 768, 128, 4 if kind == "int4" else 8
    kept = {"int4": torch.uint8, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[kind]

    def packed(num_outputs, num_inputs):
        integers = torch.empty(num_experts * num_outputs, num_inputs, dtype=kept)
        scales = torch.empty(len(integers), num_inputs // 128 if bits == 4 else 1)
        half = 64
        return PackedWeight(
            values=integers[:, : num_inputs // 2].contiguous() if bits == 4 else integers,
            scales=scales,
            zeros=scales.to(torch.int8) if bits == 4 else None,
            group_size=128 if bits == 4 else num_inputs,
            half=half,
        )

    def launch():
        experts.moe(
            torch.empty(num_tokens, hidden, dtype=dtype),
            torch.zeros(num_tokens, num_experts, dtype=dtype),
            packed(2 * width, hidden),
            packed(hidden, width),
            8,
            True,
        )

    kernels = compiled(capability, launch)
    check(kernels, capability)
    products = [kernel for kernel in kernels if kernel.name == "multiply_packed_groups"]
    assert len(products) == 2
    for kernel in products:
        assert any(unit in kernel.ptx for unit in ("mma.sync", "wgmma", "tcgen05"))
        assert "cp.async" in kernel.ptx


@pytest.mark.parametrize("num_rows", [4, 100, 1000])
@pytest.mark.parametrize(
    ("bits", "dtype"), [(4, torch.bfloat16), (8, torch.float16), (4, torch.float32)], ids=str
)
def test_packed_products(capability, bits, dtype, num_rows):
    """Of Llama-3.1-8B's down projection, in groups of 128; a whole row where there are 8 bits."""
    num_outputs, num_inputs = 4096, 14336

    def launch():
        integers = torch.empty(
            num_outputs, num_inputs, dtype=torch.uint8 if bits == 4 else torch.int8
        )
        scales = torch.empty(num_outputs, num_inputs // 128 if bits == 4 else 1).half()
        zeros = scales.to(torch.int8) if bits == 4 else None
        x = torch.empty(num_rows, num_inputs, dtype=dtype)
        packed_linear.packed_linear(x, pack(integers, scales, zeros), x[0, :num_outputs])

    kernels = compiled(capability, launch)
    assert "multiply_packed" in {kernel.name for kernel in kernels}
    check(kernels, capability)
    if dtype != torch.float32:
        assert any(unit in kernels[0].ptx for unit in ("mma.sync", "wgmma", "tcgen05"))


def test_draws(capability):
    """From Llama 3's vocabulary; in float64, which takes no libm of a device."""

    def launch():
        logits = torch.empty(3, 128256)
        draws.draw(logits, logits[:, :3].double(), logits[:, :3].long())
        draws.penalize(logits, torch.zeros(5, dtype=torch.int64), torch.zeros(4, 5))

    kernels = compiled(capability, launch)
    assert [kernel.name for kernel in kernels] == [
        "cut_row", "draw_chunk", "best_of", "penalize_entry",
    ]  # fmt: skip
    check(kernels, capability)


def test_rows_made_float8(capability):
    if capability == 80:
        pytest.skip("compute capability 8.0 has no float8")
    kernels = compiled(
        capability, lambda: fp8.quantize_rows(torch.empty(3, 14336, dtype=torch.bfloat16))
    )
    check(kernels, capability)
    assert "satfinite" in kernels[0].ptx
