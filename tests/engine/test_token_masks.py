"""Packed masks and the logits they leave."""

import numpy as np
import torch

from engine.token_masks import apply_masks, unpacked_here, unpacked_on


def packed(ids, vocab_size):
    mask = bytearray(-(-vocab_size // 32) * 4)
    for token_id in ids:
        mask[token_id // 8] |= 1 << token_id % 8
    return bytes(mask)


def test_rows_with_a_mask_keep_what_it_allows_and_others_everything():
    for vocab_size in (1, 8, 37, 100):
        logits = torch.randn(4, vocab_size, generator=torch.manual_seed(vocab_size))
        allowed = {1: {0, vocab_size - 1}, 3: set(range(0, vocab_size, 3))}
        expected = logits.clone()
        for row, ids in allowed.items():
            for token_id in set(range(vocab_size)) - ids:
                expected[row, token_id] = -torch.inf
        apply_masks(logits, {row: packed(ids, vocab_size) for row, ids in allowed.items()})
        assert torch.equal(logits, expected)


def test_ids_beyond_the_end_of_a_mask_are_not_allowed():
    logits = torch.zeros(1, 50)
    apply_masks(logits, {0: packed({3}, 32)})
    assert logits.isfinite().nonzero().tolist() == [[0, 3]]


def test_a_mask_for_a_smaller_vocabulary_than_it_was_made_for():
    logits = torch.zeros(2, 10)
    apply_masks(logits, {0: packed({3, 40}, 64), 1: packed(set(), 64)})
    assert logits.isfinite().nonzero().tolist() == [[0, 3]]


def test_a_device_unpacks_as_numpy_does():
    packed_rows = np.random.default_rng(3).integers(0, 256, (3, 40), dtype=np.uint8)
    here = unpacked_here(packed_rows)
    assert here.dtype == torch.bool
    assert torch.equal(here, unpacked_on(torch.device("cpu"), packed_rows))
