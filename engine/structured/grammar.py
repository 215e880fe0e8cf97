"""A form in llguidance's words, and where one sequence stands in it.

llguidance (an Earley parser over a lexer of regex derivatives) makes a mask from scratch for each
step and caches the lexer's states, so there is little to compile and any grammar has its price at
each step. That price is bounded here: a mask that would take more than the limits below is an
error of its row.

    GrammarError
    └── _FullError
"""

import json
import re
from collections.abc import Iterable, Sequence
from time import perf_counter

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.gbnf_to_lark import is_lark_syntax

from engine.schema_escapes import allowed_escapes
from engine.schema_numbers import with_kept_numbers
from engine.structured.gbnf import plain_gbnf
from engine.structured_outputs import StructuredOutputs

STATES_MAX = 20_000  # of a grammar's lexer, 1 to 2 KB each
LIMITS = LLParserLimits(
    max_lexer_states=STATES_MAX,
    step_lexer_fuel=100_000,  # about 7 ms
    step_max_items=50_000,  # a schema of 800 optional properties takes over 20,000
    max_items_in_row=4_000,  # and 3,200 of these
    max_grammar_size=200_000,
    verbose_errors=False,
)
# A lexer learns while it makes masks, and nothing says how much: at most this, by the time of masks
# that took longer than one of what it knows (measured: 43 MB for a second of `.*a.{30}`).
LEARNT_BYTES_PER_S = 50e6
KNOWN_MASK_S = 0.0002
MAX_LEARNT_BYTES = STATES_MAX * 1024
MAX_MESSAGE_CHARS = 300
_TEMPERATURE = re.compile(r"^[ \t]*\w+\[[^]]*\btemperature[ \t]*=", re.MULTILINE)  # of a Lark rule
# Where only one text can follow, the library would allow the tokens alone that its own tokenization
# has of it: not the model's, and special tokens where the text spells one. The last of such lines
# counts, so that none in a client's grammar is stronger.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
# what the library says, and what a client can do about it
_PLAIN_WORDS = (
    (
        "oneOf constraints are not supported",
        "oneOf works only where the branches exclude each other by their type or by a constant "
        "property; use anyOf",
    ),
    ("Unimplemented keys: ", "keywords that are not supported: "),
    ("NoExtension", "no output can have this form"),
    ("too many expressions", "too complex"),
    ("too many states", "too complex"),
    ("Too many items", "too complex"),
    ("items; max is", "too complex"),
    ("lexer precomputation failed", "too complex"),
    ("too deeply nested", "too deeply nested"),
    ("fuel exhausted", "too complex"),
)


class GrammarError(ValueError):
    """A form that cannot be used, or that leads nowhere or too far at this place."""


class _FullError(GrammarError):
    """The lexer has as many states as it may."""


def load_vocabulary(
    tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int]
) -> LLTokenizer:
    """The ids' bytes, as llguidance keeps them. Raises GrammarError.

    Holds the interpreter's lock for up to a second: for a process that steps, a thing of its start.
    """
    spec = json.loads(tokenizer_json)
    if "merges" in spec["model"]:
        # it would tokenize with them, which is never asked of it, and spend a second on it
        spec["model"]["merges"] = []
    try:
        return LLTokenizer(json.dumps(spec), n_vocab=vocab_size, eos_token=sorted(eos_token_ids))
    except ValueError as error:
        raise GrammarError(f"this model's tokenizer allows no structured output: {error}") from None


def translate(form: StructuredOutputs) -> str:
    """The form as llguidance's own grammar; says nothing of whether it works. Raises GrammarError.

    May take time: for the process that may be killed.
    """
    try:
        if form.kind == "json":
            asked = json.loads(form.text)
            source = LLMatcher.grammar_from_json_schema(
                json.dumps(with_kept_numbers(asked), ensure_ascii=False),
                # every option, so that none can come in by the schema's x-guidance
                overrides={
                    "item_separator": ",",
                    "key_separator": ":",
                    "whitespace_flexible": False,
                    "whitespace_pattern": form.whitespace or None,
                    "coerce_one_of": False,
                    "lenient": False,
                    "json_allow_general_unicode_escapes": False,
                    "json_allowed_escapes": allowed_escapes(asked),
                },
            )
            schema = json.loads(source)["grammars"][0]["json_schema"]
            lark = f"start: %json {json.dumps(schema, ensure_ascii=False)}"
        elif form.kind == "grammar":
            is_lark = is_lark_syntax(form.text)
            if is_lark and _TEMPERATURE.search(form.text):
                raise GrammarError("a rule's temperature is not supported; it is the job's")
            lark = grammar_from("grammar", form.text if is_lark else plain_gbnf(form.text))
        else:
            regex = form.text
            if form.kind == "choice":
                regex = "|".join(map(_escaped, json.loads(form.text)))
            source = LLMatcher.grammar_from_regex(regex)
            lark = json.loads(source)["grammars"][0]["lark_grammar"]
        return lark + _NO_FORCING
    except ValueError as error:
        raise GrammarError(plain_message(str(error))) from None


