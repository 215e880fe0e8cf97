"""Attention over the paged KV cache for any query lengths: what is launched, and how.

A step of decodes alone is one launch of `attend` for few tokens, with its `merge`. Where longer
queries are among them, a second launch with larger tiles takes these; each passes over what is the
other's. What each program works on, it finds itself (`attention_items`): nothing is read back.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from engine.kernels import reference
from engine.kernels.triton.attention_kernels import attend, merge
from engine.kernels.triton.devices import Device, device_of
from engine.kernels.triton.tiles import WIDEST_HEAD, Tiles, choose_tiles

LOG2_E = 1.4426950408889634
# A decode's keys are cut into as many splits as fill a device with one sequence of eight KV heads.
# A part is a float32 row of each query head, written and read: for four heads to a KV head 3 % of
# what 256 keys and values in two bytes are.
MAX_SPLITS = 16
SHORTEST_SPLIT = 256  # keys; below this a program's start costs more than what it reads
# Programs beyond those that fit at once are begun as others end, so that unequal ones even out;
# beyond this many, each takes several items in turn instead.
PROGRAMS_PER_PROCESSOR = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch of `attend`, and the room for parts of its sequences."""

    many: bool
    few: int  # tokens: sequences with no more are the one launch's, the rest the other's
    tiles: Tiles
    num_programs: int
    max_splits: int
    num_slots: int  # tokens that there is room for parts of


def paged_attention(
    query: Tensor,  # [T, H, D] float16, bfloat16 or float32; a token's heads may lie apart
    kv_cache: Tensor,  # [num_blocks, H_kv, 2, block_size, D] contiguous; of 8 bits [… D + 4]
    block_tables: Tensor,  # [N, max_blocks] int32, right-padded with anything
    cu_query_lens: Tensor,  # [N + 1] int32
    seq_lens: Tensor,  # [N] int32
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [H]
) -> Tensor:  # [T, H, D]
    """What `reference.paged_attention` computes; sources in `attention_kernels`.

    The cache may be int8, or float8_e4m3fn (from compute capability 8.9 on).

    Sequences without a query token are passed over, so that a batch may be padded with them. The
    products of float16 and bfloat16 are summed in float32, weights rounded to the query's type.
    """
    if query.shape[2] > WIDEST_HEAD:
        return reference.paged_attention(
            query, kv_cache, block_tables, cu_query_lens, seq_lens,
            scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks,
        )  # fmt: skip
    assert kv_cache.is_contiguous()
    if query.stride(2) != 1:
        query = query.contiguous()
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if len(query) == 0 or len(seq_lens) == 0:
        return out
    with torch.cuda.device_of(query):
        for launch in _launches(query, kv_cache, block_tables, device_of(query.device)):
            _run(
                launch, out, query, kv_cache, block_tables, cu_query_lens, seq_lens,
                scale, sliding_window, softcap, sinks,
            )  # fmt: skip
    return out


def _launches(
    query: Tensor, kv_cache: Tensor, block_tables: Tensor, device: Device
) -> list[Launch]:
    """What a step needs, judged by shapes alone: lengths are on the device."""
    num_tokens, num_heads, head_dim = query.shape
    num_sequences, max_keys = len(block_tables), block_tables.shape[1] * kv_cache.shape[3]
    num_kv_heads = kv_cache.shape[1]
    group = num_heads // num_kv_heads
    width = padded(head_dim)
    most_splits = min(MAX_SPLITS, -(-max_keys // SHORTEST_SPLIT))

    def tiles_for(*, many: bool) -> Tiles:
        scaled = kv_cache.itemsize == 1
        return choose_tiles(
            many=many, width=width, itemsize=query.itemsize, scaled=scaled, device=device
        )

    tiles = tiles_for(many=False)
    few = min(_few(num_tokens, num_sequences), tiles.rows // group)
    launches = []
    if few > 0:
        programs = num_sequences * most_splits * num_kv_heads
        launches.append(
            Launch(
                many=False,
                few=few,
                tiles=tiles,
                num_programs=min(programs, device.num_processors * PROGRAMS_PER_PROCESSOR),
                max_splits=most_splits,
                num_slots=num_sequences * few,
            )
        )
    if few == 0 or num_tokens > num_sequences:
        tiles = tiles_for(many=True)
        num_tiles = -(-num_tokens * group // tiles.rows)
        # only where tiles of rows leave processors idle: parts of many rows take much memory
        idle = 2 * device.num_processors // (num_tiles * num_kv_heads)
        splits = max(1, min(most_splits, idle))
        launches.append(
            Launch(
                many=True,
                few=few,
                tiles=tiles,
                num_programs=(num_tiles + num_sequences) * splits * num_kv_heads,
                max_splits=splits,
                num_slots=num_tokens,
            )
        )
    return launches


def _few(num_tokens: int, num_sequences: int) -> int:
    """Tokens of a sequence that the launch for few takes: 1 in all steps but of short guesses.

    There is room for parts of as many of every sequence, so that it has to be known without a look
    at the lengths, and must not grow with the chunks of prompts beside them.
    """
    return -(-num_tokens // num_sequences) if num_tokens <= 4 * num_sequences else 1


def _run(
    launch: Launch,
    out: Tensor,
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[1], kv_cache.shape[3]
    split = launch.max_splits > 1
    scaled = kv_cache.itemsize == 1
    parts = part_logs = out  # not looked at
    if split:
        shape = (launch.num_slots, num_heads, launch.max_splits)
        parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device)
        part_logs = torch.empty(shape, dtype=torch.float32, device=query.device)
    common = {
        "GROUP": num_heads // num_kv_heads,
        "D": head_dim,
        "WIDTH": padded(head_dim),
        "KEYS": launch.tiles.keys,
        "SHORTEST": SHORTEST_SPLIT,
        "WINDOW": sliding_window or 0,
        "MANY": launch.many,
    }
    attend[(launch.num_programs,)](
        out, parts, part_logs, query, kv_cache, block_tables, cu_query_lens, seq_lens,
        query if sinks is None else sinks,
        scales_of(kv_cache) if scaled else query,
        scale * (1 if softcap else LOG2_E),
        softcap or 0.0,
        query.stride(0), query.stride(1), block_tables.stride(0),
        len(seq_lens), launch.max_splits, launch.few,
        KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        ROWS=launch.tiles.rows,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        SCALED=scaled,
        SPLIT=split,
        num_warps=launch.tiles.num_warps,
        num_stages=launch.tiles.num_stages,
        **common,
    )  # fmt: skip
    if split:
        merge[(launch.num_slots, num_heads)](
            out, parts, part_logs, cu_query_lens, seq_lens,
            len(seq_lens), launch.max_splits, launch.few,
            HEADS=num_heads,
            SPLITS=MAX_SPLITS,
            num_warps=4,
            **common,
        )  # fmt: skip


def scales_of(
    kv_cache: Tensor,  # of 8 bits
) -> Tensor:  # [bytes / 4] float32
    """The same memory, as what stands behind the keys and values of each block."""
    return kv_cache.view(torch.int8).view(-1).view(torch.float32)


def padded(head_dim: int) -> int:
    """A power of two, and no less than the matrix units take."""
    return max(16, int(triton.next_power_of_2(head_dim)))
