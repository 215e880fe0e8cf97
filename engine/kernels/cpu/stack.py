"""What a decoder computes in a step, from token ids to logits, as one worker goes through it.

A layer is a row of addresses. Workers go through its phases together, each with its part of the
tokens, of a weight's panels or of the attention's items.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from engine.kernels.cpu.attention import Scores, attend
from engine.kernels.cpu.emit import BFLOAT16, FLOAT16, FLOAT32, INT8, INT16, PAIRS, PANEL
from engine.kernels.cpu.int16 import int16_row, int16_weight_at
from engine.kernels.cpu.kv_blocks import store_token
from engine.kernels.cpu.matmul import Weights, multiply, multiply_gated, panel_bytes
from engine.kernels.cpu.norms import norm_row
from engine.kernels.cpu.pairs import pair_row
from engine.kernels.cpu.quantize import quantize_row, weight_at
from engine.kernels.cpu.vectors import gelu_mul_panels, load_number
from engine.kernels.cpu.workers import share, wait_for_all

# columns of a layer's row: addresses of its tensors (0: it has none), and its window (0: none)
(
    ATTENTION_NORM, QKV, QKV_BIAS, QUERY_NORM, KEY_NORM, OUT, OUT_BIAS, ATTENTION_OUT_NORM,
    MLP_NORM, GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS, MLP_OUT_NORM, KV_CACHE, WINDOW, NUM_COLUMNS,
) = range(17)  # fmt: skip


class StackShape(NamedTuple):
    """Sizes that all layers share."""

    hidden_size: int
    head_dim: int  # of the model; the attention's is filled up to whole panels
    weights: Weights
    eps: np.float32
    scale: np.float32  # of attention scores
    embedding_scale: np.float32
    gelu: int  # 1: the gate is Gemma's


class Ends(NamedTuple):
    """Addresses of what comes before the first layer and after the last."""

    embedding: int
    norm: int
    lm_head: int


class Tokens(NamedTuple):
    """One step's tokens, end to end."""

    ids: np.ndarray  # [T] int64
    cos: np.ndarray  # [T, rotary_dim // 2] float32
    sin: np.ndarray  # [T, rotary_dim // 2] float32
    local_cos: np.ndarray  # the same, of layers with a window
    local_sin: np.ndarray
    slot_mapping: np.ndarray  # [T] int64
    wanted: np.ndarray  # [R] int64: those whose logits are wanted, in any order


class Buffers(NamedTuple):
    """What a step writes, rows of its tokens; made once, for the largest step."""

    residual: np.ndarray  # [T, hidden] float32
    hidden: np.ndarray  # [T, hidden]
    heads: np.ndarray  # [T, H + 2 × H_kv, D] queries, keys, values
    attended: np.ndarray  # [T, H, D]
    gated: np.ndarray  # [T, intermediate], rows further apart: the first part of gate_up
    gate_up: np.ndarray  # [T, 2 × intermediate], of a gate that is made in a pass of its own
    quantized: np.ndarray  # [T, quantized_words(largest input)], where inputs are rounded
    tiles: np.ndarray  # [num_workers, ROWS_TOGETHER, 2, 16] gate and up of one panel
    flat_heads: np.ndarray  # heads again, [T, (H + 2 × H_kv) × D]
    flat_attended: np.ndarray  # attended again, [T, H × D]


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


