"""Log-probabilities in the shapes of OpenAI's two endpoints, and in vLLM's for those of a prompt.

What an id spells is told by a function from ids to bytes, for a token may be part of a character.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

VANISHING = -9999.0  # OpenAI's number for a probability of 0, and ours for all that are as small

Spell = Callable[[int], bytes]


class Scored(Protocol):
    """A token and its natural log-probability, as the engine says it."""

    @property
    def token_id(self) -> int: ...

    @property
    def logprob(self) -> float: ...

    @property
    def rank(self) -> int: ...

    @property
    def top(self) -> Sequence[tuple[int, float]]: ...


def chat_logprobs(scores: Sequence[Scored], spell: Spell) -> dict[str, Any]:
    """A chat choice's `logprobs`."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        spelled = spell(token_id)
        text = _readable(spelled, "")
        return {"token": text, "logprob": _sent(logprob), "bytes": list(spelled)}

    content = [
        entry(score.token_id, score.logprob)
        | {"top_logprobs": [entry(*each) for each in score.top]}
        for score in scores
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    places: Sequence[tuple[int, Scored | None]],  # ids, a prompt's first one without a score
    offsets: Sequence[int],  # in characters, of each in the choice's text
    num_top: int,
    spell: Spell,
) -> dict[str, Any]:
    """A completion choice's `logprobs`: of each place the likeliest tokens and the one chosen."""

    def text(token_id: int) -> str:
        return _readable(spell(token_id), "bytes:")

    def likeliest(score: Scored) -> dict[str, float]:
        top = [*score.top[:num_top], (score.token_id, score.logprob)]
        return {text(token_id): _sent(logprob) for token_id, logprob in top}

    return {
        "tokens": [text(token_id) for token_id, _ in places],
        "token_logprobs": [None if score is None else _sent(score.logprob) for _, score in places],
        "top_logprobs": [None if score is None else likeliest(score) for _, score in places],
        "text_offset": list(offsets),
    }


def prompt_logprobs(
    scores: Sequence[Scored | None], num_top: int, spell: Spell
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each place its token and the likeliest, by id."""

    def entries(score: Scored) -> dict[str, Any]:
        ranked = [(token_id, n + 1, x) for n, (token_id, x) in enumerate(score.top[:num_top])]
        own = (score.token_id, score.rank, score.logprob)
        return {
            str(token_id): {
                "logprob": _sent(logprob),
                "rank": rank,
                "decoded_token": _readable(spell(token_id), ""),
            }
            for token_id, rank, logprob in (own, *ranked)
        }

    return [None if score is None else entries(score) for score in scores]


def _sent(logprob: float) -> float:
    return max(logprob, VANISHING)


def _readable(spelled: bytes, prefix: str) -> str:
    r"""The token's text, or its bytes written as \x.. where they are no whole characters.

    So too with a NUL, which no database keeps in a text.
    """
    try:
        text = spelled.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" not in text:
        return text
    return prefix + "".join(f"\\x{byte:02x}" for byte in spelled)
