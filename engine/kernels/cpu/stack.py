"""All layers of a decoder in one call: no Python, no new tensor from the first to the last.

A layer is a row of addresses. Phases within it follow each other as parallel regions of one pool of
threads (torch's own: both use the process's OpenMP).
"""

from typing import NamedTuple

import numpy as np
from numba import njit, prange

from engine.kernels.cpu.attention import AttentionShape, attend, store_token
from engine.kernels.cpu.matmul import panel_product
from engine.kernels.cpu.vectors import (
    FLOAT16,
    FLOAT32,
    MAX_ROWS,
    PANEL,
    load_float,
    load_number,
    silu_mul_panel,
)

# columns of a layer's row: addresses of its tensors (0: it has none), and its window (0: none)
(
    ATTENTION_NORM, QKV, QKV_BIAS, QUERY_NORM, KEY_NORM, OUT, OUT_BIAS,
    MLP_NORM, GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS, KV_CACHE, WINDOW, NUM_COLUMNS,
) = range(15)  # fmt: skip

SERIAL_ROWS = 8  # with fewer, work on single rows is not worth waking threads for


class StackShape(NamedTuple):
    """Sizes that all layers share."""

    hidden_size: int
    head_dim: int  # of the model; the attention's is filled up to whole panels
    eps: np.float32
    scale: np.float32  # of attention scores
    attention: AttentionShape
    weight_kind: int  # how weights are stored, see `vectors`
    weight_bytes: int


class Buffers(NamedTuple):
    """What a step writes, rows of its tokens; made once, for the largest step."""

    residual: np.ndarray  # [T, hidden] float32
    hidden: np.ndarray  # [T, hidden]
    heads: np.ndarray  # [T, H + 2 × H_kv, D] queries, keys, values
    attended: np.ndarray  # [T, H, D]
    gated: np.ndarray  # [T, intermediate]
    tiles: np.ndarray  # [num_workers, 2, 6, 16] gate and up of one tile


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})
def norm_row(x, weight, eps, out, size):
    """x / sqrt(mean(x²) + eps) × weight, of the first `size` numbers; `weight` is an address."""
    total = np.float32(0.0)
    for i in range(size):
        total += x[i] * x[i]
    scale = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
    for i in range(size):
        out[i] = x[i] * scale * load_float(weight + 4 * i)


@njit(nogil=True, cache=True, parallel=True)
def norm_rows(x, weight, eps, out, num_rows, size):
    if num_rows < SERIAL_ROWS:
        for t in range(num_rows):
            norm_row(x[t], weight, eps, out[t], size)
    else:
        for t in prange(num_rows):
            norm_row(x[t], weight, eps, out[t], size)


@njit(nogil=True, cache=True, parallel=True)
def multiply(x, weight, bias, y, added, num_rows, num_inputs, kind, item, num_workers):
    """Y = X Wᵀ + bias, or Y += X Wᵀ + bias where `added` says so, for the first rows of arrays."""
    ldx, ldy = x.strides[0] // 4, y.strides[0] // 4
    num_panels = y.shape[1] // PANEL
    if added and bias != 0:
        for t in range(num_rows):
            for i in range(y.shape[1]):
                y[t, i] += load_float(bias + 4 * i)
    for worker in prange(num_workers):
        low, high = num_panels * worker // num_workers, num_panels * (worker + 1) // num_workers
        for p in range(low, high):
            made = y.ctypes.data + 4 * PANEL * p
            start, lds = np.int64(0), np.int64(0)
            if added:
                start, lds = made, np.int64(ldy)
            elif bias != 0:
                start = bias + 4 * PANEL * p
            panel_product(
                x.ctypes.data, ldx, num_rows, weight + p * PANEL * num_inputs * item, made, ldy,
                start, lds, num_inputs, kind,
            )  # fmt: skip


@njit(nogil=True, cache=True, parallel=True)
def multiply_gated(x, weight, bias, out, tiles, num_rows, num_inputs, kind, item, num_workers):
    """silu(X Gᵀ + b) × (X Uᵀ + c), tile by tile, while both are at hand."""
    num_panels = out.shape[1] // PANEL
    panel_bytes = PANEL * num_inputs * item
    ldx, ldy = x.strides[0] // 4, out.strides[0] // 4
    for worker in prange(num_workers):
        gate, up = tiles[worker, 0].ctypes.data, tiles[worker, 1].ctypes.data
        low, high = num_panels * worker // num_workers, num_panels * (worker + 1) // num_workers
        for p in range(low, high):
            gate_panel = weight + p * panel_bytes
            up_panel = gate_panel + num_panels * panel_bytes
            gate_bias, up_bias = np.int64(0), np.int64(0)
            if bias != 0:
                gate_bias = bias + 4 * PANEL * p
                up_bias = gate_bias + 4 * PANEL * num_panels
            for row in range(0, num_rows, MAX_ROWS):
                rows = min(MAX_ROWS, num_rows - row)
                at = x.ctypes.data + 4 * row * ldx
                panel_product(
                    at, ldx, rows, gate_panel, gate, PANEL, gate_bias, 0, num_inputs, kind
                )
                panel_product(at, ldx, rows, up_panel, up, PANEL, up_bias, 0, num_inputs, kind)
                target = out.ctypes.data + 4 * (row * ldy + PANEL * p)
                for i in range(rows):
                    offset = 4 * PANEL * i
                    silu_mul_panel(gate + offset, up + offset, target + 4 * ldy * i)


