"""Checkpoints that are read, and the many that are refused, each by name."""

import json
import pickle
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from engine.weights import (
    Checkpoint,
    CheckpointNotFoundError,
    MalformedCheckpointError,
    MissingTensorError,
    OutsideFolderError,
    PickleCheckpointError,
    RemoteCodeError,
    TensorShapeError,
    UnexpectedTensorError,
    UnsupportedModelError,
    checkpoint_sha256,
    resolve_folder,
)

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tiny_llama_dir, tmp_path):
    """A checkpoint that the test may spoil."""
    return shutil.copytree(tiny_llama_dir, tmp_path / "checkpoint")


def load(folder):
    return ModelRunner(EngineConfig(model=str(folder), device="cpu", num_blocks=2))


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder, num_files=3):
    """The same checkpoint in several files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for i in range(num_files):
        name = f"model-{i + 1:05}-of-{num_files:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[i::num_files]}
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    change_index(folder, weight_map)
    return weight_map


def change_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_hold_the_same_model_as_one_file(folder, tiny_llama_dir):
    weight_map = shard(folder)
    with Checkpoint(tiny_llama_dir) as whole, Checkpoint(folder) as parts:
        for name, tensor in load_file(tiny_llama_dir / "model.safetensors").items():
            shape = tuple(tensor.shape)
            assert torch.equal(whole.take(name, shape), parts.take(name, shape))
        assert len(set(weight_map.values())) == 3
    load(folder)


def test_every_float_type_is_read(folder):
    def halve(tensors):
        for i, (name, tensor) in enumerate(tensors.items()):
            tensors[name] = tensor.to((torch.float16, torch.bfloat16)[i % 2])

    change_tensors(folder, halve)
    runner = load(folder)
    assert runner.kv_cache.layers[0].dtype == torch.float32


@pytest.mark.parametrize("form", [2, [2, 7]])
def test_end_ids_come_from_the_generation_config_then_from_the_config(folder, form):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": form}))
    change_config(folder, eos_token_id=9)
    assert load(folder).eos_token_ids == {2} | ({7} if form != 2 else set())
    (folder / "generation_config.json").unlink()
    assert load(folder).eos_token_ids == {9}


@pytest.fixture
def offline_hub(tmp_path, monkeypatch):
    """The hub's cache in a folder of the test's, and no network behind it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_hub_id_is_found_in_the_hubs_cache(offline_hub, folder):
    repository = offline_hub / "models--maker--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("1234")
    shutil.copytree(folder, repository / "snapshots" / "1234")
    assert resolve_folder("maker/tiny") == repository / "snapshots" / "1234"


def test_a_hub_id_that_cannot_be_had_is_named(offline_hub):
    with pytest.raises(CheckpointNotFoundError, match="maker/absent"):
        resolve_folder("maker/absent")


def test_a_missing_folder_or_file_is_named(folder, tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        resolve_folder(str(tmp_path / "nowhere"))
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"config\.json"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"model\.safetensors"):
        load(folder)


def test_a_missing_shard_is_named(folder):
    shard(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError, match="model-00002-of-00003"):
        load(folder)


def test_unknown_architectures_are_refused(folder):
    change_config(folder, architectures=["MambaForCausalLM"], model_type="mamba")
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM"):
        load(folder)


def test_the_type_of_a_checkpoint_is_that_of_most_numbers(folder):
    def halve(tensors):
        for name in tensors:
            if "norm" not in name:
                tensors[name] = tensors[name].bfloat16()
        tensors["mask"] = torch.ones(999, 999, dtype=torch.bool)

    with Checkpoint(folder) as checkpoint:
        assert checkpoint.dtype == torch.float32
    change_tensors(folder, halve)
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.dtype == torch.bfloat16
        assert checkpoint.take_all()["mask"].dtype == torch.bool


