"""Weights of random integers in groups, and products with them in float64."""

import torch

from engine.kernels.packed_weight import pack


def packed_case(draw, *, bits, num_outputs, num_inputs, group_size, zeros=True, mixed=False):
    """(PackedWeight, what it stands for in float64)."""
    num_groups = num_inputs // group_size
    scales = (torch.rand(num_outputs, num_groups) + 0.5).half()
    zero = torch.randint(0, 17, scales.shape, dtype=torch.int8) if zeros else None
    if bits == 4:
        integers = torch.randint(0, 16, (num_outputs, num_inputs), dtype=torch.uint8)
    else:
        integers = torch.randint(-127, 128, (num_outputs, num_inputs), dtype=torch.int8)
    inputs = torch.randperm(num_inputs) if mixed else None
    weight = pack(integers, scales, zero, inputs)
    group = torch.arange(num_inputs) // group_size
    wanted = integers.double()
    if zero is not None:
        wanted -= zero.double()[:, group]
    wanted *= scales.double()[:, group]
    if inputs is not None:
        wanted = torch.empty_like(wanted).index_copy_(1, inputs, wanted)
    return weight, wanted


def check_packed(draw, linear, dtype, *, num_rows, has_bias, **case):
    weight, wanted = packed_case(draw, **case)
    x = (torch.randn(num_rows, case["num_inputs"] + 1) / case["num_inputs"]).to(dtype)[:, :-1]
    bias = torch.randn(case["num_outputs"]).to(dtype) if has_bias else None
    found = linear(x, weight, bias)
    assert found.dtype == dtype
    # each made weight is rounded to the type; then sums in float32; then the result
    product = x.double() @ wanted.to(dtype).double().T
    product += 0 if bias is None else bias.double()
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(
        found.double(), product, rtol=rounding + 1e-5, atol=rounding + 1e-5 * case.get("bits", 4)
    )
