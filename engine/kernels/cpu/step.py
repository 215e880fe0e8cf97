"""A decoder's whole step in one call: no Python, and no new tensor, from token ids to logits.

Threads are handed one table of numbers, addresses first, and make arrays of it again: a C function
of two integers compiles in a third of the time that one of forty arrays takes.
"""

import numpy as np
from numba import cfunc, njit
from numba.np.numpy_support import carray

from engine.kernels.cpu.attention_plan import (
    ITEM_SIZE,
    MAX_ITEM_ROWS,
    MERGE_SIZE,
    NUM_PANELS,
    AttentionShape,
    Plan,
    Sequences,
)
from engine.kernels.cpu.emit import PANEL
from engine.kernels.cpu.matmul import ROWS_TOGETHER, Weights
from engine.kernels.cpu.stack import NUM_COLUMNS, Buffers, Ends, StackShape, Tokens, run_layers
from engine.kernels.cpu.vectors import as_floats, as_integers
from engine.kernels.cpu.workers import FAILED, Crew, fetch_add, run_by_all

# columns of the table: addresses of arrays, of three numbers, of weights; then sizes
(
    LAYERS, IDS, COS, SIN, LOCAL_COS, LOCAL_SIN, SLOT_MAPPING, WANTED, BLOCK_TABLES,
    CU_QUERY_LENS, SEQ_LENS, RESIDUAL, HIDDEN, HEADS, ATTENDED, GATED, QUANTIZED, TILES,
    ORDER, ITEMS, MERGES, PIECES, PARTIALS, SCRATCH, PLACES, PANELS, CURSORS, MEETING, LOGITS,
    NUMBERS, EMBEDDING, NORM, LM_HEAD,
    NUM_WORKERS, NUM_LAYERS, NUM_TOKENS, NUM_WANTED, NUM_SEQUENCES, MAX_BLOCKS, NUM_ITEMS,
    NUM_MERGES, NUM_PIECES, NUM_PARTIALS, SCRATCH_SIZE, HIDDEN_SIZE, MODEL_HEAD_DIM, WEIGHT_KIND,
    PRODUCT, GELU,
    ROTARY_HALF, HIDDEN_WIDTH, GATED_WIDTH, GATE_UP_WIDTH, QUANTIZED_WIDTH, VOCAB_WIDTH,
    NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, KV_KIND, KV_BYTES, ATTEND_TILE, TABLE_SIZE,
) = range(63)  # fmt: skip


@njit(nogil=True, cache=True)
def floats(address, num_rows, num_columns):
    return carray(as_floats(address), (num_rows, num_columns))


@njit(nogil=True, cache=True)
def floats_3d(address, num_rows, num_columns, depth):
    return carray(as_floats(address), (num_rows, num_columns, depth))


@njit(nogil=True, cache=True)
def integers(address, count):
    return carray(as_integers(address), (count,))


@njit(nogil=True, cache=True)
def integers_2d(address, num_rows, num_columns):
    return carray(as_integers(address), (num_rows, num_columns))


@njit(nogil=True, cache=True)
def buffers_of(t):
    rows, dim = t[NUM_TOKENS], t[HEAD_DIM]
    num_parts = t[NUM_HEADS] + 2 * t[NUM_KV_HEADS]
    gate_up = floats(t[GATED], rows, t[GATE_UP_WIDTH] + PANEL)[:, : t[GATE_UP_WIDTH]]
    return Buffers(
        floats(t[RESIDUAL], rows, t[HIDDEN_WIDTH]),
        floats(t[HIDDEN], rows, t[HIDDEN_WIDTH]),
        floats_3d(t[HEADS], rows, num_parts, dim),
        floats_3d(t[ATTENDED], rows, t[NUM_HEADS], dim),
        gate_up[:, : t[GATED_WIDTH]],
        gate_up,
        floats(t[QUANTIZED], rows, t[QUANTIZED_WIDTH]),
        carray(as_floats(t[TILES]), (t[NUM_WORKERS], ROWS_TOGETHER, 2, PANEL)),
        floats(t[HEADS], rows, num_parts * dim),
        floats(t[ATTENDED], rows, t[NUM_HEADS] * dim),
    )


