"""Whatever somebody put into a checkpoint folder, its readers name the file and the key."""

import json
import os
import re
import shutil

import pytest

from engine.chat_template import ChatTemplateError
from engine.checkpoint_files import MAX_SHOWN, fingerprint, shown
from engine.tokenizer import Tokenizer
from engine.tokenizer_files import TokenizerError
from engine.weights import Checkpoint, CheckpointError, OutsideFolderError, resolve_folder
from tests.engine.tokenizers_on_disk import byte_level, write

CONFIG, TOKENIZER, GENERATION = "config.json", "tokenizer_config.json", "generation_config.json"
TEMPLATE, MORE = "chat_template.jinja", "additional_chat_templates"


@pytest.fixture
def folder(tmp_path, tiny_llama_dir):
    return shutil.copytree(tiny_llama_dir, tmp_path / "model")


def change(folder, name, **values):
    path = folder / name
    read = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(read | values))


# -- links

PLACES = [CONFIG, TOKENIZER, GENERATION, "tokenizer.json", TEMPLATE, "model.safetensors", "notes"]
PLACES += [f"{MORE}/default.jinja", f"{MORE}/tool_use.jinja", f"{MORE}/deep/er/any.txt", MORE]


@pytest.mark.parametrize("how", ["file", "loop", "nowhere"])
@pytest.mark.parametrize("place", PLACES)
def test_a_link_out_of_the_folder_is_refused_by_every_reader_at_any_depth(
    folder, tmp_path, place, how
):
    secret = tmp_path / "secret"
    secret.write_text('{"API_KEY": "s3cr3t"}')
    path = folder / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to({"file": secret, "loop": path.name, "nowhere": tmp_path / "no"}[how])
    for read, error in (
        (Tokenizer.load, TokenizerError),
        (Checkpoint, OutsideFolderError),
        (lambda folder: resolve_folder(str(folder)), OutsideFolderError),
    ):
        with pytest.raises(error, match=re.escape(str(path))) as refused:
            read(folder)
        assert "s3cr3t" not in str(refused.value)


def test_a_folder_behind_a_link_is_out_of_the_folder_too(folder, tmp_path):
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "default.jinja").write_text("s3cr3t")
    (folder / MORE).symlink_to(tmp_path / "others")
    with pytest.raises(TokenizerError, match=MORE):
        Tokenizer.load(folder)


