"""Penalties and draws in a few launches, for rows of every kind, without a sort.

`cut_row` finds how low a row's logits may go: the k-th largest, and where the likeliest have the
mass p, by narrowing down the bits of that number, three with each pass over the row. `draw_chunk`
adds noise to what is left and keeps the best; a row is many programs' work. `best_of` picks from
theirs.

The noise is float64's, as on a CPU: so draws are the same. It is computed only where an upper bound
of it in float32 could win. Source: Gumbel 1954; Salmon et al. 2011 (Philox).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
CHUNK = 16384  # tokens of one program of `draw_chunk`
ENTRIES = 256
LARGEST = tl.constexpr(0x7F7FFFFF)  # bits of the largest float32
BROKEN = tl.constexpr(-1)


@triton.jit
def scaled_logits(row, first, peak, temperature, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """(x - peak) / temperature of a tile, rounded as on a CPU; -inf past the end."""
    v = first + tl.arange(0, BLOCK)
    x = tl.load(row + v, mask=v < VOCAB, other=float("-inf"))
    return tl.div_rn(x - peak, temperature)


@triton.jit
def amount_below(
    row, peak, temperature, candidates, limit,
    MASS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of tokens whose key is below each candidate, and not above the limit: their number or mass.

    A key is the bits of a scaled logit without its sign: none is positive, so it grows as they
    fall.
    """
    sums = tl.zeros([8], tl.float64)
    for first in tl.range(0, VOCAB, BLOCK):
        scaled = scaled_logits(row, first, peak, temperature, VOCAB, BLOCK)
        key = scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        amount = tl.where(key <= limit, 1.0, 0.0)
        if MASS:
            amount *= tl.exp(scaled)
        below = key[:, None] < candidates[None, :]
        sums += tl.sum(tl.where(below, amount[:, None], 0.0), 0).to(tl.float64)
    return sums


