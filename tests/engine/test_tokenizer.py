"""The tokenizer's ids are transformers' ids, and threads may share it."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import AutoTokenizer

from engine.sampling_params import ParameterError
from engine.tokenizer import Tokenizer
from engine.tokenizer_files import TokenizerError
from tests.engine.tokenizers_on_disk import KINDS, byte_level, write

TEXTS = [
    "",
    " ",
    "\n\n  \n",
    "Hello, world!",
    "   leading spaces and trailing   ",
    "tabs\tand\r\nnewlines\n\n\nend",
    "emoji 😀 family 👨‍👩‍👧‍👦 flag 🇩🇪 skin 👍🏽",
    "日本語のテキスト、한국어, ภาษาไทย, العربية",
    "combining é vs é, zero\u200bwidth, nul \x00 byte",
    "<|im_start|>user\nraw special tokens<|im_end|> and <s>these</s>",
    "def f(x):\n    return x ** 2  # code\n",
    "a" * 3000,
]


def test_a_real_models_ids_and_text_equal_transformers(smollm2_dir):
    ours, theirs = Tokenizer.load(smollm2_dir), AutoTokenizer.from_pretrained(smollm2_dir)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"pad_token": "<pad>", "extra_special_tokens": ["<|x|>"]},
        {"unk_token": "<unk>"},
    ],
    ids=str,
)
def test_ids_of_every_kind_of_tokenizer_equal_transformers(tmp_path, kind, config):
    folder = write(tmp_path / kind, KINDS[kind](), **config)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for text in [*TEXTS, "<pad>the<think> the<|x|></s>"]:
        assert ours.encode(text) == theirs(text)["input_ids"]


def test_tokens_listed_in_the_config_only_are_added_as_transformers_adds_them(tmp_path):
    rust = byte_level()
    first = rust.get_vocab_size()
    flags = {"lstrip": False, "rstrip": True, "normalized": False, "single_word": False}
    listed = {
        str(first + 1): {"content": "<|b|>", "special": True, **flags},
        str(first): {"content": "<|a|>", "special": False, **flags},
    }
    folder = write(tmp_path, rust, added_tokens_decoder=listed, pad_token="<|c|>")
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    text = "x<|a|>  <|b|> y<|c|>"
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert {first, first + 1, first + 2} <= set(ours.encode(text))


def test_facts_of_the_model_are_read_from_its_folder(smollm2_dir):
    tokenizer = Tokenizer.load(smollm2_dir)
    assert tokenizer.vocab_size == 49152
    assert tokenizer.max_model_len == 8192
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.has_chat_template


def test_every_end_of_sequence_id_is_known(tmp_path):
    folder = write(tmp_path, byte_level())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert Tokenizer.load(folder).eos_token_ids == {7, 9, 1}


def test_an_id_beyond_the_vocabulary_has_no_text(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, byte_level()))
    known = tokenizer.encode("the")
    assert tokenizer.decode([*known, tokenizer.vocab_size - 1]) == "the"


def test_a_lone_surrogate_is_refused_by_name(smollm2_dir):
    tokenizer = Tokenizer.load(smollm2_dir)
    with pytest.raises(ParameterError, match="lone surrogate") as refused:
        tokenizer.encode("half \ud83d")
    assert refused.value.param == "prompt"
    with pytest.raises(ParameterError, match="lone surrogate") as refused:
        tokenizer.encode_chat([{"role": "user", "content": "half \ud83d"}])
    assert refused.value.param == "messages"


def test_sixteen_threads_share_one_tokenizer(smollm2_dir):
    tokenizer = Tokenizer.load(smollm2_dir)
    chats = [[{"role": "user", "content": f"{text} {i}"}] for i in range(40) for text in TEXTS[:-1]]
    expected = [tokenizer.encode_chat(chat) for chat in chats]
    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(tokenizer.encode_chat, chats)) == expected
        ids = list(threads.map(tokenizer.encode, TEXTS * 40))
    assert ids == [tokenizer.encode(text) for text in TEXTS] * 40


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", "{}", "is not a tokenizer"),
        ("config.json", None, "config.json is missing"),
        ("config.json", "{", "config.json is not JSON"),
        ("config.json", "[]", "must hold a JSON object"),
        ("config.json", '{"vocab_size": 8}', "max_position_embeddings must be at least 1"),
        ("config.json", '{"vocab_size": -8}', "vocab_size must be at least 1, got -8"),
    ],
)
def test_an_unusable_folder_is_refused_by_the_files_name(tmp_path, name, content, message):
    folder = write(tmp_path, byte_level())
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.load(folder)


def test_neither_torch_nor_transformers_is_loaded(run_python):
    loaded = run_python(
        "import sys, engine, engine.tokenizer, engine.detokenizer, engine.sampling_params;"
        "from engine import SamplingParams, EngineConfig;"
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    assert loaded == "set()"


@pytest.fixture
def run_python():
    def run(program: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
        )
        return done.stdout.strip()

    return run


@pytest.mark.parametrize("text", ["a " * 500_000, "a" * 1_000_000, "é" * 500_000])
def test_a_text_far_beyond_the_models_length_is_refused_without_reading_all_of_it(
    smollm2_dir, text
):
    tokenizer = Tokenizer.load(smollm2_dir)
    began = time.process_time()
    with pytest.raises(ParameterError, match="8192 tokens") as caught:
        tokenizer.encode(text)
    assert caught.value.param == "prompt"
    with pytest.raises(ParameterError, match="8192 tokens") as caught:
        tokenizer.encode_chat([{"role": "user", "content": text}])
    assert caught.value.param == "messages"
    assert time.process_time() - began < 2.0


def test_a_long_text_of_few_tokens_is_read_whole(smollm2_dir):
    tokenizer = Tokenizer.load(smollm2_dir)
    text = " " * 200_000
    assert len(tokenizer.encode(text)) < 8192
    assert tokenizer.decode(tokenizer.encode(text)) == text
