"""GGUF files: the numbers they stand for, written once, the same bytes each time."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.config import EngineConfig
from engine.gguf import GGUFError, convert_gguf
from engine.model_runner import ModelRunner
from engine.weights import CheckpointNotFoundError, MalformedCheckpointError, resolve_folder
from tests import tiny_llama as tiny

pytestmark = pytest.mark.usefixtures("one_thread")

HALF = tiny.HEAD_DIM // 2


def interleaved(weight, num_heads):
    """Rows of a query or key projection in GGUF's order, where a rotated pair lies together."""
    return weight.reshape(num_heads, 2, HALF, -1).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def written(tiny_llama_dir, tmp_path_factory):
    """A GGUF file of the tiny model, half of it in Q8_0, and the numbers that it stands for."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf"
    tokenizer = json.loads((tiny_llama_dir / "tokenizer.json").read_text())["model"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Tiny")
    writer.add_context_length(tiny.MAX_MODEL_LEN)
    writer.add_embedding_length(tiny.HIDDEN_SIZE)
    writer.add_block_count(tiny.NUM_LAYERS)
    writer.add_feed_forward_length(tiny.INTERMEDIATE_SIZE)
    writer.add_head_count(tiny.NUM_HEADS)
    writer.add_head_count_kv(tiny.NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(tiny.VOCAB_SIZE)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(tokenizer["vocab"], key=tokenizer["vocab"].get))
    writer.add_token_types(
        [gguf.TokenType.CONTROL if i < 3 else gguf.TokenType.NORMAL for i in range(384)]
    )
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, tiny.NUM_LAYERS)
    expected = {}
    for name, tensor in load_file(tiny_llama_dir / "model.safetensors").items():
        weight = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            weight = interleaved(weight, tiny.NUM_HEADS if "q_proj" in name else tiny.NUM_KV_HEADS)
        kind = gguf.GGMLQuantizationType.F32
        if weight.ndim == 2 and "mlp" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
        stored = gguf.quants.quantize(weight, kind)
        expected[name] = tensor
        if kind is not gguf.GGMLQuantizationType.F32:
            expected[name] = torch.from_numpy(gguf.quants.dequantize(stored, kind).copy())
            assert not torch.equal(expected[name], tensor)
        short = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(f"{short}", np.ascontiguousarray(stored), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, expected


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_conversion_has_the_files_numbers_and_the_same_bytes_each_time(written, tmp_path):
    path, expected = written
    convert_gguf(path, tmp_path / "first")
    convert_gguf(path, tmp_path / "sub" / "second")
    assert contents(tmp_path / "first") == contents(tmp_path / "sub" / "second")
    found = load_file(tmp_path / "first" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], tensor), name
    assert {p.name for p in tmp_path.iterdir()} == {"first", "sub"}
    config = json.loads((tmp_path / "first" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert not config.keys() & {"quantization_config", "_model_name_or_path", "_name_or_path"}
    assert (tmp_path / "first" / "tokenizer.json").exists()


def test_a_gguf_file_is_a_model_of_its_own_converted_once(written):
    path, _ = written
    runner = ModelRunner(EngineConfig(model=str(path), device="cpu", num_blocks=4))
    assert runner.eos_token_ids == {2}
    assert runner.vocab_size == tiny.VOCAB_SIZE
    folder = resolve_folder(str(path))
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert resolve_folder(str(path)) == folder
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == before


@pytest.mark.parametrize("damage", ["not gguf", "cut short", "other architecture"])
def test_what_is_not_a_model_leaves_nothing_behind(written, tmp_path, damage):
    path = tmp_path / "broken.gguf"
    content = written[0].read_bytes()
    if damage == "not gguf":
        content = b"PK\x03\x04" + content
    elif damage == "cut short":
        content = content[:200]
    else:
        content = content.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0wrong")
    path.write_bytes(content)
    with pytest.raises(GGUFError, match=r"broken\.gguf"):
        convert_gguf(path, tmp_path / "out")
    with pytest.raises(MalformedCheckpointError, match=r"broken\.gguf"):
        resolve_folder(str(path))
    assert [p.name for p in tmp_path.iterdir()] == ["broken.gguf"]


def test_another_kind_of_file_is_refused(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(CheckpointNotFoundError, match=r"model\.onnx"):
        resolve_folder(str(tmp_path / "model.onnx"))