@njit(nogil=True, cache=True)
def plan_of(t):
    return Plan(
        integers(t[ORDER], t[NUM_SEQUENCES]),
        integers_2d(t[ITEMS], t[NUM_ITEMS], ITEM_SIZE),
        integers_2d(t[MERGES], t[NUM_MERGES], MERGE_SIZE),
        integers(t[PIECES], t[NUM_PIECES]),
        floats(t[PARTIALS], t[NUM_PARTIALS], t[HEAD_DIM] + 2),
        floats(t[SCRATCH], t[NUM_WORKERS], t[SCRATCH_SIZE]),
        integers_2d(t[PLACES], t[NUM_WORKERS], MAX_ITEM_ROWS),
        integers_2d(t[PANELS], t[NUM_WORKERS], NUM_PANELS),
    )


class KernelError(RuntimeError):
    """A compiled kernel raised; what its step has computed is worth nothing."""


@njit(nogil=True, cache=True)
def run_part(t, worker):
    """One worker's part of a step."""
    numbers = carray(as_floats(t[NUMBERS]), (3,))
    num_tokens, num_sequences = t[NUM_TOKENS], t[NUM_SEQUENCES]
    run_layers(
        integers_2d(t[LAYERS], t[NUM_LAYERS], NUM_COLUMNS),
        Ends(t[EMBEDDING], t[NORM], t[LM_HEAD]),
        Tokens(
            integers(t[IDS], num_tokens),
            floats(t[COS], num_tokens, t[ROTARY_HALF]),
            floats(t[SIN], num_tokens, t[ROTARY_HALF]),
            floats(t[LOCAL_COS], num_tokens, t[ROTARY_HALF]),
            floats(t[LOCAL_SIN], num_tokens, t[ROTARY_HALF]),
            integers(t[SLOT_MAPPING], num_tokens),
            integers(t[WANTED], t[NUM_WANTED]),
        ),
        Sequences(
            integers_2d(t[BLOCK_TABLES], num_sequences, t[MAX_BLOCKS]),
            integers(t[CU_QUERY_LENS], num_sequences + 1),
            integers(t[SEQ_LENS], num_sequences),
        ),
        StackShape(
            t[HIDDEN_SIZE], t[MODEL_HEAD_DIM], Weights(t[WEIGHT_KIND], t[PRODUCT]), numbers[0],
            numbers[1], numbers[2], t[GELU],
        ),
        AttentionShape(
            t[NUM_HEADS], t[NUM_KV_HEADS], t[HEAD_DIM], t[BLOCK_SIZE], t[KV_KIND], t[KV_BYTES],
            t[ATTEND_TILE],
        ),
        buffers_of(t),
        plan_of(t),
        integers(t[CURSORS], t[NUM_LAYERS]),
        Crew(worker, t[NUM_WORKERS], integers(t[MEETING], 8)),
        floats(t[LOGITS], t[NUM_WANTED], t[VOCAB_WIDTH]),
    )  # fmt: skip


@cfunc("int64(int64, int64)", cache=True)
def work(table, worker):
    """`run_part`, whose exceptions no caller in C could take: the meeting tells of them."""
    t = carray(as_integers(table), (TABLE_SIZE,))
    try:
        run_part(t, worker)
    except Exception:  # noqa: BLE001  # all that Numba can catch
        fetch_add(t[MEETING], FAILED)  # so nobody waits for this worker any more
    return 0


def run_step(table: np.ndarray) -> None:
    """One step by all workers, as `table` [TABLE_SIZE] int64 says.

    Changes logits, buffers, and the KV cache through the layers' addresses. Raises a KernelError.
    """
    run_by_all(work.address, table.ctypes.data, table[NUM_WORKERS])
    if integers(table[MEETING], 8)[0] >= FAILED:
        raise KernelError("a compiled kernel failed in this step")
