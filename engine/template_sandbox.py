"""The Jinja environment of chat templates: what a template may reach, and how much it may do.

Owns the sandbox and its two limits: the time of one rendering, and the size of one value. A model's
template is code somebody else wrote; a loop in it that prints nothing would hold a thread for ever.

    TemplateLimitError      too slow or too large
"""

import json
import threading
import time
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

RENDER_LIMIT_S = 5.0  # of one rendering; a long chat takes milliseconds
MAX_REPEATED = 1 << 20  # items or characters of a value made by multiplication
MAX_INT_BITS = 4096  # of a power

_TICK = "_tick"  # what each turn of a loop calls; no template variable starts with an underscore


class TemplateLimitError(TemplateError):
    """A rendering that took too long, or a value that grew too large."""


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension]
        )
        self._clock = threading.local()  # renderings of several threads at once
        self.globals[_TICK] = self._tick
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def start_clock(self) -> None:
        """The time limit of this thread's next rendering counts from now."""
        self._clock.ends_at = time.monotonic() + RENDER_LIMIT_S

    def _tick(self) -> str:
        if time.monotonic() > self._clock.ends_at:
            raise TemplateLimitError(f"rendering took more than {RENDER_LIMIT_S:g} seconds")
        return ""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """As Jinja parses, with a look at the clock before the body of every loop and macro."""
        template = super()._parse(source, name, filename)
        for node in template.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
            call = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        template.set_environment(self)
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    _check_size("a repeated value", len(value) * times, MAX_REPEATED)
        elif isinstance(left, int) and isinstance(right, int) and right > 0:
            _check_size("bits of a power", left.bit_length() * right, MAX_INT_BITS)
        return super().call_binop(context, operator, left, right)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        # Jinja's own answer is an undefined value, which prints as nothing: an attack gone unseen
        raise SecurityError(f"access to {attribute!r} of {type(obj).__name__}")


def _check_size(what: str, size: int, limit: int) -> None:
    if size > limit:
        raise TemplateLimitError(f"{what}: {size} is over the limit of {limit}")


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only opens a scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


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


SANDBOX = _Sandbox()
