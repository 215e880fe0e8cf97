"""Renders a model's own chat template, in a sandbox, as Hugging Face transformers renders it.

Owns the Jinja environment and the bound on what a template may print. Knows nothing of token ids.
A template is the operator's: it comes with the model, never with a request. The messages are the
client's: whatever a template makes of them, an error is about them and names them.

    ParameterError                  (engine.sampling_params)
    └── ChatTemplateError           the template cannot be compiled, or did what a sandbox forbids
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.sampling_params import ParameterError

MAX_RENDERED_CHARS = 8 << 20  # a template's loops could print without end

# what an expression over odd messages may raise besides Jinja's own errors
_EXPRESSION_ERRORS = (
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)


class ChatTemplateError(ParameterError):
    """The model's chat template itself is at fault; `messages` cannot be used with this model."""

    def __init__(self, message: str) -> None:
        super().__init__("messages", message)


class ChatTemplate:
    """One compiled template. Threads may share it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are the template's variables `bos_token`, `eos_token` and so on.

        Raises ChatTemplateError when the source is not a template.
        """
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the model's chat template does not compile: line {error.lineno}: {error.message}"
            ) from error

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The prompt, ending where the assistant is to speak.

        Raises ParameterError on `messages` when the template refuses them or prints too much, and
        ChatTemplateError when it reaches for what a sandbox forbids.
        """
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(
                **self._special_tokens,
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
            ):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED_CHARS:
                    raise ParameterError(
                        "messages",
                        f"messages rendered by the model's chat template must have at most "
                        f"{MAX_RENDERED_CHARS} characters",
                    )
        except SecurityError as error:
            raise ChatTemplateError(
                f"the model's chat template did what its sandbox forbids: {error}"
            ) from error
        except ParameterError:
            raise
        except (TemplateError, *_EXPRESSION_ERRORS) as error:
            raise ParameterError(
                "messages", f"the model's chat template refuses these messages: {error}"
            ) from error
        return "".join(parts)


class _Sandbox(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        # Jinja's own answer is an undefined value, which prints as nothing: an attack gone unseen
        raise SecurityError(f"access to {attribute!r} of {type(obj).__name__}")


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only opens a scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML; models were trained on plain JSON
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
