"""What is read of a checkpoint without transformers is what transformers reads, for every class.

The door and the worker know a model by its tokenizer's files alone: what they cannot read is never
served, whatever the engine could compute.
"""

import json

import pytest
from transformers import Gemma3TextConfig

from engine.tokenizer import Tokenizer
from engine.tokenizer_files import TokenizerError
from tests.engine.models.checkpoints import CONFIGS
from tests.engine.models.families import TEXT_PARTS, TIER_2, build_with_vision, write_config
from tests.engine.tokenizers_on_disk import byte_level


def loaded(folder):
    byte_level().save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


@pytest.mark.parametrize("model_type", TIER_2)
def test_a_decoder_of_any_class_is_as_large_and_as_long_as_it_says(model_type, tmp_path):
    write_config(model_type, tmp_path, **TIER_2[model_type])
    tokenizer = loaded(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.max_model_len) == (151, 128)


@pytest.mark.parametrize("name", CONFIGS)
def test_so_is_one_of_our_own(name, tmp_path):
    config = CONFIGS[name]()
    config.save_pretrained(tmp_path)
    tokenizer = loaded(tmp_path)
    read = (tokenizer.vocab_size, tokenizer.max_model_len)
    assert read == (config.vocab_size, config.max_position_embeddings)


@pytest.mark.parametrize("model_type", TEXT_PARTS)
def test_so_is_one_inside_a_model_of_images(model_type, tmp_path):
    build_with_vision(model_type).config.save_pretrained(tmp_path)
    tokenizer = loaded(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.max_model_len) == (151, 128)


def test_sizes_that_a_config_leaves_to_its_class_are_those_of_the_class(tmp_path):
    # as Gemma 3's checkpoints do, whose part for text says little more than this
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 2}
    config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": text}))
    tokenizer = loaded(tmp_path)
    whole = Gemma3TextConfig()
    read = (tokenizer.vocab_size, tokenizer.max_model_len)
    assert read == (whole.vocab_size, whole.max_position_embeddings)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard of"}))
    with pytest.raises(TokenizerError, match="vocab_size must be at least 1, got None"):
        loaded(tmp_path)