@triton.jit
def largest_key(
    row, peak, temperature, target, limit,
    MASS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest key below which there is less than the target."""
    j = tl.arange(0, 8).to(tl.int64)
    found = tl.zeros([], tl.int64)
    for digit in range(11):
        candidates = found + (j << tl.maximum(28 - 3 * digit, 0))
        candidates = tl.minimum(candidates, LARGEST + 1).to(tl.int32)
        sums = amount_below(row, peak, temperature, candidates, limit, MASS, VOCAB, BLOCK)
        found = tl.max(tl.where(sums < target, candidates, 0), 0).to(tl.int64)
    return tl.minimum(found, LARGEST).to(tl.int32)


@triton.jit
def cut_row(
    cuts,  # [R, 2] float64: the largest logit, NaN if broken; the least that (x - it) / T may be
    logits,  # [R, VOCAB]
    numbers,  # [R, 3] float64
    words,  # [R, 3] int64
    stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    row = logits + r * stride
    v = tl.arange(0, BLOCK)
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    broken = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, VOCAB, BLOCK):
        x = tl.load(row + first + v, mask=first + v < VOCAB, other=float("-inf"))
        broken |= ((x != x) | (x == float("inf"))).to(tl.int32)
        peaks = tl.maximum(peaks, tl.where(x == x, x, float("-inf")))
    peak = tl.max(peaks, 0)
    is_broken = (tl.max(broken, 0) > 0) | (peak == float("-inf"))
    temperature = tl.load(numbers + r * 3).to(tl.float32)
    top_p = tl.load(numbers + r * 3 + 1)
    lowest = tl.load(numbers + r * 3 + 2)
    top_k = tl.load(words + r * 3)
    limit = tl.full([], LARGEST, tl.int32)
    if (temperature > 0) & (is_broken == 0):
        if (top_k > 0) & (top_k < VOCAB):
            target = top_k.to(tl.float64)
            limit = largest_key(row, peak, temperature, target, limit, False, VOCAB, BLOCK)
        if top_p < 1:
            whole = tl.full([8], LARGEST + 1, tl.int32)
            sums = amount_below(row, peak, temperature, whole, limit, True, VOCAB, BLOCK)
            target = top_p * tl.max(sums, 0)
            inside = largest_key(row, peak, temperature, target, limit, True, VOCAB, BLOCK)
            limit = tl.minimum(limit, inside)
    cut = -limit.to(tl.float32, bitcast=True)
    tl.store(cuts + r * 2, tl.where(is_broken, float("nan"), peak).to(tl.float64))
    tl.store(cuts + r * 2 + 1, tl.maximum(cut.to(tl.float64), lowest))


@triton.jit
def noise_at_most(word):
    """No less than the word's noise, but for float32's rounding."""
    from_one = ((0xFFFFFFFF - word).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    from_zero = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # near 1, where the winners are, -log u ≥ 1 - u; there float32 has no u, but 1 - u
    near_one = word >= 0x80000000
    rare = tl.where(near_one, from_one, -tl.log(tl.minimum(from_zero, 0.75)))
    return -tl.log(rare)


@triton.jit
def draw_chunk(
    scores,  # [R, CHUNKS] float64
    ids,  # [R, CHUNKS] int64
    cuts, logits, numbers, words, stride,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * CHUNK
    peak = tl.load(cuts + r * 2).to(tl.float32)
    cut = tl.load(cuts + r * 2 + 1)
    temperature = tl.load(numbers + r * 3).to(tl.float32)
    seed = tl.load(words + r * 3 + 1)
    position = tl.load(words + r * 3 + 2).to(tl.uint32)
    drawn = temperature > 0
    temperature = tl.where(drawn, temperature, 1.0)
    best = tl.full([], float("-inf"), tl.float64)
    best_id = tl.zeros([], tl.int32)
    zero = tl.zeros([BLOCK], tl.uint32)
    for first in tl.range(begin, tl.minimum(begin + CHUNK, VOCAB), BLOCK):
        v = first + tl.arange(0, BLOCK)
        scaled = scaled_logits(logits + r * stride, first, peak, temperature, VOCAB, BLOCK)
        value = scaled.to(tl.float64)
        value = tl.where((value >= cut) & (scaled > float("-inf")), value, float("-inf"))
        if tl.max(value, 0) > float("-inf"):
            if drawn:
                counter = v.to(tl.uint32)
                word, _, _, _ = tl.philox(seed, counter, zero + position, zero, zero)
                at_most = value + noise_at_most(word).to(tl.float64)
                if tl.max(at_most, 0) + 1e-3 > best:
                    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
                    value = value - tl.log(-tl.log(uniform))
                else:
                    value = tl.full([BLOCK], float("-inf"), tl.float64)
            highest = tl.max(value, 0)
            if highest > best:
                best = highest
                best_id = tl.min(tl.where(value == highest, v, VOCAB), 0)
    tl.store(scores + r * CHUNKS + tl.program_id(1), best)
    tl.store(ids + r * CHUNKS + tl.program_id(1), best_id.to(tl.int64))


@triton.jit
def best_of(out, scores, ids, cuts, CHUNKS: tl.constexpr, WIDTH: tl.constexpr):
    """The best of a row's chunks; of equals the first."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH)
    found = tl.load(scores + r * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    place = tl.min(tl.where(found == tl.max(found, 0), c, WIDTH), 0)
    token = tl.load(ids + r * CHUNKS + tl.minimum(place, CHUNKS - 1))
    peak = tl.load(cuts + r * 2)
    tl.store(out + r, tl.where(peak == peak, token, BROKEN))


@triton.jit
def penalize_entry(logits, places, terms, num_entries, BLOCK: tl.constexpr):
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = e < num_entries
    place = tl.load(places + e, mask=mask, other=0)
    count = tl.load(terms + e, mask=mask, other=0)
    repetition = tl.load(terms + num_entries + e, mask=mask, other=1)
    frequency = tl.load(terms + 2 * num_entries + e, mask=mask, other=0)
    presence = tl.load(terms + 3 * num_entries + e, mask=mask, other=0)
    before = tl.load(logits + place, mask=mask, other=0)
    value = tl.where(before > 0, tl.div_rn(before, repetition), before * repetition)
    value -= frequency * count
    value -= tl.where(count > 0, presence, 0.0)
    huge = 3.4028234663852886e38
    clamped = tl.minimum(tl.maximum(value, -huge), huge)
    is_finite = tl.abs(before) <= huge
    tl.store(logits + place, tl.where(is_finite, clamped, value), mask=mask)


def draw(
    logits: Tensor,  # [R, vocab] float32
    numbers: Tensor,  # [R, 3] float64
    words: Tensor,  # [R, 3] int64
) -> Tensor:  # [R] int64
    """What `draws.draw` computes."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    cuts = torch.empty((num_rows, 2), dtype=torch.float64, device=logits.device)
    scores = torch.empty((num_rows, num_chunks), dtype=torch.float64, device=logits.device)
    ids = torch.empty((num_rows, num_chunks), dtype=torch.int64, device=logits.device)
    numbers, words, stride = numbers.contiguous(), words.contiguous(), logits.stride(0)
    with torch.cuda.device_of(logits):
        cut_row[(num_rows,)](
            cuts, logits, numbers, words, stride, VOCAB=vocab_size, BLOCK=BLOCK, num_warps=8
        )
        draw_chunk[(num_rows, num_chunks)](
            scores, ids, cuts, logits, numbers, words, stride,
            VOCAB=vocab_size, BLOCK=BLOCK, CHUNK=CHUNK, CHUNKS=num_chunks, num_warps=4,
        )  # fmt: skip
        best_of[(num_rows,)](
            out, scores, ids, cuts,
            CHUNKS=num_chunks, WIDTH=triton.next_power_of_2(num_chunks), num_warps=1,
        )  # fmt: skip
    return out


def penalize(
    logits: Tensor,  # [R, vocab] float32 contiguous, changed
    places: Tensor,  # [E] int64
    terms: Tensor,  # [4, E] float32
) -> None:
    """What `draws.penalize` does."""
    assert logits.is_contiguous()
    num_entries = len(places)
    if num_entries:
        with torch.cuda.device_of(logits):
            penalize_entry[(triton.cdiv(num_entries, ENTRIES),)](
                logits, places.contiguous(), terms.contiguous(), num_entries,
                BLOCK=ENTRIES, num_warps=4,
            )  # fmt: skip
