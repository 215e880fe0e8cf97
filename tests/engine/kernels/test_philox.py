import numpy as np
import pytest
import torch

from engine.kernels.philox import philox_4x32_10

# kat_vectors of Random123: counter, key, words
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_words_are_those_of_random123(counter, key, words):
    def tensors(numbers):
        return tuple(torch.tensor([number]) for number in numbers)

    def arrays(numbers):
        return tuple(np.array([number], dtype=np.uint64) for number in numbers)

    assert [w.item() for w in philox_4x32_10(tensors(counter), tensors(key))] == list(words)
    assert [w.item() for w in philox_4x32_10(arrays(counter), arrays(key))] == list(words)


def test_counters_and_keys_broadcast():
    counters, positions = np.arange(5, dtype=np.uint64), np.array([[7], [9]], dtype=np.uint64)
    zero, keys = np.zeros((1, 1), np.uint64), np.array([[3], [2**32 - 1]], dtype=np.uint64)
    grid = philox_4x32_10((counters, positions, zero, zero), (keys, zero))[0]
    for row in range(2):
        for column in range(5):
            one = philox_4x32_10(
                (counters[[column]], positions[row], zero[0], zero[0]), (keys[row], zero[0])
            )[0]
            assert grid[row, column] == one[0]
