"""Text to token ids and back, as the model's own `tokenizer.json` says.

Built on the `tokenizers` library, whose Rust object is never changed after loading, so that any
number of threads may share one Tokenizer (a change while another thread encodes is "Already
borrowed"). Knows nothing of sequences or jobs; loads neither torch nor transformers, whose
`AutoTokenizer` its ids equal.
"""

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from engine.call_grammar import call_grammar
from engine.chat_template import ChatTemplate
from engine.dialect import Dialect
from engine.parameter_error import ContextTooLong, ParameterError
from engine.reply import END_THINK, MAX_CALLS, THINK, ReplyForm
from engine.schema_numbers import UnkeptNumberError
from engine.tokenizer_files import TokenizerFiles

# two private-use code points stand for a masked string, see Tokenizer.encode_chat
_ESCAPE = "\U000f0000"
_FIRST_CODE = 0xF0001

PROBED_CHARS_PER_TOKEN = 16
_TAIL_TOKENS = 16  # enough for a tag spelled in letters, and white space behind it


class NoChatTemplateError(ParameterError):
    """A chat for a model that was never taught the form of one; guessing it would be a lie."""

    code = "no_chat_template"

    def __init__(self) -> None:
        super().__init__(
            "messages", "this model has no chat template; send a prompt to /v1/completions"
        )


