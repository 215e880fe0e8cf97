"""A text has its form whatever kind of vocabulary it is written in."""

import json
import random

import pytest

from engine import EngineConfig, LLMEngine, SamplingParams
from engine.detokenizer import text_offsets, token_bytes
from engine.structured.grammar import load_vocabulary
from engine.structured_outputs import StructuredOutputs
from engine.tokenizer import Tokenizer
from tests.engine.scripted_runner import ScriptedRunner
from tests.engine.structured.forms import judge, random_forms
from tests.engine.tokenizers_on_disk import KINDS, write

# of which a decoder that strips a text's first space would make another text
CHOICES = [[" a", "b"], ["  two", " "], [" \u65e5", "\u00e9"], ["the ", " the"], ["\u2581a", "\n"]]


@pytest.fixture(params=["byte_level", "byte_fallback"])
def tokenizer(request, tmp_path):
    return Tokenizer.load(write(tmp_path, KINDS[request.param]()))


def engine_of(tokenizer, seed):
    """It says at random what its forms allow."""
    rng = random.Random(seed)

    def next_token(sequence):
        mask = sequence.token_filter.mask(sequence.generated_ids)
        allowed = [
            8 * i + bit for i, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1
        ]
        ends = sorted(tokenizer.eos_token_ids & set(allowed))
        return ends[0] if ends and rng.random() < 0.4 else rng.choice(allowed)

    runner = ScriptedRunner(next_token, vocab_size=tokenizer.vocab_size, num_blocks=512)
    config = EngineConfig(model="scripted", block_size=4)
    return LLMEngine(config, tokenizer=tokenizer, runner=runner)


@pytest.mark.parametrize("seed", [1], ids="seed={}".format)
def test_a_text_has_all_the_spaces_of_its_form(tokenizer, seed):
    engine = engine_of(tokenizer, seed)
    forms = [StructuredOutputs(kind="choice", text=json.dumps(texts)) for texts in CHOICES]
    forms += [StructuredOutputs(kind="regex", text=text) for text in (" +[a-z]{2}", "( the){1,2}")]
    forms += random_forms(5, 5, seed)
    num_ended = 0
    for form in forms:
        params = SamplingParams(max_tokens=100, n=4, structured_outputs=form)
        (output,) = engine.generate([[5]], params)
        for completion in output.completions:
            if completion.finish_reason == "stop":
                judge(form, completion.text)
                num_ended += 1
    assert num_ended > 3 * len(forms)


def test_their_places_in_the_text_count_the_first_space(tokenizer):
    ids = tokenizer.encode_word("the the")
    space = next(i for i in range(tokenizer.vocab_size) if token_bytes(tokenizer, i) == b" ")
    offsets = text_offsets(tokenizer, [space, *ids], skip_special_tokens=True, in_form=True)
    spelled = b"".join(token_bytes(tokenizer, i) for i in [space, *ids]).decode()
    for token_id, offset in zip([space, *ids], offsets, strict=True):
        assert spelled[offset:].startswith(token_bytes(tokenizer, token_id).decode())


def test_a_vocabulary_that_masks_cannot_be_made_for_says_so(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, KINDS["unigram"]()))
    with pytest.raises(ValueError, match="this model's tokenizer allows no structured output"):
        load_vocabulary(tokenizer.to_json(), tokenizer.vocab_size, tokenizer.eos_token_ids)
