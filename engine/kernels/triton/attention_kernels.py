"""Attention over the paged KV cache: the two kernels.

`attend` computes an item: a tile of a sequence's query rows against a split of its keys. The rows
of a tile are the query heads that share a KV head, token after token, so that each key is read once
for all of them (grouped queries: Ainslie et al. 2023). The softmax is taken online, tile by tile of
keys (Dao et al. 2022, FlashAttention; Milakov and Gimelshein 2018), which are found through the
block table (Kwon et al. 2023, PagedAttention). Scores are in powers of two: one multiplication and
`exp2` is what the hardware has for `exp`.

`merge` adds up what a sequence's splits gave (Dao et al. 2023, Flash-Decoding).

A slot past a sequence's end is never read, and a key that a row does not see weighs nothing in it.
"""

import triton
import triton.language as tl

from engine.kernels.triton.attention_items import (
    SEQUENCES_AT_ONCE,
    find_item,
    first_key,
    is_ours,
    keys_seen,
    locate,
    split_length,
)

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def cap(scores, softcap):
    """softcap × tanh(scores / softcap), in powers of two."""
    # tanh(|x|) = (1 - exp(-2|x|)) / (1 + exp(-2|x|)): nothing overflows
    small = tl.exp2(tl.abs(scores) * (-2 * LOG2_E / softcap))
    capped = softcap * LOG2_E * (1 - small) / (1 + small)
    return tl.where(scores < 0, -capped, capped)


