"""Gumbel-max draws from whole rows of logits, without a logarithm for each token.

The noise of a token is -log(-log u), u = (word + ½) / 2³². As -log u ≥ 1 - u, it is at most
-log(1 - u): the leading zeros of 2³² - word bound it, and few tokens are left that could beat the
best so far. Those get the exact noise, in float64.
"""

import math

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.philox import KEY_STEPS, LOW, MULTIPLIERS, ROUNDS

_M0, _M1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
_STEP0, _STEP1 = np.uint64(KEY_STEPS[0]), np.uint64(KEY_STEPS[1])
_LOW, _HALF = np.uint64(LOW), np.uint64(32)
_LN2 = math.log(2.0)


@njit(nogil=True, cache=True)
def first_word(c0, c1, c2, k0, k1):
    """The first word of `philox.philox_4x32_10` for the counter (c0, c1, c2, 0), all uint64."""
    c3 = np.uint64(0)
    for _ in range(ROUNDS):
        product0, product1 = c0 * _M0, c2 * _M1
        c0 = (product1 >> _HALF) ^ c1 ^ k0
        c1 = product1 & _LOW
        c2 = (product0 >> _HALF) ^ c3 ^ k1
        c3 = product0 & _LOW
        k0 = (k0 + _STEP0) & _LOW
        k1 = (k1 + _STEP1) & _LOW
    return c0


@njit(nogil=True, cache=True)
def bound_of_noise(word):
    """No less than the noise of a word: ln 2 × (1 + leading zeros of 2³² - word, in 33 bits)."""
    rest = np.uint64(0x100000000) - word
    bits = 0
    for shift in (16, 8, 4, 2, 1):
        if rest >> np.uint64(bits + shift):
            bits += shift
    if rest >> np.uint64(32):
        bits = 32
    return _LN2 * (33 - bits)


@njit(nogil=True, cache=True)
def draw_row(logits, temperature, position, sample_index, key_low, key_high):
    """The token with the largest logit / temperature + noise."""
    peak = logits[0]
    for v in range(len(logits)):
        peak = max(peak, logits[v])
    best, chosen = -np.inf, 0
    for v in range(len(logits)):
        score = np.float64((logits[v] - peak) / temperature)
        if score + 33 * _LN2 <= best:
            continue
        word = first_word(np.uint64(v), position, sample_index, key_low, key_high)
        if score + bound_of_noise(word) <= best:
            continue
        noise = -math.log(-math.log((np.float64(word) + 0.5) * 2.0**-32))
        if score + noise > best:
            best, chosen = score + noise, v
    return chosen


@njit(nogil=True, cache=True, parallel=True)
def draw_rows(logits, temperatures, words, chosen):
    for r in prange(len(chosen)):
        position, sample_index, low, high = words[r, 0], words[r, 1], words[r, 2], words[r, 3]
        chosen[r] = draw_row(logits[r], temperatures[r], position, sample_index, low, high)


def gumbel_argmax(
    logits: Tensor,  # [R, vocab] float32, the largest of each row finite
    temperatures: NDArray[np.float32],  # [R]
    words: NDArray[np.uint64],  # [R, 4]: position, sample index, low and high half of the seed
) -> list[int]:
    """A token id for each row: `sampler`'s draw from the whole vocabulary."""
    chosen = np.empty(len(words), np.int64)
    draw_rows(logits.contiguous().numpy(), temperatures, words, chosen)
    tokens: list[int] = chosen.tolist()
    return tokens