class Tokenizer:
    """Encodes prompts and chats, decodes ids. Threads may share it."""

    def __init__(
        self,
        rust: RustTokenizer,
        *,
        vocab_size: int,  # of the model's embedding, which may be larger than the vocabulary
        max_model_len: int,
        eos_token_ids: frozenset[int],
        named_tokens: Mapping[str, str],
        chat_template: str | None,
        tool_template: str | None = None,  # instead of it, for chats with tools
    ) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self._rust = rust
        added = rust.get_added_tokens_decoder()
        special_ids = frozenset(i for i, token in added.items() if token.special)
        control_ids = special_ids | eos_token_ids
        control_ids |= {
            i for i in map(rust.token_to_id, named_tokens.values()) if i is not None and i in added
        }
        self._controls = {added[i].content: i for i in sorted(control_ids & added.keys())}
        self._control_pattern = _alternatives(self._controls)
        self._needles = sorted({_needle(control) for control in self._controls} | {_ESCAPE})
        self._needle_pattern = _alternatives(self._needles)
        self._template, self._tool_template = (
            None if source is None else ChatTemplate(source, named_tokens)
            for source in (chat_template, tool_template or chat_template)
        )
        self.dialect = Dialect()
        if self._tool_template is not None:
            self.dialect = Dialect.of(
                self._tool_template, {token.content for token in added.values()}
            )
        tags = self.dialect.tags
        self._hidden_ids = frozenset(i for i in special_ids if added[i].content not in tags)

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Read a checkpoint folder's tokenizer files and config.json.

        Raises TokenizerError, or ChatTemplateError when the chat template does not compile.
        """
        files = TokenizerFiles.read(Path(folder))
        return cls(
            files.rust,
            vocab_size=files.vocab_size,
            max_model_len=files.max_model_len,
            eos_token_ids=files.eos_token_ids,
            named_tokens=files.named_tokens,
            chat_template=files.chat_template,
            tool_template=files.tool_template,
        )

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def is_byte_level(self) -> bool:
        """Whether a token's string spells bytes in the GPT-2 alphabet."""
        return type(self._rust.decoder).__name__ == "ByteLevel"

    @property
    def thinking_ids(self) -> tuple[int, int] | None:
        """The ids of `<think>` and `</think>`; None for a vocabulary without them."""
        start, end = map(self._rust.token_to_id, (THINK, END_THINK))
        return None if start is None or end is None else (start, end)

    def encode_word(self, text: str) -> list[int]:
        """Ids of a piece of text by itself, with nothing around it."""
        return self._rust.encode(text, add_special_tokens=False).ids

    def encode_input(
        self,
        *,
        prompt: str | Sequence[int] | None = None,
        messages: list[dict[str, Any]] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a generation's input in whichever form it came; tools and variables are a chat's.

        Raises ParameterError unless exactly one is given, and as `encode_chat` does. No text and no
        ids give no ids, though a model may put a token in front of nothing: a caller refuses that.
        """
        if (prompt is None) == (messages is None):
            raise ParameterError("prompt", "give either a prompt or messages")
        if messages is not None:
            return self.encode_chat(messages, tools, variables)
        if isinstance(prompt, str):
            return self.encode(prompt) if prompt else []
        return list(prompt or ())

    def encode(self, text: str) -> list[int]:
        """Ids of a completion prompt, with the special ids the model's tokenizer puts around it.

        Special tokens spelled in the text are read as such: a raw prompt is the client's own.
        """
        return self._encode(self._rust, text, "prompt", add_special_tokens=True)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a chat up to where the assistant is to speak.

        Only the template may speak in control tokens. Where a message or a tool spells one, it
        becomes the ids of its plain text; every other chat has exactly the ids that Hugging Face's
        `apply_chat_template` gives. To find out which control tokens are the template's own, the
        chat is rendered a second time with the first character of every control token masked in
        messages and tools: whatever the template then cuts, joins or trims, they hold none.

        Raises ParameterError on `messages`, `tools` or a variable that the template does not use.
        """
        if self._template is None:
            raise NoChatTemplateError
        messages = _checked(messages)
        tools = list(tools)
        self.dialect.check(messages, tools, variables or {})
        template = self._tool_template if tools and self._tool_template else self._template
        text = template.render(messages, tools=tools, variables=variables)
        masked_messages, masked_tools = self._masked(messages), self._masked(tools)
        if masked_messages != messages or masked_tools != tools:
            masked = template.render(masked_messages, tools=masked_tools, variables=variables)
            own_controls = self._control_pattern.findall(masked)
            if own_controls != self._control_pattern.findall(text):
                return self._encode_guarded(masked)
        return self._encode(self._rust, text, "messages", add_special_tokens=False)

    def call_options(
        self, prompt_ids: Sequence[int], tools: Sequence[Mapping[str, Any]], *, parallel: bool
    ) -> dict[str, Any]:
        """The sampling options by which the reply to a chat calls one of these tools; none of them,
        no options. Raises ParameterError."""
        tool_format = self.dialect.tool_format
        if not tools:
            return {}
        assert tool_format is not None, "encode_chat takes no tools then"
        try:
            grammar = call_grammar(
                tools,
                tool_format=tool_format,
                tag_tokens=self.dialect.tags & self.dialect.added_tokens,
                in_thought=self._ends_in_thought(prompt_ids),
                thinks=self.dialect.thinks,
                parallel=parallel,
            )
        except UnkeptNumberError as error:
            raise ParameterError("tool_choice", f"tool_choice: {error}") from None
        return {"structured_outputs": {"kind": "grammar", "text": grammar, "param": "tool_choice"}}

    def _ends_in_thought(self, prompt_ids: Sequence[int]) -> bool:
        tail = self.decode(prompt_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
        return self.dialect.thinks and tail.rstrip().endswith(THINK)

    def reply_form(
        self, prompt_ids: Sequence[int], *, tool_names: frozenset[str], max_calls: int = MAX_CALLS
    ) -> ReplyForm:
        """How the reply to a chat is to be read; without tools no calls are looked for."""
        thinks = self.dialect.thinks
        return ReplyForm(
            thinks=thinks,
            in_thought=self._ends_in_thought(prompt_ids),
            thinking_ids=self.thinking_ids if thinks else None,
            tool_format=self.dialect.tool_format if tool_names else None,
            tool_names=tool_names,
            max_calls=max_calls,
        )

    def to_json(self) -> str:
        """All of it in the form of a tokenizer.json, added tokens included."""
        return self._rust.to_str()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of all ids at once; ids beyond the vocabulary have none.

        The tags of the model's dialect are no special tokens here, whatever its vocabulary says.
        """
        hidden = self._hidden_ids if skip_special_tokens else frozenset()
        shown = [token_id for token_id in token_ids if token_id not in hidden]
        return self._rust.decode(shown, skip_special_tokens=False)

    def token(self, token_id: int) -> str:
        """The vocabulary's own string for an id, as its decoder sees it; "" beyond it."""
        return self._rust.id_to_token(token_id) or ""

    def is_visible(self, token_id: int) -> bool:
        """Whether an id has a part in the text: it is in the vocabulary and not special."""
        return token_id not in self._hidden_ids and self._rust.id_to_token(token_id) is not None

    def _encode(
        self, rust: RustTokenizer, text: str, param: str, *, add_special_tokens: bool
    ) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ParameterError(param, f"{param} must not hold lone surrogates") from error
        self._refuse_hopeless(rust, text, param)
        return rust.encode(text, add_special_tokens=add_special_tokens).ids

    def _refuse_hopeless(self, rust: RustTokenizer, text: str, param: str) -> None:
        """Raise ContextTooLong for a text far too long for the model, without reading all of it.

        Judged by its beginning, with a factor 2 to spare for what a cut changes in the last word.
        """
        beginning = text[: PROBED_CHARS_PER_TOKEN * self.max_model_len]
        if len(beginning) == len(text):
            return
        if len(rust.encode(beginning, add_special_tokens=False).ids) > 2 * self.max_model_len:
            raise ContextTooLong(
                param,
                f"{param} of {len(text)} characters has more than the {self.max_model_len} tokens "
                "this model takes",
            )

    def _masked(self, value: Any) -> Any:
        """The same JSON value with every needle in its strings replaced by two private code points.

        Injective, whatever the strings hold: the escape is itself a needle.
        """
        if isinstance(value, str):
            return self._needle_pattern.sub(
                lambda match: _ESCAPE + chr(_FIRST_CODE + self._needles.index(match.group())),
                value,
            )
        if isinstance(value, dict):
            return {self._masked(key): self._masked(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._masked(item) for item in value]
        return value

    def _encode_guarded(self, masked: str) -> list[int]:
        """Ids of a rendered chat whose messages are masked: the controls in it are the template's.

        They are renamed to markers nobody can guess, the messages are unmasked, and a twin of the
        tokenizer that knows the controls under those markers only encodes the whole in one piece,
        so that pre-tokenization sees the same neighbours as ever.
        """
        rust, markers = self._guarded
        text = self._control_pattern.sub(lambda match: markers[match.group()], masked)
        codes = f"{chr(_FIRST_CODE)}-{chr(_FIRST_CODE + len(self._needles) - 1)}"
        text = re.sub(
            f"{_ESCAPE}([{codes}])",
            lambda match: self._needles[ord(match.group(1)) - _FIRST_CODE],
            text,
        )
        return self._encode(rust, text, "messages", add_special_tokens=False)

    @cached_property
    def _guarded(self) -> tuple[RustTokenizer, dict[str, str]]:
        # built when first needed: it doubles the memory, and most chats hold no control token
        nonce = secrets.token_hex(16)
        markers = {text: f"{_ESCAPE}{nonce}:{i}{_ESCAPE}" for text, i in self._controls.items()}
        spec = json.loads(self._rust.to_str())
        _rename(spec, markers)
        return RustTokenizer.from_str(json.dumps(spec)), markers


def _needle(control: str) -> str:
    """What to mask so that no text can spell `control`: its first character, unless masking that
    would garble ordinary words, such as a message's role.
    """
    return control if control[0].isalnum() or control[0].isspace() else control[0]


def _alternatives(texts: Mapping[str, int] | Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")  # (?!) matches nothing


def _checked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages without null fields. Raises ParameterError unless each has role and content."""
    if not isinstance(messages, list) or not messages:
        raise ParameterError("messages", "messages must be a list of at least 1 message")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ParameterError("messages", f"messages[{index}] must be an object")
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise ParameterError(
                    "messages",
                    f"messages[{index}].{name} must be text, "
                    f"got {type(message.get(name)).__name__}",
                )
        checked.append({key: value for key, value in message.items() if value is not None})
    return checked


def _rename(spec: dict[str, Any], markers: Mapping[str, str]) -> None:
    """Give the control tokens of a serialised tokenizer other names, ids unchanged."""
    for token in spec["added_tokens"]:
        token["content"] = markers.get(token["content"], token["content"])
    spec["post_processor"] = None  # names the tokens too, and plays no part in a chat
    model = spec["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {markers.get(text, text): i for text, i in vocabulary.items()}
    else:  # Unigram: [text, score] in the order of ids
        model["vocab"] = [[markers.get(text, text), score] for text, score in vocabulary]
    if model.get("unk_token") in markers:
        model["unk_token"] = markers[model["unk_token"]]
    if "merges" in model:
        model["merges"] = list(_merges_without(model["merges"], markers))


def _merges_without(merges: list[Any], markers: Mapping[str, str]) -> Iterator[Any]:
    for merge in merges:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        if not {left, right, left + right} & markers.keys():
            yield merge
