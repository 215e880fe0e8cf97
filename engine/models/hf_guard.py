"""Whether a decoder of transformers may run on the paged cache. Most fail silently where not.

A class may keep state that no cache block holds (recurrent layers), compute its attention where the
hook does not reach (old code, position biases), or draw its own mask (chunks). So before a model is
loaded, a small copy of it with random weights must give the same logits packed, in chunks and over
a paged cache, as transformers gives for each sequence alone.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from engine.kernels.registry import REFERENCE
from engine.kv_cache import KVCache, KVCacheShape, LayerShape
from engine.layers.attention import AttentionMetadata
from engine.models.config_values import in_one_line
from engine.models.hf_attention import NAME, PagedStep, Survey, attention_of
from engine.weights import UnsupportedModelError

LAYER_TYPES = ("full_attention", "sliding_attention")
# what makes a model large, and what is enough of it here
WIDTHS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "ffn_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
WIDTH, NUM_EXPERTS, VOCAB_SIZE, WINDOW = 64, 16, 96, 5
LENGTHS = (19, 11)  # of two sequences, longer than the window
CUTS = ((7, 3), (19, 4), (19, 11))  # tokens of each that are computed after each step
BLOCK_SIZE = 4
TOLERANCE = 1e-3  # of the logits' own spread; float32 sums in another order differ by some 1e-6


def check_class(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Raises UnsupportedModelError with the reason why this model may not be served."""
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in LAYER_TYPES:
            raise UnsupportedModelError(
                f"layer type {kind!r} does not keep its state in a paged cache; "
                f"known are {', '.join(LAYER_TYPES)}"
            )
    with torch.random.fork_rng(devices=()), torch.inference_mode():
        torch.manual_seed(0)
        try:
            model = model_class(miniature(config)).train(False)
        except Exception as error:
            # each class has its own errors for settings that it does not take
            raise UnsupportedModelError(
                f"a small copy of it could not be made: {in_one_line(error)}"
            ) from error
        for parameter in model.parameters():
            # norms and biases begin as 1 and 0, and would hide that they are left out
            if parameter.dim() == 1:
                parameter += torch.randn_like(parameter) * 0.1
        tokens = [torch.randint(VOCAB_SIZE, (length,)) for length in LENGTHS]
        for row in tokens:
            row[2] = 0  # the token that pads, where there is one: here it is a token like others
        try:
            model.set_attn_implementation("eager")
            expected = [
                model(input_ids=row.unsqueeze(0), use_cache=False).logits[0] for row in tokens
            ]
            layers = survey(model)
            found = _packed_logits(model, layers, tokens)
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"a small copy of it does not run: {in_one_line(error)}"
            ) from error
    difference = max(
        float((ours - theirs).abs().max()) for ours, theirs in zip(found, expected, strict=True)
    )
    spread = float(torch.cat(expected).std())
    if not difference <= TOLERANCE * spread:
        raise UnsupportedModelError(
            "its logits over a paged cache differ from transformers' own, by "
            f"{difference / spread:.2g} of their spread: it keeps or hides something from attention"
        )


def survey(model: PreTrainedModel) -> tuple[LayerShape, ...]:
    """What each layer keeps of a token, from a step of one token.

    Raises UnsupportedModelError unless every layer asks for attention exactly once.
    """
    model.set_attn_implementation(NAME)
    step = Survey()
    first = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.inference_mode(), attention_of(step):
        model(input_ids=first, position_ids=first, use_cache=False)
    calls = sorted(step.calls, key=lambda call: call[0])
    num_layers = model.config.get_text_config().num_hidden_layers
    asked = [layer for layer, _ in calls]
    if asked != list(range(num_layers)):
        raise UnsupportedModelError(
            f"each of its {num_layers} layers must ask transformers' attention interface once in a "
            f"step, but {len(asked)} calls came, from layers {sorted(set(asked))}"
        )
    return tuple(shape for _, shape in calls)


def _packed_logits(
    model: PreTrainedModel, layers: tuple[LayerShape, ...], tokens: list[Tensor]
) -> list[Tensor]:  # [length, vocab] of each sequence
    """All tokens of all sequences in a few steps, over blocks that are scattered."""
    max_blocks = -(-max(LENGTHS) // BLOCK_SIZE)
    shape = KVCacheShape(layers=layers, block_size=BLOCK_SIZE, dtype=torch.float32)
    cache = KVCache(shape, len(tokens) * max_blocks, torch.device("cpu"))
    tables = torch.randperm(cache.num_blocks).view(len(tokens), max_blocks)
    logits: list[list[Tensor]] = [[] for _ in tokens]
    before = (0,) * len(tokens)
    for after in CUTS:
        rows = [n for n in range(len(tokens)) if after[n] > before[n]]
        places = [torch.arange(before[n], after[n]) for n in rows]
        slots = [
            tables[n, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
            for n, at in zip(rows, places, strict=True)
        ]
        counts = [len(at) for at in places]
        step = PagedStep(
            metadata=AttentionMetadata(
                cu_query_lens=torch.tensor([0, *counts]).cumsum(0),
                seq_lens=torch.tensor([after[n] for n in rows]),
                slot_mapping=torch.cat(slots),
                block_tables=tables[rows],
            ),
            kv_caches=cache.layers,
            kernels=REFERENCE,
        )
        with attention_of(step):
            out = model(
                input_ids=torch.cat([tokens[n][before[n] : after[n]] for n in rows])[None],
                position_ids=torch.cat(places)[None],
                use_cache=False,
                logits_to_keep=torch.arange(sum(counts)),
            )
        for n, part in zip(rows, out.logits[0].split(counts), strict=True):
            logits[n].append(part)
        before = after
    return [torch.cat(parts) for parts in logits]


def miniature(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same model with few layers, one of each kind, few tokens and narrow feed-forwards.

    Heads and hidden size stay: they decide the shapes that attention sees.
    """
    full = config.to_dict()
    names = config.attribute_map
    num_layers = config.num_hidden_layers
    per_layer = {
        key: value
        for key, value in full.items()
        if isinstance(value, list) and len(value) == num_layers
    }
    overrides = {int(i): value for i, value in (full.get("per_layer_config") or {}).items()}
    kinds: dict[str, int] = {}
    for i in range(num_layers):
        kinds.setdefault(repr([overrides.get(i), *(v[i] for v in per_layer.values())]), i)
    kept = sorted({*kinds.values(), 0, num_layers - 1})
    small: dict[str, Any] = {key: [value[i] for i in kept] for key, value in per_layer.items()}
    if overrides:
        small["per_layer_config"] = {n: overrides.get(i, {}) for n, i in enumerate(kept)}
    small[names.get("num_hidden_layers", "num_hidden_layers")] = len(kept)
    small |= _at_most(full, [key for key in full if key.endswith(WIDTHS)], WIDTH)
    small |= _at_most(full, EXPERTS, NUM_EXPERTS)
    small |= _at_most(full, [key for key in full if key.startswith("vocab_size")], VOCAB_SIZE)
    small |= _at_most(full, ("first_k_dense_replace",), 1)
    small |= _at_most(full, ("pad_token_id", "num_kv_shared_layers"), 0)
    longest = getattr(config, "max_position_embeddings", math.inf)
    if (full.get("sliding_window") or math.inf) < longest:
        small["sliding_window"] = WINDOW
    small |= {"initializer_range": config.hidden_size**-0.5, "dtype": "float32"}
    return type(config).from_dict(full | small)


def _at_most(config: Mapping[str, Any], names: Iterable[str], bound: int) -> dict[str, int]:
    return {name: min(config[name], bound) for name in names if isinstance(config.get(name), int)}