@njit(nogil=True, cache=True)
def turn(x, cos, sin):
    """Rotary embedding of one head's first 2 × len(cos) numbers, in place."""
    half = len(cos)
    for i in range(half):
        low, high = x[i], x[i + half]
        x[i] = low * cos[i] - high * sin[i]
        x[i + half] = high * cos[i] + low * sin[i]


@njit(nogil=True, cache=True)
def place_token(heads, cos, sin, slot, layer, size, eps, shape):
    """Norm and turn one token's queries and keys, and store its keys and values."""
    num_heads, num_kv_heads = shape.num_heads, shape.num_kv_heads
    for h in range(num_heads + num_kv_heads):
        norm = layer[QUERY_NORM] if h < num_heads else layer[KEY_NORM]
        if norm != 0:
            norm_row(heads[h], norm, eps, heads[h], size)
        turn(heads[h], cos, sin)
    for h in range(num_kv_heads):
        key, value = heads[num_heads + h], heads[num_heads + num_kv_heads + h]
        store_token(layer[KV_CACHE], slot, h, key, value, shape)


@njit(nogil=True, cache=True, parallel=True)
def place_tokens(heads, cos, sin, slot_mapping, layer, size, eps, shape):
    num_tokens = len(slot_mapping)
    if num_tokens < SERIAL_ROWS:
        for t in range(num_tokens):
            place_token(heads[t], cos[t], sin[t], slot_mapping[t], layer, size, eps, shape)
    else:
        for t in prange(num_tokens):
            place_token(heads[t], cos[t], sin[t], slot_mapping[t], layer, size, eps, shape)


@njit(nogil=True, cache=True)
def run_layers(
    layers,  # [num_layers, NUM_COLUMNS] int64
    shape,
    buffers,  # residual holds the embedded tokens; afterwards the wanted rows, in front
    cos,  # [T, rotary_dim // 2] float32
    sin,  # [T, rotary_dim // 2] float32
    slot_mapping,  # [T] int64
    block_tables,  # [N, max_blocks] int64
    cu_query_lens,  # [N + 1] int64
    seq_lens,  # [N] int64
    wanted,  # [R] int64: the tokens whose last hidden state is wanted, in any order
    plan,
):
    """Every layer over one step's tokens. Changes the KV cache, through the layers' addresses."""
    num_tokens = len(slot_mapping)
    num_rows = num_tokens
    attention = shape.attention
    num_workers = len(plan.scratch)
    kind, item = shape.weight_kind, shape.weight_bytes
    residual, hidden, gated = buffers.residual, buffers.hidden, buffers.gated
    heads, attended = buffers.heads[:num_tokens], buffers.attended[:num_tokens]
    flat_heads = heads.reshape(num_tokens, -1)
    flat_attended = attended.reshape(num_tokens, -1)
    no_sinks = np.empty(0, np.float32)
    for i in range(len(layers)):
        layer = layers[i]
        norm_rows(residual, layer[ATTENTION_NORM], shape.eps, hidden, num_tokens, shape.hidden_size)
        multiply(
            hidden, layer[QKV], layer[QKV_BIAS], flat_heads, False, num_tokens, shape.hidden_size,
            kind, item, num_workers,
        )  # fmt: skip
        place_tokens(heads, cos, sin, slot_mapping, layer, shape.head_dim, shape.eps, attention)
        attend(
            heads[:, : attention.num_heads], attended, layer[KV_CACHE], block_tables,
            cu_query_lens, seq_lens, attention, shape.scale, layer[WINDOW], np.float32(0.0),
            no_sinks, plan,
        )  # fmt: skip
        if i == len(layers) - 1:
            # past the last attention no token looks at another: the rest is for the wanted ones
            num_rows = len(wanted)
            attended[:num_rows] = attended[wanted]  # read before any is written: in any order
            residual[:num_rows] = residual[wanted]
        multiply(
            flat_attended, layer[OUT], layer[OUT_BIAS], residual, True, num_rows,
            flat_attended.shape[1], kind, item, num_workers,
        )  # fmt: skip
        norm_rows(residual, layer[MLP_NORM], shape.eps, hidden, num_rows, shape.hidden_size)
        multiply_gated(
            hidden, layer[GATE_UP], layer[GATE_UP_BIAS], gated, buffers.tiles, num_rows,
            shape.hidden_size, kind, item, num_workers,
        )  # fmt: skip
        multiply(
            gated, layer[DOWN], layer[DOWN_BIAS], residual, True, num_rows, gated.shape[1], kind,
            item, num_workers,
        )  # fmt: skip


@njit(nogil=True, cache=True)
def embed(token_ids, table, residual, hidden_size, kind, item):
    """Rows of a packed [vocab, hidden] table."""
    for t in range(len(token_ids)):
        panel, lane = token_ids[t] // PANEL, token_ids[t] % PANEL
        first = table + (panel * hidden_size * PANEL + lane) * item
        for i in range(hidden_size):
            at = first + i * PANEL * item
            if kind == FLOAT32:
                residual[t, i] = load_number(at, 0)
            elif kind == FLOAT16:
                residual[t, i] = load_number(at, 1)
            else:
                residual[t, i] = load_number(at, 2)


@njit(nogil=True, cache=True)
def head(residual, norm, eps, hidden, table, logits, num_rows, hidden_size, kind, item, workers):
    """The last norm, then logits [R, ⌈vocab / 16⌉ × 16]."""
    norm_rows(residual, norm, eps, hidden, num_rows, hidden_size)
    multiply(hidden, table, 0, logits, False, num_rows, hidden_size, kind, item, workers)
