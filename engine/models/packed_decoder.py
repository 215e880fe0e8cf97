"""The lean decoder on a CPU: the layers of `Decoder`, packed for compiled kernels.

Sizes that are no multiple of a panel's columns are filled up with zeros, which add nothing to any
sum. A layer is packed as soon as it is loaded, so that no model is held twice.
"""

import logging
import time
from collections.abc import Sequence

import numba
import numpy as np
import torch
from torch import Tensor

from engine.kernels.cpu import MAX_THREADS, stack, step
from engine.kernels.cpu.attention import tile_function
from engine.kernels.cpu.attention_plan import AttentionShape, Plan, Sequences, plan_attention
from engine.kernels.cpu.emit import PAIRS, PANEL
from engine.kernels.cpu.functions import address_of
from engine.kernels.cpu.int16 import int16_words, pack_int16
from engine.kernels.cpu.matmul import KINDS, ROWS_TOGETHER, pack, padded, stored_as
from engine.kernels.cpu.pairs import BY_AMX, pack_pairs, pair_words
from engine.kernels.cpu.quantize import pack_int8, quantized_words
from engine.kernels.cpu.tiles_amx import BLOCK
from engine.kernels.cpu.workers import run_side_by_side
from engine.kernels.memory import allocate
from engine.kernels.registry import REFERENCE
from engine.kv_cache import KVCache, KVCacheShape, LayerShape
from engine.layers.attention import AttentionMetadata
from engine.layers.linear import AnyLinear, Linear
from engine.layers.mlp import GatedMLP
from engine.models.decoder import (
    IGNORED,
    IGNORED_WHEN_TIED,
    DecoderLayer,
    DecoderLoader,
    capped,
    rotary_embeddings,
)
from engine.models.settings import DecoderSettings
from engine.weights import Checkpoint

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")


