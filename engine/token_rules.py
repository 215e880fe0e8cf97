"""Sampling options that are about text, in the ids of one vocabulary."""

from dataclasses import dataclass
from typing import Protocol

from engine.sampling_params import ParameterError, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """What the sampler cannot know without a tokenizer."""

    bad_words: tuple[tuple[int, ...], ...] = ()  # the last id is not drawn behind the others
    thinking: tuple[int, int] | None = None  # <think>, </think>; set with a thinking_token_budget


NO_RULES = TokenRules()


class Vocabulary(Protocol):
    """What is asked of a Tokenizer here."""

    @property
    def thinking_ids(self) -> tuple[int, int] | None: ...

    def encode_word(self, text: str) -> list[int]: ...


def token_rules(params: SamplingParams, vocabulary: Vocabulary) -> TokenRules:
    """Read the options that are about text. Raises ParameterError when the model lacks the words.

    A bad word is banned as it is spelled at the start of a text and behind a space: most
    vocabularies have other ids for the two.
    """
    if not params.bad_words and params.thinking_token_budget is None:
        return NO_RULES
    spelled: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        bare = word.lstrip(" ") or word
        for text in (bare, f" {bare}"):
            token_ids = tuple(vocabulary.encode_word(text))
            if not token_ids:
                raise ParameterError(
                    "bad_words", f"bad_words: {word[:80]!r} has no token in this model"
                )
            spelled[token_ids] = None
    thinking = None
    if params.thinking_token_budget is not None:
        thinking = vocabulary.thinking_ids
        if thinking is None:
            raise ParameterError(
                "thinking_token_budget",
                "thinking_token_budget needs a model with the tokens <think> and </think>; "
                "this one has none",
            )
    return TokenRules(bad_words=tuple(spelled), thinking=thinking)
