"""Philox4x32-10: random words from a counter and a key, with no state between them.

Source: Salmon et al. 2011 (Random123), checked against its test vectors.
"""

from typing import Any, TypeVar

from numpy.typing import NDArray
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
LOW = 0xFFFFFFFF

# 32-bit words in 64-bit integers: torch's signed ones on any device, numpy's unsigned ones, three
# times faster, on a CPU
Words = TypeVar("Words", Tensor, NDArray[Any])


def philox_4x32_10(
    counter: tuple[Words, Words, Words, Words],  # four arrays that broadcast
    key: tuple[Words, Words],
) -> tuple[Words, Words, Words, Words]:
    """Four random words in [0, 2³²) for each counter."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> 32 & LOW) ^ c1 ^ k0,
            product1 & LOW,
            (product0 >> 32 & LOW) ^ c3 ^ k1,
            product0 & LOW,
        )
        k0, k1 = k0 + KEY_STEPS[0] & LOW, k1 + KEY_STEPS[1] & LOW
    return c0, c1, c2, c3
