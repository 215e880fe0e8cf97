import pytest

from engine.sampling_params import ParameterError, SamplingParams
from engine.token_rules import NO_RULES, token_rules


class Words:
    """A vocabulary of whole words and letters."""

    def __init__(self, thinking_ids=None):
        self.thinking_ids = thinking_ids

    def encode_word(self, text):
        whole = {"no": [100], " no": [101], " never": [102, 103]}
        return whole.get(text, [ord(char) for char in text if char != "\u200b"])


def test_a_bad_word_is_banned_at_the_start_and_behind_a_space():
    params = SamplingParams(max_tokens=1, bad_words=("no", " never"))
    never = tuple(map(ord, "never"))
    assert token_rules(params, Words()).bad_words == ((100,), (101,), never, (102, 103))


def test_a_space_may_be_a_bad_word():
    params = SamplingParams(max_tokens=1, bad_words=(" ",))
    assert token_rules(params, Words()).bad_words == ((32,), (32, 32))


def test_a_word_without_tokens_is_refused():
    with pytest.raises(ParameterError, match="no token") as refused:
        token_rules(SamplingParams(max_tokens=1, bad_words=("\u200b",)), Words())
    assert refused.value.param == "bad_words"


def test_a_thinking_budget_needs_a_model_that_thinks():
    params = SamplingParams(max_tokens=1, thinking_token_budget=5)
    assert token_rules(params, Words((7, 8))).thinking == (7, 8)
    with pytest.raises(ParameterError, match="<think>") as refused:
        token_rules(params, Words())
    assert refused.value.param == "thinking_token_budget"


def test_most_requests_have_no_rules():
    assert token_rules(SamplingParams(max_tokens=1), Words((7, 8))) is NO_RULES
