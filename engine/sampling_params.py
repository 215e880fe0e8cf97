"""What a client may ask of one generation: each option is declared, bounded and explained here.

Knows nothing of tokens' text, models or batches; imports nothing beyond the standard library, so
that every floor of the house may use it as its door check. Options that act on a token's
probability do so in the order of logits_processors.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from engine.bounds import (
    check_bool,
    check_float,
    check_ids,
    check_int,
    check_optional_int,
    check_tuple,
    shown,
)
from engine.parameter_error import ContextTooLong, UnknownField
from engine.parameter_error import ParameterError as ParameterError
from engine.structured_outputs import StructuredOutputs

MAX_N = 128  # samples of one request; an engine and a service take up to their own max_n
MAX_BEAMS = 16
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 256
MAX_LOGPROBS = 20
MAX_SCORES = 2**18  # log-probabilities of one request: about 25 MB as the JSON of a response
MAX_PATTERN_SIZE = 64
MAX_TIMEOUT_S = 30 * 86400.0  # a job's longest deadline
GREEDY_BELOW = 1e-4  # a temperature this small divides logits into overflow; it means argmax


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetection:
    """When a generation counts as caught in a loop: its end is one pattern, again and again.

    The names are vLLM's. Raises ParameterError.
    """

    max_pattern_size: int  # tokens of the longest pattern looked for; [1, 64]
    min_count: int  # times the pattern stands there, the first included; [2, 1024]
    min_pattern_size: int = 1  # [1, max_pattern_size]

    def __post_init__(self) -> None:
        within = "repetition_detection."
        check_int(within + "max_pattern_size", self.max_pattern_size, 1, MAX_PATTERN_SIZE)
        check_int(within + "min_count", self.min_count, 2, 1024)
        check_int(within + "min_pattern_size", self.min_pattern_size, 1, self.max_pattern_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Options of one generation. Raises ParameterError with the field, the bound and the value."""

    max_tokens: int  # most tokens to generate for each sample; 0 only scores the prompt
    n: int = 1  # samples of the same prompt; [1, 128], and at most the engine's max_n
    temperature: float = 1.0  # [0, 2]; below 1e-4 means greedy
    top_k: int = 0  # keep the k most likely tokens; 0 or -1 keeps all
    top_p: float = 1.0  # (0, 1]: smallest set of tokens with this much probability
    min_p: float = 0.0  # [0, 1]: drop tokens less likely than min_p × the likeliest
    seed: int | None = None  # [0, 2**63); None: the engine draws one
    min_tokens: int = 0  # no stop before this many generated tokens
    ignore_eos: bool = False  # the model's end-of-sequence ids do not end the generation
    stop: tuple[str, ...] = ()  # strings that end it; not part of the text
    stop_token_ids: tuple[int, ...] = ()  # ids that end it; not part of the text
    include_stop_str_in_output: bool = False  # the stop string or id is part of the text after all
    skip_special_tokens: bool = True  # special tokens are no part of the text
    presence_penalty: float = 0.0  # [-2, 2], off the logit of each token generated before
    frequency_penalty: float = 0.0  # [-2, 2], off it for each time it was generated
    # (0, 2]: a logit above 0 of a token in prompt or output is divided by it, others multiplied
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, [-100, 100]), added to its logit
    allowed_token_ids: tuple[int, ...] | None = None  # no other id is drawn; None: all are
    bad_words: tuple[str, ...] = ()  # texts whose last token is not drawn behind its others
    logprobs: int | None = None  # [0, 20]: log-probabilities of output tokens and as many likeliest
    prompt_logprobs: int | None = None  # [0, 20]: the same of the prompt
    repetition_detection: RepetitionDetection | None = None  # ends a loop; None: nothing does
    timeout_s: float | None = None  # (0, 30 days] from when the engine takes it in: deadline
    structured_outputs: StructuredOutputs | None = None  # the form it must have; None: any
    thinking_token_budget: int | None = None  # most tokens between <think> and </think>
    num_beams: int = 1  # [1, 16], 1: no beam search; else the n best of its texts, n ≤ num_beams
    length_penalty: float = 1.0  # [-5, 5]: a text's score is its log-probability / length ** this
    early_stopping: bool | str = False  # when a search ends, as in transformers; or "never"
    num_beam_groups: int = 1  # of equal size; they take turns, each beside those before it
    diversity_penalty: float = 0.0  # (0, 100], off a token for each earlier group's beam with it

    def __post_init__(self) -> None:
        check_int("max_tokens", self.max_tokens, 0, 2**31 - 1)
        check_int("n", self.n, 1, MAX_N)
        check_float("temperature", self.temperature, 0.0, 2.0)
        check_int("top_k", self.top_k, -1, 2**31 - 1)
        check_float("top_p", self.top_p, 0.0, 1.0, low_excluded=True)
        check_float("min_p", self.min_p, 0.0, 1.0)
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_float("repetition_penalty", self.repetition_penalty, 0.0, 2.0, low_excluded=True)
        check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        check_optional_int("seed", self.seed, 2**63 - 1)
        check_optional_int("logprobs", self.logprobs, MAX_LOGPROBS)
        check_optional_int("prompt_logprobs", self.prompt_logprobs, MAX_LOGPROBS)
        check_optional_int("thinking_token_budget", self.thinking_token_budget, 2**31 - 1)
        if self.timeout_s is not None:
            check_float("timeout_s", self.timeout_s, 0.0, MAX_TIMEOUT_S, low_excluded=True)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check_bool(name, getattr(self, name))
        _check_texts("stop", self.stop, MAX_STOP_STRINGS)
        _check_texts("bad_words", self.bad_words, MAX_BAD_WORDS)
        check_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        _check_logit_bias(self.logit_bias)
        self._check_allowed_token_ids()
        self._check_scoring()
        for name, kind in _RECORDS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ParameterError(name, f"{name} must be {kind.__name__}, got {shown(value)}")
        self._check_form()
        self._check_beams()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def num_seqs(self) -> int:
        """Sequences that are computed for it."""
        return max(self.n, self.num_beams)

    def stop_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Ids that end it, given the model's own."""
        models_own = frozenset() if self.ignore_eos else eos_token_ids
        # asked of each row in each step: most have no ids of their own, and make no new set
        return models_own.union(self.stop_token_ids) if self.stop_token_ids else models_own

    @property
    def penalizes(self) -> bool:
        """Whether a token's logit depends on which tokens came before."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def _check_allowed_token_ids(self) -> None:
        if self.allowed_token_ids is None:
            return
        check_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
        if not self.allowed_token_ids:
            raise ParameterError("allowed_token_ids", "allowed_token_ids must hold at least 1 id")
        if self.min_tokens and set(self.allowed_token_ids) <= set(self.stop_token_ids):
            raise ParameterError(
                "allowed_token_ids",
                "allowed_token_ids must hold an id that is not in stop_token_ids, "
                f"for min_tokens is {self.min_tokens}",
            )

    def _check_scoring(self) -> None:
        if self.max_tokens:
            return
        if self.prompt_logprobs is None:
            raise ParameterError(
                "max_tokens",
                "max_tokens must be at least 1 unless the prompt is to be scored "
                "(prompt_logprobs, or echo with logprobs), got 0",
            )
        if self.n > 1:
            raise ParameterError("n", f"n must be 1 when max_tokens is 0, got {self.n}")

    def _check_form(self) -> None:
        """The form alone says when an output may end, and then it must."""
        if self.structured_outputs is None:
            return
        for name in ("ignore_eos", "min_tokens", "thinking_token_budget"):
            if getattr(self, name) not in (None, 0):
                raise ParameterError(
                    name, f"{name} cannot be combined with {self.structured_outputs.param}"
                )

    def _check_beams(self) -> None:
        check_int("num_beams", self.num_beams, 1, MAX_BEAMS)
        check_int("num_beam_groups", self.num_beam_groups, 1, self.num_beams)
        check_float("length_penalty", self.length_penalty, -5.0, 5.0)
        check_float("diversity_penalty", self.diversity_penalty, 0.0, 100.0)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ParameterError(
                "early_stopping",
                f'early_stopping must be true, false or "never", got {shown(self.early_stopping)}',
            )
        without_beams = self.num_beams == 1
        for name in _ONLY_BEAMS if without_beams else _ONLY_SAMPLES:
            value = getattr(self, name)
            if value in _NEUTRAL.get(name, (_DEFAULTS[name],)):
                continue
            if without_beams:
                raise ParameterError(name, f"{name} needs num_beams of at least 2")
            param = value.param if isinstance(value, StructuredOutputs) else name
            raise ParameterError(param, f"{param} cannot be combined with num_beams")
        if without_beams:
            return
        check_int("n", self.n, 1, self.num_beams)
        if self.num_beams % self.num_beam_groups:
            raise ParameterError(
                "num_beam_groups",
                f"num_beam_groups must divide num_beams ({self.num_beams}), "
                f"got {self.num_beam_groups}",
            )
        if (self.num_beam_groups > 1) != (self.diversity_penalty > 0.0):
            raise ParameterError(
                "diversity_penalty",
                "diversity_penalty must be above 0 with num_beam_groups of at least 2, "
                f"and only then; got {self.diversity_penalty:g} with {self.num_beam_groups}",
            )


_ONLY_BEAMS = ("length_penalty", "early_stopping", "diversity_penalty")
# what picks among tokens at random, reads text while it comes, or tells of single tokens
_ONLY_SAMPLES = (
    "temperature", "top_k", "top_p", "min_p", "stop", "logprobs", "prompt_logprobs",
    "repetition_detection", "structured_outputs",
)  # fmt: skip
_RECORDS = {
    "repetition_detection": RepetitionDetection,
    "structured_outputs": StructuredOutputs,
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {"temperature": (0, 1), "top_k": (0, -1)}
_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
OPTION_NAMES = frozenset(field.name for field in fields(SamplingParams))


def params_of(options: Mapping[str, Any], *, max_tokens: int) -> SamplingParams:
    """Options as a door has them: plain values, with an object where an option is made of several.

    Raises ParameterError.
    """
    options = dict(options)
    detection = options.get("repetition_detection")
    if detection is not None:
        known = {field.name for field in fields(RepetitionDetection)}
        for name in detection.keys() - known:
            param = f"repetition_detection.{name:.80}"
            raise UnknownField(param, f"{param} is not a field of repetition_detection")
        for name in ("max_pattern_size", "min_count"):
            if name not in detection:
                param = f"repetition_detection.{name}"
                raise ParameterError(param, f"{param} is required")
        options["repetition_detection"] = RepetitionDetection(**detection)
    form = options.get("structured_outputs")
    if form is not None:
        options["structured_outputs"] = StructuredOutputs(**form)
    return SamplingParams(**options, max_tokens=max_tokens)


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
                f"prompt token ids must be integers in [0, {vocab_size}), got {shown(token_id)}",
            )
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", [token_id for token_id, _ in params.logit_bias]),
        ("allowed_token_ids", params.allowed_token_ids or ()),
    ):
        for token_id in ids:
            if token_id >= vocab_size:
                raise ParameterError(name, f"{name} must be in [0, {vocab_size}), got {token_id}")
    if params.max_tokens and len(token_ids) >= max_model_len:
        raise ContextTooLong(
            "prompt",
            f"prompt has {len(token_ids)} tokens; with at least 1 generated token "
            f"the model's limit is {max_model_len}",
        )
    if len(token_ids) + params.max_tokens > max_model_len:
        raise ContextTooLong(
            "max_tokens" if params.max_tokens else "prompt",
            f"prompt ({len(token_ids)} tokens) + max_tokens ({params.max_tokens}) must be at most "
            f"{max_model_len}, got {len(token_ids) + params.max_tokens}",
        )
    if params.max_tokens > max_scored_tokens(len(token_ids), params):
        name = "prompt_logprobs" if params.logprobs is None else "logprobs"
        raise ParameterError(
            name,
            f"{name}: log-probabilities of a prompt of {len(token_ids)} tokens and of {params.n} × "
            f"{params.max_tokens} of output, with the likeliest beside each, are more than the "
            f"{MAX_SCORES} that a response may hold",
        )


def max_scored_tokens(num_prompt_tokens: int, params: SamplingParams) -> int:
    """Output tokens of each sample whose log-probabilities a response can hold beside the prompt's.

    Below 0 if it cannot hold those of the prompt; all that the engine takes if none are asked for.
    """
    left = MAX_SCORES
    if params.prompt_logprobs is not None:
        left -= num_prompt_tokens * (1 + params.prompt_logprobs)
    if params.logprobs is None or left < 0:
        return left if left < 0 else 2**31 - 1
    return left // (params.n * (1 + params.logprobs))


def check_generated(generated: Sequence[Sequence[int]], *, vocab_size: int) -> None:
    """The same check of an earlier attempt's tokens. Raises ParameterError."""
    for token_ids in generated:
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise ParameterError(
                    "generated",
                    f"generated ids must be integers in [0, {vocab_size}), got {shown(token_id)}",
                )


def _check_logit_bias(logit_bias: tuple[tuple[int, float], ...]) -> None:
    check_tuple("logit_bias", logit_bias, MAX_LOGIT_BIAS)
    for entry in logit_bias:
        if not isinstance(entry, tuple) or len(entry) != 2:
            raise ParameterError(
                "logit_bias", f"logit_bias must hold pairs (id, bias), got {shown(entry)}"
            )
        check_int("logit_bias", entry[0], 0, 2**31 - 1)
        check_float("logit_bias", entry[1], -100.0, 100.0)
    if len({token_id for token_id, _ in logit_bias}) < len(logit_bias):
        raise ParameterError("logit_bias", "logit_bias must name each id once")


def _check_texts(name: str, texts: tuple[str, ...], max_length: int) -> None:
    check_tuple(name, texts, max_length)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ParameterError(name, f"{name} must hold non-empty text, got {shown(text)}")
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise ParameterError(name, f"a {name} string is not valid Unicode: {error}") from None
        if num_bytes > MAX_STOP_BYTES:
            raise ParameterError(
                name, f"a {name} string may have at most {MAX_STOP_BYTES} bytes, got {num_bytes}"
            )
