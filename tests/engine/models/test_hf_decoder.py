"""Tier 2: each family of transformers on our cache gives transformers' own logits and tokens."""

import json
import socket

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, GenerationConfig
from transformers.models.mistral import modeling_mistral

from engine.models import hf_guard
from engine.models.decoder import Decoder
from engine.models.hf_decoder import HFDecoder
from engine.sampling_params import SamplingParams
from engine.step_plan import ScheduledSequence
from engine.weights import (
    MissingTensorError,
    TensorShapeError,
    UnexpectedTensorError,
    UnsupportedModelError,
)
from tests.engine.models.beams import check_beams
from tests.engine.models.equality import (
    a_runner,
    a_scheduler,
    a_sequence,
    check_logits_in_any_packing,
    logits_of,
    prompts,
    run_all,
)
from tests.engine.models.families import (
    MIXED,
    REASONS,
    REFUSED,
    TEXT_PARTS,
    TIER_2,
    build,
    build_with_vision,
    write,
    write_config,
)

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 6


@pytest.fixture(autouse=True, scope="module")
def offline():
    """A socket opened while a model is loaded fails the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", _no_network)
        yield


def _no_network(*_args):
    raise AssertionError("a model reached for the network")


@pytest.fixture(scope="module", params=TIER_2)
def models(request, tmp_path_factory):
    """The same model in transformers and here."""
    folder = tmp_path_factory.mktemp("checkpoint")
    expected = write(request.param, folder, **TIER_2[request.param])
    runner = a_runner(folder)
    assert isinstance(runner._model, HFDecoder)
    return expected, runner


def test_logits_equal_transformers_in_any_packing(models):
    check_logits_in_any_packing(*models, largest_chunk=13)


def test_greedy_tokens_equal_generate_while_sequences_are_preempted(models):
    model, runner = models
    *_, short, _, long = prompts(3)
    texts = [short, long[:17], long[:29]]  # two share a prefix
    scheduler = a_scheduler(runner, num_blocks=15, max_num_batched_tokens=16)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    sequences = [scheduler.add(str(n), t, params, seed=0)[0] for n, t in enumerate(texts)]
    run_all(scheduler, runner)
    assert scheduler.num_preemptions > 0
    greedy = GenerationConfig(
        max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    for sequence, text in zip(sequences, texts, strict=True):
        prompt = torch.tensor([text])
        made = model.generate(prompt, greedy, attention_mask=torch.ones_like(prompt))
        assert sequence.generated_ids == made[0, len(text) :].tolist()


def test_beams_find_the_texts_that_transformers_finds(models):
    check_beams(*models)


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_keeps_state_elsewhere_is_refused_by_name(model_type, tmp_path):
    changes, reason = REFUSED[model_type]
    name = write_config(model_type, tmp_path, **changes)
    message = f"{name} cannot be served: .*{REASONS[reason]}"
    with pytest.raises(UnsupportedModelError, match=message):
        a_runner(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2Model"]}, "GPT2Model"),
        ({"architectures": ["NoSuchForCausalLM"]}, "NoSuchForCausalLM"),
        ({"model_type": "no_such"}, "GPT2LMHeadModel.*no_such"),
        ({"model_type": "gemma2"}, "GPT2LMHeadModel.*gemma2"),
        ({"n_layer": "three"}, "GPT2LMHeadModel.*n_layer.*three"),
        ({"quantization_config": {"quant_method": "gptq"}}, "few bits.*GPT2LMHeadModel"),
    ],
)
def test_what_transformers_does_not_take_is_refused_by_name(changes, named, tmp_path):
    write_config("gpt2", tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(UnsupportedModelError, match=named):
        a_runner(tmp_path)


def own_attention(_real, own):
    return own


def two_calls(real, _own):
    def attend(*args, **kwargs):
        real(*args, **kwargs)
        return real(*args, **kwargs)

    return attend


def untold_window(real, _own):
    def attend(*args, sliding_window=None, **kwargs):
        return real(*args, **kwargs)

    return attend


def bias_in_the_mask(real, _own):
    def attend(module, query, key, value, mask, **kwargs):
        if mask is not None:
            mask = mask - torch.arange(mask.shape[-1], dtype=mask.dtype)
        return real(module, query, key, value, mask, **kwargs)

    return attend


def state_between_steps(real, _own):
    def attend(module, query, key, value, mask, **kwargs):
        value = value + getattr(module, "kept", 0)
        module.kept = value[:, :, -1:]
        return real(module, query, key, value, mask, **kwargs)

    return attend


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (own_attention, "must ask.* 0 calls"),
        (two_calls, "must ask.* 4 calls"),
        (untold_window, "differ"),
        (bias_in_the_mask, "differ"),
        (state_between_steps, "differ"),
    ],
)
def test_the_guard_sees_what_goes_past_the_hook(fault, reason, monkeypatch):
    class FaultyInterface:
        def get_interface(self, name, own):
            return fault(AttentionInterface().get_interface(name, own), own)

    model = build("mistral")
    hf_guard.check_class(type(model), model.config)
    monkeypatch.setattr(modeling_mistral, "ALL_ATTENTION_FUNCTIONS", FaultyInterface())
    with pytest.raises(UnsupportedModelError, match=reason):
        hf_guard.check_class(type(model), model.config)


def test_the_guard_s_copy_has_a_layer_of_each_kind_and_the_model_s_own_heads():
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = build("gemma3_text", num_hidden_layers=12, layer_types=kinds * 2).config
    small = hf_guard.miniature(config)
    assert small.layer_types == ["sliding_attention", "full_attention", "full_attention"]
    assert (small.hidden_size, small.num_attention_heads, small.head_dim) == (48, 6, 8)
    assert small.sliding_window < min(hf_guard.LENGTHS)


def remove(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]


def add(tensors):
    tensors["model.layers.1.self_attn.sinks"] = torch.zeros(6)


def cut(tensors):
    tensors["model.norm.weight"] = torch.zeros(40)


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (remove, MissingTensorError, "layers.1.mlp.up_proj.weight"),
        (add, UnexpectedTensorError, "layers.1.self_attn.sinks"),
        (cut, TensorShapeError, "model.norm.weight"),
    ],
)
def test_a_checkpoint_with_other_tensors_is_refused(change, error, named, tmp_path):
    write("gemma2", tmp_path)
    change_tensors(tmp_path, change)
    with pytest.raises(error, match=named):
        a_runner(tmp_path)


def test_the_weights_are_off_the_file_and_a_tied_matrix_is_held_once(tmp_path):
    model = write("gemma2", tmp_path)
    change_tensors(tmp_path, lambda t: t.update({"lm_head.weight": model.lm_head.weight.clone()}))
    runner = a_runner(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    (tmp_path / "model.safetensors").write_bytes(b"\0" * size)
    check_logits_in_any_packing(model, runner, largest_chunk=50)
    loaded = runner._model._model
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()


def without_prefix(tensors):
    for name in list(tensors):
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)


def with_buffers(tensors):
    prefix = "gpt_neox.layers.1.attention"
    tensors[f"{prefix}.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    tensors[f"{prefix}.masked_bias"] = torch.tensor(-1e9)
    tensors[f"{prefix}.rotary_emb.inv_freq"] = torch.ones(2)


@pytest.mark.parametrize(
    ("model_type", "change"), [("gpt2", without_prefix), ("gpt_neox", with_buffers)]
)
def test_checkpoints_as_they_were_once_written_are_read(model_type, change, tmp_path):
    model = write(model_type, tmp_path)
    change_tensors(tmp_path, change)
    check_logits_in_any_packing(model, a_runner(tmp_path), largest_chunk=50)


def test_half_precision_gives_nearly_the_same_logits(tmp_path):
    model = write("gpt_oss", tmp_path, initializer_range=0.05)
    sequence = a_sequence(0, list(range(12)))
    sequence.token_ids = prompts(0)[-1]
    expected = logits_of(model, sequence.token_ids)[-1]
    runner = a_runner(tmp_path, dtype="bfloat16")
    assert {layer.dtype for layer in runner.kv_cache.layers} == {torch.bfloat16}
    found = runner.logits([ScheduledSequence(sequence, sequence.num_tokens)])
    assert found.dtype == torch.float32
    assert 0 < (found - expected).abs().max() < 0.1 * expected.std()


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"hidden_act": "gelu"}),
        ("mistral", {"layer_types": MIXED}),
        ("gemma3_text", {"layer_types": MIXED, "attn_logit_softcapping": 2.0}),
        ("qwen3_moe", {"hidden_act": "gelu"}),
    ],
)
def test_what_the_lean_decoder_does_not_express_of_its_families_is_run_too(
    model_type, changes, tmp_path
):
    model = write(model_type, tmp_path, **changes)
    runner = a_runner(tmp_path)
    assert isinstance(runner._model, HFDecoder)
    check_logits_in_any_packing(model, runner, largest_chunk=13)


@pytest.mark.parametrize("model_type", TEXT_PARTS)
def test_a_model_of_images_is_its_decoder_on_text(model_type, tmp_path):
    model = build_with_vision(model_type)
    model.save_pretrained(tmp_path)
    runner = a_runner(tmp_path)
    lean = model_type != "gemma4"
    assert isinstance(runner._model, Decoder if lean else HFDecoder)
    check_logits_in_any_packing(model, runner, largest_chunk=13)


def test_a_model_of_images_that_is_not_known_is_refused(tmp_path):
    write_config("gpt2", tmp_path)
    change_config(tmp_path, architectures=["Paligemma"], model_type="paligemma", text_config={})
    with pytest.raises(UnsupportedModelError, match=r"Paligemma is more.* gemma3, .*'paligemma'"):
        a_runner(tmp_path)


def test_a_sequence_may_not_grow_past_the_length_where_all_angles_change(tmp_path):
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    write("olmo", tmp_path, rope_parameters=longrope | factors)
    assert a_runner(tmp_path).max_model_len == 64