def test_links_within_the_folder_and_into_the_hubs_blobs_are_followed(folder, tmp_path):
    (folder / MORE).mkdir()
    (folder / "real.jinja").write_text("{{ messages[0].content }}")
    (folder / MORE / "default.jinja").symlink_to("../real.jinja")
    chat = [{"role": "user", "content": "the"}]
    expected = Tokenizer.load(folder).encode("the")
    assert Tokenizer.load(folder).encode_chat(chat)[-1] == expected[-1]
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / "1"
    (snapshot / MORE).mkdir(parents=True)
    (repository / "blobs").mkdir()
    for path in folder.iterdir():
        if path.is_file():
            shutil.copy(path, repository / "blobs" / path.name)
            (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    (snapshot / MORE / "default.jinja").symlink_to("../../../blobs/real.jinja")
    assert Tokenizer.load(snapshot).encode_chat(chat) == Tokenizer.load(folder).encode_chat(chat)
    Checkpoint(snapshot)


# -- files of another form

RAW = [
    (CONFIG, b"[" * 200_000, "nested too deep"),
    (TOKENIZER, b"[" * 200_000, "nested too deep"),
    (GENERATION, b"[" * 200_000, "nested too deep"),
    (CONFIG, b'{"a":' + b"[" * 100 + b"]" * 100 + b"}", "'a' is nested more than 64 deep"),
    (TOKENIZER, b'{"a":' * 200_000, "nested too deep"),
    (CONFIG, b"\xff\xfe", "not UTF-8 at byte 0"),
    (TOKENIZER, b"\xff", "not UTF-8 at byte 0"),
    (GENERATION, b"{}\xff", "not UTF-8 at byte 2"),
    (TEMPLATE, b"ab\xff", "not UTF-8 at byte 2"),
    (f"{MORE}/tool_use.jinja", b"\xff", "not UTF-8"),
    (TEMPLATE, b"a" * (2 << 20), "is over 1048576 bytes"),
    (CONFIG, b'{"vocab_size": ' + b"9" * 5000 + b"}", "is not JSON"),
    (TOKENIZER, b"[]", "must hold a JSON object, got list"),
    (TOKENIZER, b'{"eos_token": "\\ud800"}', "'eos_token' holds half of a surrogate pair"),
    (CONFIG, b'{"a": {"b": ["\\ud800"]}}', "'a' holds half of a surrogate pair"),
    (CONFIG, b'{"text_config": "x"}', "text_config must be an object, got 'x'"),
    (CONFIG, b'{"text_config": [1]}', r"text_config must be an object, got \[1\]"),
    ("tokenizer.json", b'{"a":' * 100_000, "is not a tokenizer"),
]


@pytest.mark.parametrize(("name", "content", "said"), RAW, ids=range(len(RAW)))
def test_a_file_that_cannot_be_read_is_named(folder, name, content, said):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=f"{re.escape(name)}.* {said}"):
        Tokenizer.load(folder)
    if name == CONFIG:
        with pytest.raises(CheckpointError, match=f"{name}.* {said}"):
            Checkpoint(folder)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
@pytest.mark.parametrize("name", [CONFIG, TOKENIZER, GENERATION, "tokenizer.json", TEMPLATE])
def test_what_is_no_file_is_named(folder, name, make):
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    with pytest.raises(TokenizerError, match=f"{re.escape(name)} is not a file"):
        Tokenizer.load(folder)


ADDED, EXTRA = "added_tokens_decoder", "extra_special_tokens"
VALUES = [
    (GENERATION, "eos_token_id", 2.0, "eos_token_id must be an id or a list of ids, got 2.0"),
    (GENERATION, "eos_token_id", [[2]], "eos_token_id must be an id"),
    (GENERATION, "eos_token_id", {"a": 1}, "eos_token_id must be an id"),
    (GENERATION, "eos_token_id", ["2"], "eos_token_id must be an id"),
    (GENERATION, "eos_token_id", "2", "eos_token_id must be an id"),
    (GENERATION, "eos_token_id", True, "eos_token_id must be an id"),
    (GENERATION, "eos_token_id", -1, "eos_token_id must be an id"),
    (CONFIG, "vocab_size", "384", "vocab_size must be at least 1, got '384'"),
    (TOKENIZER, ADDED, [1], "added_tokens_decoder must be an object"),
    (TOKENIZER, ADDED, {"x": {"content": "a"}}, "added_tokens_decoder must be by token ids"),
    (TOKENIZER, ADDED, {"9" * 5000: {"content": "a"}}, "added_tokens_decoder must be by token ids"),
    (TOKENIZER, ADDED, {"384": "x"}, r"added_tokens_decoder\.384 must be an object"),
    (TOKENIZER, ADDED, {"384": {}}, r"added_tokens_decoder\.384\.content must be a text"),
    (
        TOKENIZER,
        ADDED,
        {"384": {"content": "a", "bogus": 1}},
        r"added_tokens_decoder\.384 must be an object",
    ),
    (
        TOKENIZER,
        ADDED,
        {"384": {"content": "a", "special": 5}},
        r"added_tokens_decoder\.384\.special must be true",
    ),
    (TOKENIZER, EXTRA, 5, "extra_special_tokens must be a list"),
    (TOKENIZER, EXTRA, [5], "extra_special_tokens must be a text"),
    (TOKENIZER, EXTRA, {"image": 5}, "extra_special_tokens must be a text"),
    (TOKENIZER, "additional_special_tokens", "abc", "additional_special_tokens must be a list"),
    (TOKENIZER, "eos_token", 5, "eos_token must be a text"),
    (TOKENIZER, "eos_token", "x" * 1_000_000, "eos_token must be a text of at most 1000"),
    (TOKENIZER, "bos_token", {"content": [1]}, "bos_token must be a text"),
    (TOKENIZER, "chat_template", 5, "chat_template must be a text or a list"),
    (TOKENIZER, "chat_template", ["x"], "chat_template must be a list of objects"),
    (TOKENIZER, "chat_template", [{"name": "default"}], "chat_template must be a list of objects"),
    (TOKENIZER, "chat_template", [{"name": "d", "template": 5}], "chat_template must be a list"),
]


