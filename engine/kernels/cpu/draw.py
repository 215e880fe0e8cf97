"""Draws from whole rows of logits: the largest, and Gumbel-max without a logarithm for each token.

The noise of a token is -log(-log u), u = (word + ½) / 2³². As -log u ≥ 1 - u, it is at most
-log(1 - u): the leading zeros of 2³² - word bound it, and few tokens are left that could beat the
best so far. Those get the exact noise, in float64. Words and bounds are made for a vector of tokens
at once.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.cpu.emit import (
    F32,
    FLOAT32,
    I32,
    I64,
    INTEGERS,
    LONGS,
    VECTOR,
    VECTOR_BYTES,
    WIDTH,
    branch,
    fma,
    larger,
    load,
    loop,
    reduce_lanes,
    splat,
)
from engine.kernels.philox import KEY_STEPS, LOW, MULTIPLIERS, ROUNDS

_M0, _M1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
_STEP0, _STEP1 = np.uint64(KEY_STEPS[0]), np.uint64(KEY_STEPS[1])
_LOW, _HALF = np.uint64(LOW), np.uint64(32)
_LN2 = math.log(2.0)
ROUNDING = 1e-3  # more than sums of a score and a bound are rounded by
LARGEST_NOISE = 33 * _LN2 + ROUNDING


@njit(nogil=True, cache=True)
def first_word(c0, c1, k0, k1):
    """The first word of `philox.philox_4x32_10` for the counter (c0, c1, 0, 0), all uint64."""
    c2 = c3 = np.uint64(0)
    for _ in range(ROUNDS):
        product0, product1 = c0 * _M0, c2 * _M1
        c0 = (product1 >> _HALF) ^ c1 ^ k0
        c1 = product1 & _LOW
        c2 = (product0 >> _HALF) ^ c3 ^ k1
        c3 = product0 & _LOW
        k0 = (k0 + _STEP0) & _LOW
        k1 = (k1 + _STEP1) & _LOW
    return c0


@intrinsic
def promising(
    context: Any,
    logits: Any,  # address of a vector of float32
    peak: Any,  # float32, the row's largest logit
    temperature: Any,  # float32
    best: Any,  # float32, the best score with noise so far
    token: Any,  # uint64, the first of theirs; then a counter's other words and the key
    position: Any,
    key_low: Any,
    key_high: Any,
) -> Any:
    """A bit for each lane's token, set if its noise might lift it above the best."""
    signature = types.int64(types.int64, *(types.float32,) * 3, *(types.uint64,) * 4)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        logits, peak, temperature, best, token, *rest = args
        scores = build.fsub(load(build, logits, FLOAT32), splat(build, peak))
        scores = build.fdiv(scores, splat(build, temperature))
        wide_best = splat(build, best)

        def above(bounds: Any) -> Any:
            found = build.fcmp_ordered(">", build.fadd(scores, bounds), wide_best)
            return build.zext(build.bitcast(found, ir.IntType(WIDTH)), I64)

        def with_noise() -> list[Any]:
            words = _first_words(build, token, *rest)
            return [above(_bounds_of_noise(build, words))]

        some = above(splat(build, F32(LARGEST_NOISE)))
        return branch(build, build.icmp_signed("!=", some, I64(0)), [some], with_noise)[0]

    return signature, emit


def _first_words(build: Any, token: Any, position: Any, key_low: Any, key_high: Any) -> Any:
    """`first_word` of tokens that follow each other, int32."""
    half, low = splat(build, I64(32)), splat(build, I64(LOW))
    c0 = build.add(splat(build, token), ir.Constant(LONGS, list(range(WIDTH))))
    c1, k0, k1 = (splat(build, x) for x in (position, key_low, key_high))
    c2 = c3 = splat(build, I64(0))
    m0, m1 = (splat(build, I64(x)) for x in MULTIPLIERS)
    step0, step1 = (splat(build, I64(x)) for x in KEY_STEPS)
    for _ in range(ROUNDS):
        product0, product1 = build.mul(c0, m0), build.mul(c2, m1)
        c0 = build.xor(build.xor(build.lshr(product1, half), c1), k0)
        c1 = build.and_(product1, low)
        c2 = build.xor(build.xor(build.lshr(product0, half), c3), k1)
        c3 = build.and_(product0, low)
        k0 = build.and_(build.add(k0, step0), low)
        k1 = build.and_(build.add(k1, step1), low)
    return build.trunc(c0, INTEGERS)


