"""What a client may ask of one generation: each option is declared, bounded and explained here.

Knows nothing of tokens' text, models or batches; imports nothing but the standard library, so that
every floor of the house may use it as its door check.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

MAX_N = 16
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
GREEDY_BELOW = 1e-4  # a temperature this small divides logits into overflow; it means argmax


class ParameterError(ValueError):
    """A value outside its bounds; `param` is the field a client would have to change."""

    code: str | None = None  # for a client's program, where `param` alone does not tell

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Options of one generation. Raises ParameterError with the field, the bound and the value."""

    max_tokens: int  # most tokens to generate for each sample; >= 1
    n: int = 1  # samples of the same prompt; [1, 16]
    temperature: float = 1.0  # [0, 2]; below 1e-4 means greedy
    top_k: int = 0  # keep the k most likely tokens; 0 or -1 keeps all
    top_p: float = 1.0  # (0, 1]: smallest set of tokens with this much probability
    min_p: float = 0.0  # [0, 1]: drop tokens less likely than min_p × the likeliest
    seed: int | None = None  # [0, 2**63); None: the engine draws one
    min_tokens: int = 0  # no stop before this many generated tokens
    ignore_eos: bool = False  # the model's end-of-sequence ids do not end the generation
    stop: tuple[str, ...] = ()  # strings that end it; not part of the text
    stop_token_ids: tuple[int, ...] = ()  # ids that end it; not part of the text

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("n", self.n, 1, MAX_N)
        _check_float("temperature", self.temperature, 0.0, 2.0)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_float("top_p", self.top_p, 0.0, 1.0, low_excluded=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**63 - 1)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        if not isinstance(self.ignore_eos, bool):
            raise ParameterError(
                "ignore_eos", f"ignore_eos must be true or false, got {_shown(self.ignore_eos)}"
            )
        _check_tuple("stop", self.stop, MAX_STOP_STRINGS)
        for text in self.stop:
            _check_stop_string(text)
        _check_tuple("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, 2**31 - 1)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


OPTION_NAMES = frozenset(field.name for field in fields(SamplingParams))


def check_prompt(
    token_ids: Sequence[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    max_model_len: int,
) -> None:
    """The door check of a prompt against a model. Raises ParameterError naming the field.

    Run where a job is accepted and again where it is admitted: a worker's limits may be smaller.
    """
    if not token_ids:
        raise ParameterError("prompt", "prompt must have at least 1 token, got 0")
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise ParameterError(
                "prompt",
                f"prompt token ids must be integers in [0, {vocab_size}), got {_shown(token_id)}",
            )
    for token_id in params.stop_token_ids:
        if token_id >= vocab_size:
            raise ParameterError(
                "stop_token_ids", f"stop_token_ids must be in [0, {vocab_size}), got {token_id}"
            )
    if len(token_ids) >= max_model_len:
        raise ParameterError(
            "prompt",
            f"prompt has {len(token_ids)} tokens; with at least 1 generated token "
            f"the model's limit is {max_model_len}",
        )
    if len(token_ids) + params.max_tokens > max_model_len:
        raise ParameterError(
            "max_tokens",
            f"prompt ({len(token_ids)} tokens) + max_tokens ({params.max_tokens}) must be at most "
            f"{max_model_len}, got {len(token_ids) + params.max_tokens}",
        )


def _check_int(name: str, value: object, low: int, high: int) -> None:
    # a bool is an int to Python and a mistake to a client
    if type(value) is not int:
        raise ParameterError(name, f"{name} must be an integer, got {_shown(value)}")
    if not low <= value <= high:
        raise ParameterError(name, f"{name} must be in [{low}, {high}], got {_shown(value)}")


def _check_float(
    name: str, value: object, low: float, high: float, *, low_excluded: bool = False
) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ParameterError(name, f"{name} must be a number, got {_shown(value)}")
    # NaN is in no range
    if not low <= value <= high or (low_excluded and value == low):
        bracket = "(" if low_excluded else "["
        raise ParameterError(
            name, f"{name} must be in {bracket}{low:g}, {high:g}], got {_shown(value)}"
        )


def _check_tuple(name: str, value: object, max_length: int) -> None:
    # a bare string would pass for a tuple of one-letter strings
    if not isinstance(value, tuple):
        raise ParameterError(name, f"{name} must be a tuple, got {_shown(value)}")
    if len(value) > max_length:
        raise ParameterError(name, f"{name} may hold at most {max_length}, got {len(value)}")


def _check_stop_string(text: object) -> None:
    if not isinstance(text, str) or not text:
        raise ParameterError("stop", f"stop strings must be non-empty text, got {_shown(text)}")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise ParameterError("stop", f"a stop string is not valid Unicode: {error}") from None
    if num_bytes > MAX_STOP_BYTES:
        raise ParameterError(
            "stop", f"a stop string may have at most {MAX_STOP_BYTES} bytes, got {num_bytes}"
        )


def _shown(value: object) -> str:
    """A value as an error shows it: short, and without Python's limit on digits of an integer."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