def _escaped(text: str) -> str:
    """A regex of this text alone."""
    return "".join(
        letter if letter.isascii() and letter.isalnum() else f"\\x{{{ord(letter):X}}}"
        for letter in text
    )


def plain_message(message: str) -> str:
    for theirs, ours in _PLAIN_WORDS:
        _, found, after = message.partition(theirs)
        if found:
            message = ours + (after if ours.endswith(": ") else "")
            break
    message = " ".join(message.partition("\n<")[0].split())
    return message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "…"


class Grammar:
    """A form ready for use; its sequences share what the lexer learns."""

    def __init__(self, vocabulary: LLTokenizer, source: str) -> None:
        """`source` is what `translate` made. Raises GrammarError."""
        self._vocabulary = vocabulary
        self._source = source
        self._start = self._built()
        self.learnt_bytes = 0  # an estimate
        self.first_cost_s = 0.0  # of the last mask at the beginning of an output

    def state(self) -> "GrammarState":
        return GrammarState(self)

    def fresh(self) -> LLMatcher:
        return self._start.deep_copy()

    def rebuilt(self) -> LLMatcher:
        """As `fresh`, with a lexer that has learnt nothing: its states count against a limit."""
        self._start = self._built()
        self.learnt_bytes = 0
        return self.fresh()

    def note_mask(self, cost_s: float) -> None:
        learnt = int(max(0.0, cost_s - KNOWN_MASK_S) * LEARNT_BYTES_PER_S)
        self.learnt_bytes = min(MAX_LEARNT_BYTES, self.learnt_bytes + learnt)

    def _built(self) -> LLMatcher:
        matcher = LLMatcher(self._vocabulary, self._source, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarError(plain_message(matcher.get_error()))
        return matcher


class GrammarState:
    """Where one sequence stands: a pure function of the ids it has generated."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.fresh()
        self._ids: list[int] = []  # taken in
        self.cost_s = (
            grammar.first_cost_s
        )  # of the last mask; at first, of what the first took before

    def mask(self, generated_ids: Sequence[int]) -> bytes:
        """One bit for each id, lowest first: whether it may follow the generated ids.

        Where the form is complete that is end-of-sequence alone. Raises GrammarError.
        """
        began = perf_counter()
        try:
            return self._mask(generated_ids)
        except _FullError:
            # the limit counts the states that any sequence of this grammar has ever led to
            self._matcher, self._ids = self._grammar.rebuilt(), []
            return self._mask(generated_ids)
        finally:
            self.cost_s = perf_counter() - began
            self._grammar.note_mask(self.cost_s)
            if not generated_ids:
                self._grammar.first_cost_s = self.cost_s

    def num_allowed(self, generated_ids: Sequence[int], draft_ids: Sequence[int]) -> int:
        """How many of the drafts may follow the generated ids; behind a complete form none."""
        self._go_back(generated_ids)
        self.catch_up(generated_ids)
        if len(self._ids) < len(generated_ids):
            return 0
        return self._matcher.validate_tokens(list(draft_ids))

    def catch_up(self, generated_ids: Sequence[int]) -> None:
        """Take in ids beforehand, where it holds nobody up. What is wrong with them shows later."""
        for token_id in generated_ids[len(self._ids) :]:
            if not self._matcher.consume_token(token_id):
                return
            self._ids.append(token_id)

    def _mask(self, generated_ids: Sequence[int]) -> bytes:
        self._go_back(generated_ids)
        for token_id in generated_ids[len(self._ids) :]:
            if not self._matcher.consume_token(token_id):
                raise self._error()
            self._ids.append(token_id)
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise self._error()
        return mask

    def _go_back(self, generated_ids: Sequence[int]) -> None:
        """Forget what was taken in and has not come to be: drafts that were wrong."""
        num_taken = len(self._ids)
        if list(generated_ids[:num_taken]) == self._ids:
            return
        pairs = zip(self._ids, generated_ids, strict=False)
        num_shared = next(
            (i for i, (taken, token_id) in enumerate(pairs) if taken != token_id),
            min(num_taken, len(generated_ids)),
        )
        # once it has stopped, at the end of a form or in an error, it does not come back
        goes_back = not self._matcher.is_stopped() and self._matcher.rollback(
            num_taken - num_shared
        )
        if not goes_back:
            self._matcher, num_shared = self._grammar.fresh(), 0
        del self._ids[num_shared:]

    def _error(self) -> GrammarError:
        message = self._matcher.get_error()
        kind = _FullError if "too many states" in message else GrammarError
        return kind(plain_message(message))