def _bounds_of_noise(build: Any, words: Any) -> Any:
    """No less than the noise of each word: ln 2 × (1 + leading zeros of 2³² - word, in 33 bits).

    Only its upper 23 bits are looked at, which a float32 holds: its exponent counts them.
    """
    rest = build.lshr(build.sub(ir.Constant(INTEGERS, [0] * WIDTH), words), splat(build, I32(9)))
    bits = build.bitcast(build.sitofp(rest, VECTOR), INTEGERS)
    exponents = build.sitofp(build.lshr(bits, splat(build, I32(23))), VECTOR)  # 127 too many
    # a little more: bounds are added to scores in float32
    most = F32((33 - 9 + 127) * _LN2 + ROUNDING)
    return fma(build, exponents, splat(build, F32(-_LN2)), splat(build, most))


@intrinsic
def largest_number(
    context: Any,
    x: Any,  # address of float32 [WIDTH × num_vectors]
    num_vectors: Any,  # 1 or more
) -> Any:
    """The largest of some numbers that are not NaN, float32."""
    signature = types.float32(types.int64, types.int64)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        x, num_vectors = args

        def take(index: Any, state: list[Any]) -> list[Any]:
            vector = load(build, build.add(x, build.mul(index, I64(VECTOR_BYTES))), FLOAT32)
            return [larger(build, vector, state[0])]

        [peaks] = loop(build, num_vectors, [load(build, x, FLOAT32)], take)
        return reduce_lanes(build, peaks, lambda x, y: larger(build, x, y))

    return signature, emit


@intrinsic
def equal_to(
    context: Any,
    x: Any,  # address of a vector of float32
    number: Any,  # float32
) -> Any:
    """A bit for each lane, set where it is the number."""
    signature = types.int64(types.int64, types.float32)

    def emit(_context: Any, build: Any, _signature: Any, args: Any) -> Any:
        x, number = args
        same = build.fcmp_ordered("==", load(build, x, FLOAT32), splat(build, number))
        return build.zext(build.bitcast(same, ir.IntType(WIDTH)), I64)

    return signature, emit


@njit(nogil=True, cache=True)
def largest_of(logits):
    """The largest of a row."""
    whole = len(logits) // WIDTH
    peak = largest_number(logits.ctypes.data, whole) if whole else logits[0]
    for v in range(whole * WIDTH, len(logits)):
        peak = max(peak, logits[v])
    return peak


@njit(nogil=True, cache=True)
def place_of_largest(logits):
    """The first place of a row's largest number."""
    peak = largest_of(logits)
    first = 0
    while first + WIDTH <= len(logits) and equal_to(logits.ctypes.data + 4 * first, peak) == 0:
        first += WIDTH
    while logits[first] != peak:
        first += 1
    return first


@njit(nogil=True, cache=True)
def draw_row(logits, temperature, position, key_low, key_high):
    """The token with the largest logit / temperature + noise."""
    peak = largest_of(logits)
    best, chosen = -np.inf, 0
    for first in range(0, len(logits), WIDTH):
        bits = (1 << min(WIDTH, len(logits) - first)) - 1
        if bits == (1 << WIDTH) - 1:
            bits = promising(
                logits.ctypes.data + 4 * first, peak, temperature, np.float32(best),
                np.uint64(first), position, key_low, key_high,
            )  # fmt: skip
        v = first
        while bits:
            if bits & 1:
                word = first_word(np.uint64(v), position, key_low, key_high)
                noise = -math.log(-math.log((np.float64(word) + 0.5) * 2.0**-32))
                score = np.float64((logits[v] - peak) / temperature)
                if score + noise > best:
                    best, chosen = score + noise, v
            bits >>= 1
            v += 1
    return chosen


@njit(nogil=True, cache=True, parallel=True)
def draw_rows(logits, temperatures, words, chosen):
    for r in prange(len(chosen)):
        position, low, high = words[r, 0], words[r, 1], words[r, 2]
        chosen[r] = draw_row(logits[r], temperatures[r], position, low, high)


@njit(nogil=True, cache=True, parallel=True)
def places_of_largest(logits, chosen):
    for r in prange(len(chosen)):
        chosen[r] = place_of_largest(logits[r])


def argmax(
    logits: Tensor,  # [R, vocab] float32, the largest of each row finite
) -> list[int]:
    """The first of the likeliest tokens of each row."""
    chosen = np.empty(len(logits), np.int64)
    places_of_largest(logits.contiguous().numpy(), chosen)
    tokens: list[int] = chosen.tolist()
    return tokens


def gumbel_argmax(
    logits: Tensor,  # [R, vocab] float32, the largest of each row finite
    temperatures: NDArray[np.float32],  # [R]
    words: NDArray[np.uint64],  # [R, 3]: position, low and high half of the seed
) -> list[int]:
    """A token id for each row: `sampler`'s draw from the whole vocabulary."""
    chosen = np.empty(len(words), np.int64)
    draw_rows(logits.contiguous().numpy(), temperatures, words, chosen)
    tokens: list[int] = chosen.tolist()
    return tokens
