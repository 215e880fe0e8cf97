"""A step's input as bytes, from the rank that plans it to the others."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.step_batch import StepArrays

FIELDS = (
    "token_ids", "positions", "cu_query_lens", "seq_lens", "slot_mapping", "block_tables",
    "logit_rows",
)  # fmt: skip
WIDE = frozenset({"slot_mapping"})  # what may not fit in 32 bits


def encode_step(copies: Sequence[tuple[int, int]], arrays: StepArrays | None) -> bytes:
    """Blocks to copy, then what to compute, if anything."""
    parts = [np.array([len(copies), *(block for pair in copies for block in pair)], np.int32)]
    if arrays is not None:
        for name in FIELDS:
            array = getattr(arrays, name)
            shape = array.shape if array.ndim == 2 else (1, len(array))
            parts.append(np.array(shape, np.int32))
            parts.append(array.astype(np.int64 if name in WIDE else np.int32).view(np.int32))
    return b"".join(part.tobytes() for part in parts)


def decode_step(message: bytes) -> tuple[list[tuple[int, int]], StepArrays | None]:
    words = np.frombuffer(message, np.int32)
    num_copies = int(words[0])
    copies = words[1 : 1 + 2 * num_copies].reshape(-1, 2)
    at = 1 + 2 * num_copies
    arrays: dict[str, NDArray[np.int64]] = {}
    while at < len(words):
        name = FIELDS[len(arrays)]
        height, width = map(int, words[at : at + 2])
        kind, each = (np.int64, 2) if name in WIDE else (np.int32, 1)
        values = words[at + 2 : at + 2 + height * width * each].view(kind).astype(np.int64)
        arrays[name] = values.reshape(height, width) if name == "block_tables" else values
        at += 2 + height * width * each
    pairs = [(int(source), int(destination)) for source, destination in copies]
    return pairs, StepArrays(**arrays) if arrays else None
