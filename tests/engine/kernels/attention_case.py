"""Attention by compiled CPU kernels, and what it should be by float64."""

import numpy as np
import torch

from engine.kernels.cpu import MAX_THREADS
from engine.kernels.cpu.attention import Scores, attend_all, tile_function
from engine.kernels.cpu.attention_plan import AttentionShape, Sequences, plan_attention
from engine.kernels.cpu.emit import PAIRS
from engine.kernels.cpu.kv_blocks import store_token
from engine.kernels.cpu.matmul import KINDS
from engine.kernels.cpu.tiles_amx import BLOCK
from engine.kv_cache import KVCache, KVCacheShape, LayerShape

WORKERS = min(2, MAX_THREADS)
NO_SINKS = np.empty(0, np.float32)


def kept(x, dtype):
    """What a cache of this type makes of keys or values [..., D], in float64."""
    if dtype != torch.int8:
        return x.to(dtype).double()
    largest = x.abs().amax(-1, keepdim=True)
    factor = torch.tensor(127.0) / largest  # torch takes a number by way of the reciprocal
    return (x * factor).round().double() * (largest / 127).double()


class Case:
    """Random sequences in a cache whose free slots are NaN, attended to by compiled kernels."""

    def __init__(self, query_lens, seq_lens, *, shape, dtype, seed, in_pairs=False):
        torch.manual_seed(seed)
        heads, kv_heads, dim, block_size = shape
        if in_pairs:
            dim = -(-dim // BLOCK) * BLOCK
        kind = PAIRS if in_pairs else KINDS[dtype]
        self.in_pairs = in_pairs
        self.shape = AttentionShape(
            heads, kv_heads, dim, block_size, kind, dtype.itemsize, tile_function(kind).address
        )
        counts = [-(-length // block_size) for length in seq_lens]
        order = torch.randperm(sum(counts) + 3).split([*counts, 3])
        self.tables = np.full((len(seq_lens), max(counts) + 1), 2**31 - 1, np.int64)
        for table, blocks in zip(self.tables, order[:-1], strict=True):
            table[: len(blocks)] = blocks.numpy()
        layers = (LayerShape(num_kv_heads=kv_heads, head_dim=dim),)
        pool = KVCacheShape(layers=layers, block_size=block_size, dtype=dtype)
        [self.cache] = KVCache(pool, sum(counts) + 3, torch.device("cpu")).layers
        # in 8 bits that makes each scale's bits ones: no number either
        self.cache.fill_(-1 if dtype == torch.int8 else torch.nan)
        self.given = []  # keys and values of each sequence, in float64
        self.held = []  # and as the cache keeps them
        self.seq_lens, self.query_lens = list(seq_lens), list(query_lens)
        self.queries = [torch.randn(length, heads, dim) for length in seq_lens]
        for n, length in enumerate(seq_lens):
            at = torch.arange(length)
            slots = torch.from_numpy(self.tables[n])[at // block_size] * block_size
            slots += at % block_size
            key, value = torch.randn(2, length, kv_heads, dim)
            self.given.append((key.double(), value.double()))
            self.held.append((kept(key, dtype), kept(value, dtype)))
            for t, slot in enumerate(slots.tolist()):
                for h in range(kv_heads):
                    self.store(slot, h, key[t, h], value[t, h])

    def store(self, slot, head, key, value):
        store_token(self.cache.data_ptr(), slot, head, key.numpy(), value.numpy(), self.shape)

    def let_begin_alike(self, n, other, num_blocks):
        """Have a sequence begin with another's blocks."""
        self.tables[n, :num_blocks] = self.tables[other, :num_blocks]
        count = num_blocks * self.shape.block_size
        for own, given in zip(self.held[n], self.held[other], strict=True):
            own[:count] = given[:count]

    def attend(self, rows=None, query_lens=None, workers=WORKERS, **scores):
        """Of some of the sequences, in a step of their own; their last query tokens.

        Returns what the kernels make, what they should, and by how much they may be off.
        """
        rows = list(range(len(self.seq_lens))) if rows is None else rows
        query_lens = [self.query_lens[n] for n in rows] if query_lens is None else query_lens
        query = torch.cat([self.queries[n][-q:] for n, q in zip(rows, query_lens, strict=True)])
        out = torch.full_like(query, torch.nan)
        cu = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int64)
        lengths = np.array([self.seq_lens[n] for n in rows], np.int64)
        sinks = scores.get("sinks")
        sequences = Sequences(self.tables[rows], cu, lengths)
        attend_all(
            query.numpy(),
            out.numpy(),
            self.cache.data_ptr(),
            sequences,
            self.shape,
            Scores(
                scale=np.float32(0.2),
                window=scores.get("window") or 0,
                softcap=np.float32(scores.get("softcap") or 0.0),
                sinks=NO_SINKS if sinks is None else sinks.numpy(),
            ),
            plan_attention(sequences, self.shape, workers),
        )
        parts = zip(query.double().split(query_lens), rows, strict=True)
        made = [self.expected(part, n, **scores) for part, n in parts]
        expected, magnitude = (torch.cat(each) for each in zip(*made, strict=True))
        # scores are sums of up to 96 products: in float32 they may be off by some 2e-6
        bound = 3e-6 + 1e-5 * expected.abs() + 5e-6 * magnitude
        if self.in_pairs:  # weights are rounded to 8 bits, and are powers to 1e-4
            bound += (2**-8 + 2e-4) * magnitude
        return out, expected, bound

    def expected(self, query, n, *, window=None, softcap=None, sinks=None):
        """Of one sequence's last tokens, in float64; and the same of the values' sizes."""
        key, value = self.held[n]
        if self.in_pairs:
            query = query.bfloat16().double()
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * 0.2
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        place, at = torch.arange(len(key))[-len(query) :, None], torch.arange(len(key))
        hidden = at > place
        if window is not None:
            hidden |= at <= place - window
        weights = scores.masked_fill(hidden, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + sinks.double().exp()[:, None, None]
        return [torch.einsum("hqk,khd->qhd", weights / total, x) for x in (value, value.abs())]


def assert_near(found, expected, bound):
    off = (found.double() - expected).abs()
    assert (off <= bound).all(), f"{(off / bound).max():.2f} times what it may be off"