def test_a_missing_tensor_is_named(folder):
    change_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(MissingTensorError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_a_tensor_that_is_in_the_index_only_is_named(folder):
    weight_map = shard(folder)
    victim = "model.norm.weight"
    other = next(name for name in weight_map.values() if name != weight_map[victim])
    change_index(folder, weight_map | {victim: other})
    with pytest.raises(MissingTensorError, match=re.escape(victim)):
        load(folder)


def test_a_tensor_of_another_shape_is_named_with_both(folder):
    change_tensors(folder, lambda t: t.update({"model.norm.weight": torch.ones(65)}))
    with pytest.raises(TensorShapeError, match=r"model\.norm\.weight.*\[64\].*\[65\]"):
        load(folder)


def test_a_tensor_without_a_place_is_named(folder):
    bias = "model.layers.0.self_attn.q_proj.bias"
    change_tensors(folder, lambda tensors: tensors.update({bias: torch.ones(64)}))
    with pytest.raises(UnexpectedTensorError, match=re.escape(bias)):
        load(folder)


def test_buffers_of_old_checkpoints_are_passed_over(folder):
    old = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(folder, lambda tensors: tensors.update({old: torch.ones(8)}))
    load(folder)


def test_a_tensor_of_integers_is_refused(folder):
    change_tensors(
        folder, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    )
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight.*I8"):
        load(folder)


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickle_checkpoint_is_refused_unread(folder, tmp_path, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    with pytest.raises(PickleCheckpointError, match=re.escape(name)):
        load(folder)
    with pytest.raises(PickleCheckpointError, match=re.escape(name)):
        resolve_folder(str(folder / name))
    assert not (tmp_path / "canary").exists()


def test_a_pickle_beside_safetensors_is_left_alone(folder, tmp_path):
    (folder / "training_args.bin").write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    load(folder)
    assert not (tmp_path / "canary").exists()


def test_an_index_that_names_a_pickle_is_refused(folder, tmp_path):
    weight_map = shard(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    change_index(folder, weight_map | {"model.norm.weight": "pytorch_model.bin"})
    with pytest.raises(PickleCheckpointError, match=r"pytorch_model\.bin"):
        load(folder)
    assert not (tmp_path / "canary").exists()


def test_code_of_a_checkpoint_is_refused(folder, tmp_path):
    (folder / "modeling.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    change_config(folder, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    with pytest.raises(RemoteCodeError, match="auto_map"):
        load(folder)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("path", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", ""])
def test_an_index_with_paths_is_refused(folder, path):
    weight_map = shard(folder)
    save_file({"model.norm.weight": torch.ones(64)}, folder.parent / "outside.safetensors")
    change_index(folder, weight_map | {"model.norm.weight": path})
    with pytest.raises(OutsideFolderError, match=re.escape(repr(path))):
        load(folder)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "anything.txt"]
)
def test_a_link_out_of_the_folder_is_refused(folder, tmp_path, name):
    outside = tmp_path / "outside"
    outside.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)
    with pytest.raises(OutsideFolderError, match=re.escape(name)):
        load(folder)


def test_links_of_the_hub_cache_lead_to_its_own_blobs(folder, tmp_path):
    blobs, snapshot = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/1234"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        shutil.copy(path, blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    load(snapshot)
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(folder / "config.json")
    with pytest.raises(OutsideFolderError, match=r"config\.json"):
        load(snapshot)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("config.json", b"[" * 100_000),
        ("config.json", b"\xff\xfe"),
        ("generation_config.json", b'{"eos_token_id": "2"}'),
        ("model.safetensors", b""),
        ("model.safetensors", b"\xff" * 100),
        (INDEX, b"{}"),
        (INDEX, b'{"weight_map": {"model.norm.weight": 5}}'),
    ],
)
def test_a_file_that_cannot_be_understood_is_named(folder, name, content):
    (folder / name).write_bytes(content)
    with pytest.raises(MalformedCheckpointError, match=re.escape(name.removesuffix(".json"))):
        _ = load(folder).eos_token_ids


def test_a_changed_weight_changes_the_fingerprint_and_the_sum(folder, tiny_llama_dir):
    def nudge(tensors):
        tensors["model.norm.weight"][5] += 1

    def both():
        with Checkpoint(folder) as checkpoint:
            return checkpoint.fingerprint, checkpoint_sha256(folder)

    before = both()
    assert before == both()
    change_tensors(folder, nudge)
    assert all(a != b for a, b in zip(before, both(), strict=True))
    assert before[1] == checkpoint_sha256(tiny_llama_dir)