class PackedDecoder:
    """A `Model` whose step is one call."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: DecoderSettings,
        *,
        block_size: int,  # a multiple of 16
        weight_dtype: torch.dtype,  # float32, float16, bfloat16 or int8: how weights are kept
        in_pairs: bool = False,  # weights in 16 bits: inputs are rounded to that, too
        kv_in_pairs: bool = False,  # a bfloat16 cache: so are queries and what weighs values
        kv_dtype: torch.dtype,  # likewise keys and values
    ) -> None:
        """Raises a TensorError when the checkpoint and its settings disagree."""
        assert block_size % PANEL == 0
        assert settings.experts is None, "not computed here"
        s = settings
        self.vocab_size = s.vocab_size
        self.max_position_embeddings = s.max_position_embeddings
        self.rotary, self.local_rotary = rotary_embeddings(s, CPU)
        kv_kind = KINDS[kv_dtype]
        if kv_in_pairs:
            kv_kind = PAIRS
        unit = BLOCK if kv_kind == PAIRS and BY_AMX else PANEL
        head_dim = -(-s.head_dim // unit) * unit
        self.kv_layers = (
            LayerShape(num_kv_heads=s.num_kv_heads, head_dim=head_dim),
        ) * s.num_layers
        self.weight_dtype = weight_dtype
        self._in_pairs = in_pairs
        self._settings = s
        self._attention = AttentionShape(
            num_heads=s.num_heads,
            num_kv_heads=s.num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            kv_kind=kv_kind,
            kv_bytes=kv_dtype.itemsize,
            attend_tile=address_of(tile_function(kv_kind)),
        )
        self._held: list[Tensor] = []  # what addresses point to
        self._layers = np.zeros((s.num_layers, stack.NUM_COLUMNS), np.int64)
        self._table = np.zeros(step.TABLE_SIZE, np.int64)
        self._numbers = np.array([s.rms_norm_eps, s.attention_scale, s.embedding_scale], np.float32)
        self._fill_table()
        loader = DecoderLoader(checkpoint, s, torch.float32, CPU, REFERENCE, "unpacked")
        self._pack_all(loader)
        checkpoint.check_all_taken(IGNORED_WHEN_TIED if s.tie_word_embeddings else IGNORED)
        self._num_workers = _num_workers()
        self._capacity = 0  # tokens that the buffers hold
        self._buffers: dict[int, Tensor] = {}
        self._make_buffers(PANEL)
        self._warm_up(kv_dtype)

    @property
    def num_workers(self) -> int:
        """Threads of a step."""
        return self._num_workers

    @property
    def num_multiplied(self) -> int:
        """Weights that each token is multiplied by, but for those of its logits."""
        s = self._settings
        attention = 2 * (s.num_heads + s.num_kv_heads) * s.head_dim * s.hidden_size
        return s.num_layers * (attention + 3 * s.intermediate_size * s.hidden_size)

    @property
    def cost_key(self) -> dict[str, str | int]:
        """What the time of a step depends on, but for the machine and the KV cache's type."""
        s = self._settings
        return {
            "threads": self._num_workers,
            "weight_dtype": str(self.weight_dtype),
            "in_pairs": self._in_pairs,
            "kv_kind": self._attention.kv_kind,
            "block_size": self._attention.block_size,
            "num_layers": s.num_layers,
            "hidden_size": s.hidden_size,
            "intermediate_size": s.intermediate_size,
            "num_heads": s.num_heads,
            "num_kv_heads": s.num_kv_heads,
            "head_dim": s.head_dim,
            "vocab_size": s.vocab_size,
            "activation": s.activation,
            "sliding_window": min(filter(None, s.sliding_windows), default=0),
        }

    def forward(
        self,
        token_ids: Tensor,  # [T] int64, in [0, vocab)
        positions: Tensor,  # [T] int64, of each token in its own sequence
        metadata: AttentionMetadata,
        kv_caches: Sequence[Tensor],  # of each layer, changed
        logit_rows: Tensor,  # [R] int64: the tokens of the batch whose logits are wanted
    ) -> Tensor:  # [R, vocab] float32
        assert len(logit_rows) <= len(token_ids), "a row's logits are wanted once"
        if self._capacity < len(token_ids):
            self._make_buffers(len(token_ids))
        for row, cache in zip(self._layers, kv_caches, strict=True):
            row[stack.KV_CACHE] = cache.data_ptr()
        cos, sin = local_cos, local_sin = self.rotary(positions)
        if self.local_rotary is not self.rotary:
            local_cos, local_sin = self.local_rotary(positions)
        cu_query_lens, seq_lens = metadata.cu_query_lens.long(), metadata.seq_lens.long()
        tensors = {
            step.IDS: token_ids,
            step.COS: cos,
            step.SIN: sin,
            step.LOCAL_COS: local_cos,
            step.LOCAL_SIN: local_sin,
            step.SLOT_MAPPING: metadata.slot_mapping,
            step.WANTED: logit_rows,
            step.BLOCK_TABLES: metadata.block_tables.long(),
            step.CU_QUERY_LENS: cu_query_lens,
            step.SEQ_LENS: seq_lens,
            step.LOGITS: torch.empty((len(logit_rows), padded(self.vocab_size))),
            step.MEETING: torch.zeros(8, dtype=torch.int64),
            step.CURSORS: torch.zeros(len(self._layers), dtype=torch.int64),
        }
        table = self._table
        for column, tensor in tensors.items():
            assert tensor.is_contiguous()
            table[column] = tensor.data_ptr()
        table[step.NUM_TOKENS], table[step.NUM_WANTED] = len(token_ids), len(logit_rows)
        table[step.NUM_SEQUENCES], table[step.MAX_BLOCKS] = tensors[step.BLOCK_TABLES].shape
        sequences = Sequences(
            tensors[step.BLOCK_TABLES].numpy(), cu_query_lens.numpy(), seq_lens.numpy()
        )
        plan = plan_attention(sequences, self._attention, self._num_workers)
        self._put_plan(plan)
        numba.set_num_threads(self._num_workers)  # of the calling thread
        step.run_step(table)
        return capped(tensors[step.LOGITS][:, : self.vocab_size], self._settings.logit_softcap)

    def _put_plan(self, plan: Plan) -> None:
        table = self._table
        for column, array in {
            step.ORDER: plan.order,
            step.ITEMS: plan.items,
            step.MERGES: plan.merges,
            step.PIECES: plan.pieces,
            step.PARTIALS: plan.partials,
            step.SCRATCH: plan.scratch,
            step.PLACES: plan.places,
            step.PANELS: plan.panels,
        }.items():
            table[column] = array.ctypes.data
        table[step.NUM_ITEMS], table[step.NUM_MERGES] = len(plan.items), len(plan.merges)
        table[step.NUM_PIECES], table[step.NUM_PARTIALS] = len(plan.pieces), len(plan.partials)
        table[step.SCRATCH_SIZE] = plan.scratch.shape[1]

    def _fill_table(self) -> None:
        """What is the same in every step."""
        s, attention, table = self._settings, self._attention, self._table
        weights = stored_as(self.weight_dtype, in_pairs=self._in_pairs)
        gelu = s.activation == "gelu"
        width = max(attention.num_heads * attention.head_dim, padded(s.hidden_size))
        width = max(width, padded(s.intermediate_size))
        for column, number in {
            step.LAYERS: self._layers.ctypes.data,
            step.NUM_LAYERS: s.num_layers,
            step.NUMBERS: self._numbers.ctypes.data,
            step.HIDDEN_SIZE: s.hidden_size,
            step.MODEL_HEAD_DIM: s.head_dim,
            step.WEIGHT_KIND: weights.kind,
            step.PRODUCT: weights.product,
            step.ROTARY_HALF: s.rotary_dim // 2,
            step.HIDDEN_WIDTH: padded(s.hidden_size),
            step.GATED_WIDTH: padded(s.intermediate_size),
            step.GATE_UP_WIDTH: padded(s.intermediate_size) * (2 if gelu else 1),
            step.GELU: gelu,
            step.QUANTIZED_WIDTH: self._rounded_words(width),
            step.VOCAB_WIDTH: padded(s.vocab_size),
            step.NUM_HEADS: attention.num_heads,
            step.NUM_KV_HEADS: attention.num_kv_heads,
            step.HEAD_DIM: attention.head_dim,
            step.BLOCK_SIZE: attention.block_size,
            step.KV_KIND: attention.kv_kind,
            step.KV_BYTES: attention.kv_bytes,
            step.ATTEND_TILE: attention.attend_tile,
        }.items():
            table[column] = number

    def _make_buffers(self, num_tokens: int) -> None:
        """Room for the activations of so many tokens."""
        table, attention = self._table, self._attention
        num_parts = attention.num_heads + 2 * attention.num_kv_heads
        self._capacity = num_tokens
        self._buffers = {
            column: allocate((num_tokens, int(width)), torch.float32, CPU)
            for column, width in {
                step.RESIDUAL: table[step.HIDDEN_WIDTH],
                step.HIDDEN: table[step.HIDDEN_WIDTH],
                step.HEADS: num_parts * attention.head_dim,
                step.ATTENDED: attention.num_heads * attention.head_dim,
                # a panel more: rows a large power of two apart would meet in few lines of a cache
                step.GATED: table[step.GATE_UP_WIDTH] + PANEL,
                step.QUANTIZED: table[step.QUANTIZED_WIDTH],
            }.items()
        }
        self._buffers[step.TILES] = torch.empty((self._num_workers, ROWS_TOGETHER, 2, PANEL))
        for column, buffer in self._buffers.items():
            table[column] = buffer.data_ptr()
        table[step.NUM_WORKERS] = self._num_workers

    def _warm_up(self, kv_dtype: torch.dtype) -> None:
        """Compile what is not yet on disk: one token, in a cache of one block."""
        started = time.monotonic()
        first = torch.zeros(1, dtype=torch.int64)
        shape = KVCacheShape(
            layers=self.kv_layers, block_size=self._attention.block_size, dtype=kv_dtype
        )
        self.forward(
            first,
            first,
            AttentionMetadata(
                cu_query_lens=torch.tensor([0, 1], dtype=torch.int32),
                seq_lens=torch.ones(1, dtype=torch.int32),
                slot_mapping=first,
                block_tables=torch.zeros((1, 1), dtype=torch.int32),
            ),
            KVCache(shape, 1, CPU).layers,
            first,
        )
        logger.info("kernels ready: seconds=%.1f", time.monotonic() - started)

    def _pack_all(self, loader: DecoderLoader) -> None:
        s, table = self._settings, self._table
        for i, row in enumerate(self._layers):
            self._pack_layer(loader.layer(i), row)
            row[stack.WINDOW] = s.sliding_windows[i] or 0
        table[step.NORM] = self._keep(loader.norm("model.norm", s.hidden_size).weight)
        tokens = loader.tensor("model.embed_tokens.weight", s.vocab_size, s.hidden_size)
        table[step.EMBEDDING] = table[step.LM_HEAD] = self._pack(tokens)
        if not s.tie_word_embeddings:
            head = loader.tensor("lm_head.weight", s.vocab_size, s.hidden_size)
            table[step.LM_HEAD] = self._pack(head)

    def _pack_layer(self, layer: DecoderLayer, row: np.ndarray) -> None:
        s = self._settings
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(mlp, GatedMLP)
        head_dim, hidden_size = self._attention.head_dim, padded(s.hidden_size)
        row[stack.ATTENTION_NORM] = self._keep(layer.attention_norm.weight)
        row[stack.MLP_NORM] = self._keep(layer.mlp_norm.weight)
        if layer.attention_out_norm is not None and layer.mlp_out_norm is not None:
            row[stack.ATTENTION_OUT_NORM] = self._keep(layer.attention_out_norm.weight)
            row[stack.MLP_OUT_NORM] = self._keep(layer.mlp_out_norm.weight)
        if attention.query_norm is not None and attention.key_norm is not None:
            row[stack.QUERY_NORM] = self._keep(attention.query_norm.weight)
            row[stack.KEY_NORM] = self._keep(attention.key_norm.weight)
        num_parts = s.num_heads + 2 * s.num_kv_heads
        qkv, out, gate_up, down = map(_whole, (attention.qkv, attention.out, mlp.gate_up, mlp.down))
        row[stack.QKV] = self._pack(_fill_rows(qkv.weight, num_parts, head_dim))
        row[stack.QKV_BIAS] = self._keep_bias(qkv.bias, num_parts, head_dim)
        row[stack.OUT] = self._pack(_fill_rows(out.weight.T, s.num_heads, head_dim).T)
        row[stack.OUT_BIAS] = self._keep_bias(out.bias, 1, hidden_size)
        width = padded(s.intermediate_size)
        row[stack.GATE_UP] = self._pack(_fill_rows(gate_up.weight, 2, width))
        row[stack.GATE_UP_BIAS] = self._keep_bias(gate_up.bias, 2, width)
        row[stack.DOWN] = self._pack(_fill_rows(down.weight.T, 1, width).T)
        row[stack.DOWN_BIAS] = self._keep_bias(down.bias, 1, hidden_size)

    def _rounded_words(self, num_inputs: int) -> int:
        """float32's worth of memory for a row that is rounded before it is multiplied."""
        if self.weight_dtype == torch.int8:
            return int(quantized_words(num_inputs))
        if not self._in_pairs:
            return 1
        is_half = self.weight_dtype == torch.float16
        return int((int16_words if is_half else pair_words)(num_inputs))

    def _pack(self, weight: Tensor) -> int:
        if self._in_pairs:
            is_half = self.weight_dtype == torch.float16
            return self._keep((pack_int16 if is_half else pack_pairs)(weight))
        if self.weight_dtype == torch.int8:
            return self._keep(pack_int8(weight))
        return self._keep(pack(weight, self.weight_dtype))

    def _keep_bias(self, bias: Tensor | None, num_parts: int, size: int) -> int:
        return 0 if bias is None else self._keep(_fill_rows(bias, num_parts, size))

    def _keep(self, tensor: Tensor) -> int:
        tensor = tensor.contiguous()
        self._held.append(tensor)
        return tensor.data_ptr()


def _num_workers() -> int:
    """Threads for a step: torch's number, where so many do run side by side."""
    num_threads = min(torch.get_num_threads(), MAX_THREADS)
    numba.set_num_threads(num_threads)
    if num_threads > 1 and not run_side_by_side(num_threads):
        logger.warning("one thread in use: OpenMP does not run %d at once", num_threads)
        return 1
    return num_threads


def _whole(linear: AnyLinear) -> Linear:
    assert isinstance(linear, Linear), "the loader has unpacked it"
    return linear


def _fill_rows(
    tensor: Tensor,  # [num_parts × rows, …]
    num_parts: int,
    size: int,
) -> Tensor:  # [num_parts × size, …]
    """Each part's rows, filled up with zeros to `size`."""
    rows = tensor.shape[0] // num_parts
    if rows == size:
        return tensor
    filled = tensor.new_zeros(num_parts, size, *tensor.shape[1:])
    filled[:, :rows] = tensor.view(num_parts, rows, *tensor.shape[1:])
    return filled.flatten(0, 1)