@pytest.mark.parametrize(("name", "key", "value", "said"), VALUES, ids=range(len(VALUES)))
def test_a_value_of_another_shape_is_named(folder, name, key, value, said):
    change(folder, name, **{key: value})
    with pytest.raises(TokenizerError, match=f"{re.escape(name)}: {said}") as refused:
        Tokenizer.load(folder)
    assert len(str(refused.value)) < 500


def test_a_template_that_does_not_compile_is_named(folder):
    (folder / TEMPLATE).write_text("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")
    with pytest.raises(ChatTemplateError, match="does not compile"):
        Tokenizer.load(folder)


def test_shapes_of_extra_tokens_that_transformers_writes_are_read(tmp_path):
    for number, extra in enumerate((["<a>", {"content": "<b>"}], {"image": "<a>", "more": "<b>"})):
        folder = write(tmp_path / str(number), byte_level(), extra_special_tokens=extra)
        change(folder, TOKENIZER, **{ADDED: {"500": {"content": "<c>", "__type": "AddedToken"}}})
        tokenizer = Tokenizer.load(folder)
        for text in ("<a>", "<b>", "<c>"):
            assert len(tokenizer.encode_word(text)) == 1


# -- settings that no tensor stands behind


@pytest.mark.parametrize(
    "claimed",
    [
        {"vocab_size": 2**31 - 1},
        {"num_attention_heads": 2**30, "num_key_value_heads": 2**30},
        {"intermediate_size": 2**31 - 1},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 9_999},
        {"head_dim": 2**30},
        {"head_dim": 2**16},
        {"hidden_size": 2**30},
    ],
    ids=str,
)
def test_sizes_that_the_tensors_do_not_have_are_refused_before_there_is_memory_for_them(
    folder, claimed
):
    from engine.config import EngineConfig
    from engine.llm_engine import LLMEngine

    change(folder, CONFIG, **claimed)
    with pytest.raises(CheckpointError):
        LLMEngine(EngineConfig(model=str(folder), device="cpu", num_threads=1, num_blocks=16))


def test_a_value_in_a_message_is_cut():
    assert shown("x" * 10_000) == "'" + "x" * (MAX_SHOWN - 1) + "…"
    assert shown([1, "a"]) == "[1, 'a']"


def test_a_fingerprint_is_that_of_weights_settings_and_template(tmp_path):
    def made(**changes):
        files = {"model.safetensors": b"w" * 3_000_000, "config.json": b"{}", "notes.txt": b""}
        for name, content in (files | changes).items():
            (tmp_path / name).write_bytes(content)
        return fingerprint(tmp_path)

    one = made()
    assert made() == one
    assert made(**{"notes.txt": b"x", "origin.json": b"when it was fetched"}) == one
    others = {
        made(**{"model.safetensors": b"w" * 2_999_999 + b"x"}),
        made(**{"config.json": b'{"a": 1}'}),
        made(**{"chat_template.jinja": b"x"}),
    }
    assert len(others | {one}) == 4
    weights = tmp_path / "model.safetensors"
    assert fingerprint(weights) == fingerprint(weights) != one