@triton.jit
def attend_keys(
    totals,  # [ROWS, WIDTH] float32, [ROWS], [ROWS]: values, weights and peak so far
    q,  # [ROWS, WIDTH]
    positions,  # [ROWS]
    begin,
    end,
    table,  # of the sequence
    head_cache,  # of the KV head, in block 0
    head_scales,  # of keys and values in 8 bits there
    scale,  # of scores; where there is no cap, in powers of two
    softcap,
    D: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    VALUES: tl.constexpr,  # how far behind a block's keys its values lie
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SCALED: tl.constexpr,
    MASKED: tl.constexpr,  # some row does not see some key
):  # fmt: skip
    """Take the keys from begin to end into the rows' totals."""
    acc, weight, peak = totals
    d = tl.arange(0, WIDTH)
    for first in tl.range(begin, end, KEYS):
        keys = first + tl.arange(0, KEYS)
        if MASKED:
            there = keys < end
            block = tl.load(table + keys // BLOCK_SIZE, mask=there, other=0)
        else:
            there = keys >= 0
            block = tl.load(table + keys // BLOCK_SIZE)
        block = block.to(tl.int64)
        at = head_cache + block * BLOCK_STRIDE + keys % BLOCK_SIZE * D
        if MASKED or D < WIDTH:
            mask = there[:, None] & (d < D)[None, :]
            k = tl.load(at[:, None] + d[None, :], mask=mask, other=0.0)
            v = tl.load(at[:, None] + (VALUES + d)[None, :], mask=mask, other=0.0)
        else:
            k = tl.load(at[:, None] + d[None, :])
            v = tl.load(at[:, None] + (VALUES + d)[None, :])
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
        if SCALED:
            at = head_scales + block * (BLOCK_STRIDE // 4) + keys % BLOCK_SIZE
            scores *= tl.load(at, mask=there, other=0.0)[None, :]
            v = v.to(tl.float32) * tl.load(at + VALUES // 4, mask=there, other=0.0)[:, None]
        if SOFTCAP:
            scores = cap(scores, softcap)
        if MASKED:
            seen = there[None, :] & (keys[None, :] <= positions[:, None])
            if WINDOW > 0:
                seen &= keys[None, :] > positions[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        # a row that has seen nothing yet: from -inf nothing can be taken away
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(peak - base)
        weight = weight * kept + tl.sum(weights, 1)
        acc = tl.dot(
            weights.to(q.dtype), v.to(q.dtype), acc * kept[:, None], input_precision="ieee"
        )
        peak = higher
    return acc, weight, peak


@triton.jit
def nothing_seen(
    sinks, head, held, first, ROWS: tl.constexpr, WIDTH: tl.constexpr, SINKS: tl.constexpr
):
    """Totals of rows before their first key; in the first split a sink is one, without a value."""
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=held, other=0).to(tl.float32) * LOG2_E
        peak = tl.where(first, sink, peak)
        weight = tl.where(first, 1.0, weight)
    return acc, weight, peak


@triton.jit(do_not_specialize=["num_sequences", "table_stride", "max_splits", "few"])
def attend(
    out,  # [T, H, D]
    parts,  # [N × few or T, H, max_splits, D] float32, of a split sequence's tokens
    part_logs,  # [N × few or T, H, max_splits] float32, log2 of what a part's weights sum to
    query, kv_cache, block_tables, cu_query_lens, seq_lens,  # as `paged_attention` has them
    sinks,  # [H], or anything
    kv_scales,  # the cache as float32, where it is of 8 bits; or anything
    scale, softcap,
    token_stride, head_stride,  # of query
    table_stride, num_sequences,
    max_splits,  # that a sequence's keys are cut into
    few,  # tokens of a sequence: the launch for many takes those that have more
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr,  # heads of the query to each
    D: tl.constexpr, WIDTH: tl.constexpr,  # D, padded to a power of two
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SHORTEST: tl.constexpr,  # split
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr, MANY: tl.constexpr,
    SPLIT: tl.constexpr,  # keys may be split
):  # fmt: skip
    VALUES: tl.constexpr = BLOCK_SIZE * (D + 4 if SCALED else D)  # a block's keys of a head
    _, _, total = find_item(
        0, cu_query_lens, seq_lens, num_sequences, max_splits, few,
        GROUP, ROWS, KEYS, SHORTEST, WINDOW, MANY,
    )  # fmt: skip
    for item in range(tl.program_id(0), total * KV_HEADS, tl.num_programs(0)):
        # heads of one block lie side by side: they are read at the same time
        kv_head = item % KV_HEADS
        n, start, lengths, tile, split, num_splits = locate(
            item // KV_HEADS, cu_query_lens, seq_lens, num_sequences, max_splits, few,
            GROUP, ROWS, KEYS, SHORTEST, WINDOW, MANY,
        )  # fmt: skip
        query_len, seq_len = lengths
        rows, in_head = tile * ROWS + tl.arange(0, ROWS), kv_head * 2 * VALUES
        token, head = rows // GROUP, kv_head * GROUP + rows % GROUP
        held = token < query_len
        totals = nothing_seen(sinks, head, held, split == 0, ROWS, WIDTH, SINKS)
        acc, weight, peak = attend_split(
            totals, query, (start + token).to(tl.int64) * token_stride + head * head_stride,
            held, seq_len - query_len + token,
            keys_seen(lengths, tile, split, max_splits, GROUP, ROWS, KEYS, SHORTEST, WINDOW),
            block_tables + n.to(tl.int64) * table_stride,
            kv_cache + in_head, kv_scales + (in_head + BLOCK_SIZE * D) // 4, scale, softcap,
            D, WIDTH, KEYS, BLOCK_SIZE, KV_HEADS * 2 * VALUES, VALUES, WINDOW, SOFTCAP, SCALED,
        )  # fmt: skip
        row = (start + token).to(tl.int64) * (KV_HEADS * GROUP) + head
        if SPLIT and num_splits > 1:
            slot = (start if MANY else n * few) + token
            part = (slot.to(tl.int64) * (KV_HEADS * GROUP) + head) * max_splits + split
            store_part(parts, part_logs, part, acc, weight, peak, held, D, WIDTH)
        else:
            store_rows(out, row, acc, weight, held, D, WIDTH)


@triton.jit
def attend_split(
    totals, query, row_starts, held, positions, keys, table, head_cache, head_scales,
    scale, softcap,
    D: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, VALUES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """A tile's rows against (begin, whole, end) of its keys; masks only where a row misses one."""
    d = tl.arange(0, WIDTH)
    mask = held[:, None] & (d < D)[None, :]
    q = tl.load(query + row_starts[:, None] + d[None, :], mask=mask, other=0)
    begin, whole, end = keys
    if WINDOW == 0:
        totals = attend_keys(
            totals, q, positions, begin, whole, table, head_cache, head_scales, scale, softcap,
            D, WIDTH, KEYS, BLOCK_SIZE, BLOCK_STRIDE, VALUES, WINDOW, SOFTCAP, SCALED, False,
        )  # fmt: skip
    return attend_keys(
        totals, q, positions, whole, end, table, head_cache, head_scales, scale, softcap,
        D, WIDTH, KEYS, BLOCK_SIZE, BLOCK_STRIDE, VALUES, WINDOW, SOFTCAP, SCALED, True,
    )  # fmt: skip


@triton.jit
def store_part(
    parts, part_logs, part, acc, weight, peak, held, D: tl.constexpr, WIDTH: tl.constexpr
):
    store_rows(parts, part, acc, weight, held, D, WIDTH)
    # of a part of which a row saw nothing -inf, like its peak
    seen = tl.where(weight == 0, 1.0, weight)
    tl.store(part_logs + part, peak + tl.log2(seen), mask=held)


@triton.jit
def store_rows(to, row, acc, weight, held, D: tl.constexpr, WIDTH: tl.constexpr):
    d = tl.arange(0, WIDTH)
    result = acc / tl.where(weight == 0, 1.0, weight)[:, None]
    mask = held[:, None] & (d < D)[None, :]
    tl.store(to + row[:, None] * D + d[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["num_sequences", "max_splits", "few"])
def merge(
    out,
    parts,
    part_logs,
    cu_query_lens,
    seq_lens,
    num_sequences,
    max_splits,
    few,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    SHORTEST: tl.constexpr,
    WINDOW: tl.constexpr,
    MANY: tl.constexpr,
    SPLITS: tl.constexpr,  # max_splits, or more
):
    """Rows of sequences that `attend` has split, as it was called: a program for slot and head."""
    slot = tl.program_id(0)
    head = tl.program_id(1)
    if MANY:
        n = 0
        for first in range(0, num_sequences, SEQUENCES_AT_ONCE):
            at = first + tl.arange(0, SEQUENCES_AT_ONCE)
            ends = tl.load(cu_query_lens + 1 + at, mask=at < num_sequences, other=slot + 1)
            n += tl.sum((ends <= slot).to(tl.int32))
        # past the last sequence's tokens nothing is merged: a token there is not below a length
        n = tl.minimum(n, num_sequences - 1)
        start = tl.load(cu_query_lens + n)
        token = slot - start
    else:
        n = slot // few
        start = tl.load(cu_query_lens + n)
        token = slot % few
    query_len = tl.load(cu_query_lens + n + 1) - start
    seq_len = tl.load(seq_lens + n)
    num_keys = seq_len - first_key(query_len, seq_len, KEYS, WINDOW)
    num_splits = tl.cdiv(num_keys, split_length(num_keys, max_splits, KEYS, SHORTEST))
    if (token < query_len) & (num_splits > 1) & is_ours(query_len, few, MANY):
        splits = tl.arange(0, SPLITS)
        d = tl.arange(0, WIDTH)
        there = splits < num_splits
        part = (slot.to(tl.int64) * HEADS + head) * max_splits + splits
        logs = tl.load(part_logs + part, mask=there, other=float("-inf"))
        weights = tl.exp2(logs - tl.max(logs, 0))
        mask = there[:, None] & (d < D)[None, :]
        values = tl.load(parts + part[:, None] * D + d[None, :], mask=mask, other=0)
        result = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
        place_of = (start + token).to(tl.int64) * HEADS + head
        tl.store(out + place_of * D + d, result, mask=d < D)