@njit(nogil=True, cache=True)
def embed_token(token_id, table, scale, out, size, kind):
    """A row of a packed [vocab, hidden] table, times a scale."""
    panel = table + token_id // PANEL * panel_bytes(size, kind)
    lane = token_id % PANEL
    if kind == FLOAT32:
        for i in range(size):
            out[i] = load_number(panel + (i * PANEL + lane) * 4, 0)
    elif kind == FLOAT16:
        for i in range(size):
            out[i] = load_number(panel + (i * PANEL + lane) * 2, 1)
    elif kind == BFLOAT16:
        for i in range(size):
            out[i] = load_number(panel + (i * PANEL + lane) * 2, 2)
    elif kind == PAIRS:
        for i in range(size):
            out[i] = load_number(panel + (i // 2 * PANEL + lane) * 4 + i % 2 * 2, 2)
    elif kind == INT16:
        for i in range(size):
            out[i] = int16_weight_at(panel, lane, i, size)
    else:
        for i in range(size):
            out[i] = weight_at(panel, lane, i, size)
    for i in range(size):
        out[i] *= scale


@njit(nogil=True, cache=True)
def round_row(x, size, out, kind):
    """What weights of this kind are multiplied by, where that is not float32."""
    if kind == INT8:
        quantize_row(x, size, out)
    elif kind == PAIRS:
        pair_row(x, size, out)
    elif kind == INT16:
        int16_row(x, size, out)


@njit(nogil=True, cache=True)
def norm_share(weight, buffers, num_rows, shape, crew):
    """One worker's rows: normed, and made ready for weights of this kind."""
    low, high = share(num_rows, crew)
    for t in range(low, high):
        norm_row(buffers.residual[t], weight, shape.eps, buffers.hidden[t], shape.hidden_size)
        round_row(buffers.hidden[t], shape.hidden_size, buffers.quantized[t], shape.weights.kind)


@njit(nogil=True, cache=True)
def join_share(weight, buffers, num_rows, shape, crew):
    """One worker's rows of what a half has made: normed, and added to the stream."""
    size = shape.hidden_size
    low, high = share(num_rows, crew)
    for t in range(low, high):
        made, residual = buffers.hidden[t], buffers.residual[t]
        norm_row(made, weight, shape.eps, made, size)
        for i in range(size):
            residual[i] += made[i]


@njit(nogil=True, cache=True)
def left_side(rows, num_rows, buffers, shape, crew, phase):
    """What weights of this kind are multiplied by: the rows, or integers; and the next phase."""
    kind = shape.weights.kind
    if kind not in (INT8, PAIRS, INT16):
        return rows, phase
    low, high = share(num_rows, crew)
    for t in range(low, high):
        round_row(rows[t], rows.shape[1], buffers.quantized[t], kind)
    wait_for_all(crew, phase)
    return buffers.quantized, phase + 1


@njit(nogil=True, cache=True)
def normed(buffers, shape):
    """What `norm_share` has made."""
    kind = shape.weights.kind
    return buffers.quantized if kind in (INT8, PAIRS, INT16) else buffers.hidden


@njit(nogil=True, cache=True)
def attention_half(layer, tokens, sequences, shape, attention, buffers, plan, cursor, crew, phase):
    """Norm, project, place, attend; returns the next phase."""
    num_tokens = len(tokens.ids)
    heads = buffers.heads
    norm_share(layer[ATTENTION_NORM], buffers, num_tokens, shape, crew)
    wait_for_all(crew, phase)
    multiply(
        normed(buffers, shape), layer[QKV], layer[QKV_BIAS], buffers.flat_heads, False, num_tokens,
        shape.hidden_size, shape.weights, crew,
    )  # fmt: skip
    wait_for_all(crew, phase + 1)
    cos, sin = tokens.cos, tokens.sin
    if layer[WINDOW] > 0:
        cos, sin = tokens.local_cos, tokens.local_sin
    low, high = share(num_tokens, crew)
    for t in range(low, high):
        place_token(
            heads[t], cos[t], sin[t], tokens.slot_mapping[t], layer, shape.head_dim, shape.eps,
            attention,
        )  # fmt: skip
    wait_for_all(crew, phase + 2)
    scores = Scores(shape.scale, layer[WINDOW], np.float32(0.0), np.empty(0, np.float32))
    phase = attend(
        heads, buffers.attended, layer[KV_CACHE], sequences, attention, scores, plan, cursor, crew,
        phase + 3,
    )  # fmt: skip
    wait_for_all(crew, phase)
    return phase + 1


@njit(nogil=True, cache=True)
def join(rows, weight, bias, norm, num_rows, shape, buffers, crew, phase):
    """Project rows back and add them to the stream, normed where a norm is; the next phase.

    The next norm is of the same rows by the same workers: it need not wait for the last addition.
    """
    left, phase = left_side(rows, num_rows, buffers, shape, crew, phase)
    made = buffers.residual if norm == 0 else buffers.hidden
    multiply(left, weight, bias, made, norm == 0, num_rows, rows.shape[1], shape.weights, crew)
    wait_for_all(crew, phase)
    if norm != 0:
        join_share(norm, buffers, num_rows, shape, crew)
    return phase + 1


@njit(nogil=True, cache=True)
def gate(layer, num_rows, shape, buffers, crew, phase):
    """Make the gated rows; returns the next phase."""
    left, size = normed(buffers, shape), shape.hidden_size
    if shape.gelu == 0:
        multiply_gated(
            left, layer[GATE_UP], layer[GATE_UP_BIAS], buffers.gated, buffers.tiles, num_rows,
            size, shape.weights, crew,
        )  # fmt: skip
        wait_for_all(crew, phase)
        return phase + 1
    multiply(
        left, layer[GATE_UP], layer[GATE_UP_BIAS], buffers.gate_up, False, num_rows, size,
        shape.weights, crew,
    )  # fmt: skip
    wait_for_all(crew, phase)
    width = buffers.gated.shape[1]
    low, high = share(num_rows, crew)
    for t in range(low, high):
        row = buffers.gate_up[t].ctypes.data
        gelu_mul_panels(row, row + 4 * width, row, width // PANEL)
    wait_for_all(crew, phase + 1)
    return phase + 2


@njit(nogil=True, cache=True)
def feed_forward_half(layer, num_rows, shape, buffers, crew, phase):
    """Project what was attended to, norm, gate and project back; returns the next phase."""
    phase = join(
        buffers.flat_attended, layer[OUT], layer[OUT_BIAS], layer[ATTENTION_OUT_NORM], num_rows,
        shape, buffers, crew, phase,
    )  # fmt: skip
    norm_share(layer[MLP_NORM], buffers, num_rows, shape, crew)
    wait_for_all(crew, phase)
    phase = gate(layer, num_rows, shape, buffers, crew, phase + 1)
    return join(
        buffers.gated, layer[DOWN], layer[DOWN_BIAS], layer[MLP_OUT_NORM], num_rows, shape,
        buffers, crew, phase,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def keep_wanted(buffers, wanted, crew, phase):
    """Move the wanted rows, which may come in any order, to the front; returns the next phase."""
    attended, residual = buffers.flat_attended, buffers.residual
    low, high = share(len(wanted), crew)
    # by way of buffers that nobody needs now: a row may be read after its place is written
    for r in range(low, high):
        for i in range(attended.shape[1]):
            buffers.flat_heads[r, i] = attended[wanted[r], i]
        for i in range(residual.shape[1]):
            buffers.hidden[r, i] = residual[wanted[r], i]
    wait_for_all(crew, phase)
    for r in range(low, high):
        for i in range(attended.shape[1]):
            attended[r, i] = buffers.flat_heads[r, i]
        for i in range(residual.shape[1]):
            residual[r, i] = buffers.hidden[r, i]
    wait_for_all(crew, phase + 1)
    return phase + 2


@njit(nogil=True, cache=True)
def run_layers(
    layers, ends, tokens, sequences, shape, attention, buffers, plan, cursors, crew, logits
):
    """One worker's part of a step, from token ids to logits."""
    size, weights = shape.hidden_size, shape.weights
    num_rows = len(tokens.ids)
    low, high = share(num_rows, crew)
    for t in range(low, high):
        embed_token(
            tokens.ids[t], ends.embedding, shape.embedding_scale, buffers.residual[t], size,
            weights.kind,
        )  # fmt: skip
    phase = 0
    for i in range(len(layers)):
        phase = attention_half(
            layers[i], tokens, sequences, shape, attention, buffers, plan, cursors[i:], crew, phase
        )
        if i == len(layers) - 1:
            # past the last attention no token looks at another: the rest is for the wanted ones
            phase = keep_wanted(buffers, tokens.wanted, crew, phase)
            num_rows = len(tokens.wanted)
        phase = feed_forward_half(layers[i], num_rows, shape, buffers, crew, phase)
    norm_share(ends.norm, buffers, num_rows, shape, crew)
    wait_for_all(crew, phase)
    multiply(normed(buffers, shape), ends.lm_head, 0, logits, False, num_rows, size, weights, crew)
