"""Products with weights in 4 and 8 bits against float64; and rows made float8."""

import random
import secrets

import numpy as np
import pytest
import torch

from engine.kernels import fp8
from engine.kernels.triton import devices, packed_linear
from engine.kernels.triton import fp8 as triton_fp8
from tests.engine.kernels import oracle
from tests.engine.kernels.packed_case import check_packed

SEEDS = [secrets.randbelow(2**32)]


@pytest.fixture(params=SEEDS, ids=str)
def draw(request):
    torch.manual_seed(request.param)
    return random.Random(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("bits", "num_inputs", "group_size"),
    [(4, 256, 128), (4, 192, 32), (4, 128, 128), (8, 100, 100), (8, 256, 64), (8, 96, 32)],
)
def test_products(draw, dtype, bits, num_inputs, group_size):
    check_packed(
        draw,
        packed_linear.packed_linear,
        dtype,
        num_rows=draw.choice((1, 5, 17)),
        has_bias=draw.random() < 0.5,
        bits=bits,
        num_outputs=draw.randint(1, 90),
        num_inputs=num_inputs,
        group_size=group_size,
        zeros=bits == 4 or draw.random() < 0.5,
        mixed=draw.random() < 0.5,
    )


@pytest.mark.parametrize("has_bias", [False, True])
def test_inputs_split_among_programs(draw, monkeypatch, has_bias):
    large = devices.Device(capability=80, num_processors=64)
    monkeypatch.setattr(packed_linear, "device_of", lambda _: large)
    check_packed(
        draw, packed_linear.packed_linear, torch.float16,
        num_rows=3, has_bias=has_bias, bits=4, num_outputs=40, num_inputs=64 * 33, group_size=64,
    )  # fmt: skip


@pytest.mark.parametrize("tiles", [packed_linear.SOME, packed_linear.MANY], ids=["64", "128"])
def test_each_size_of_tiles(draw, monkeypatch, tiles):
    monkeypatch.setattr(packed_linear, "_choose_tiles", lambda *_: tiles)
    check_packed(
        draw, packed_linear.packed_linear, torch.float16,
        num_rows=70, has_bias=False, bits=4, num_outputs=70, num_inputs=128, group_size=64,
    )  # fmt: skip


def test_no_row(draw):
    from tests.engine.kernels.packed_case import packed_case

    weight, _ = packed_case(draw, bits=4, num_outputs=8, num_inputs=64, group_size=32)
    assert packed_linear.packed_linear(torch.empty(0, 64), weight, None).shape == (0, 8)


@pytest.mark.parametrize("size", [1, 100, 2500])
def test_rows_made_float8(draw, size):
    x = (torch.randn(3, size) * 10 ** draw.uniform(-3, 3)).half()
    x *= 10.0 ** torch.randint(-4, 1, x.shape)
    x[1] = 0
    numbers, scales = (found.double() for found in triton_fp8.quantize_rows(x))
    largest = x.double().abs().amax(1, keepdim=True)
    torch.testing.assert_close(scales, largest.clamp(min=fp8.LEAST) / 448, rtol=1e-6, atol=0)
    off = (numbers - x.double() / scales).abs()
    spacing = oracle.spacing_in_8_bits(x.double() / scales, fp8.FP8)
    assert (off <= spacing * (0.5 + 1e-5)).all()
    assert not numbers[1].any()


def test_rows_are_rounded_to_the_nearest_to_even(draw):
    given, wanted = oracle.edges_of_float8()
    for factor in (1.0, 0.125, 64.0):
        numbers, scales = triton_fp8.quantize_rows((given * factor).float()[None])
        assert scales.tolist() == [[factor]]
        assert numbers[0].double().tolist() == wanted.tolist()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_what_is_no_number_makes_none(draw, broken):
    x = torch.randn(2, 2100)
    at = draw.randrange(2100)
    x[0, at] = broken
    with np.errstate(invalid="ignore"):
        numbers, scales = triton_fp8.quantize_rows(x)
    rows = numbers.float() * scales
    assert rows[0, at].isnan()
    assert rows[1].isfinite().all()
