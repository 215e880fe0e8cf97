"""A dataset's prompt: a Jinja template over a row's columns, in the sandbox of chat templates."""

from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError

from bulk.errors import InputError, SpecError
from engine.template_sandbox import MAX_TEMPLATE_CHARS, SANDBOX

# a column that a row lacks is a fault, not an empty text
_ENVIRONMENT = SANDBOX.overlay(undefined=StrictUndefined)
_EXPRESSION_ERRORS = (
    TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError, MemoryError,
)  # fmt: skip


class Prompt:
    """One template of the spec's `field`. Raises SpecError when it is none."""

    def __init__(self, source: str, field: str) -> None:
        self._field = field
        if len(source) > MAX_TEMPLATE_CHARS:
            raise SpecError(
                f"{field} has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are read"
            )
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except TemplateSyntaxError as error:
            raise SpecError(f"{field} line {error.lineno}: {error.message}") from None
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
            raise SpecError(f"{field} does not compile: {str(error)[:200]}") from None

    def render(self, values: Mapping[str, Any]) -> str:
        """Raises InputError, without the row's place."""
        try:
            with _ENVIRONMENT.budget.rendering():
                return self._template.render({"row": values, **values})
        except SecurityError as error:
            raise InputError(f"{self._field} does what its sandbox forbids: {error}") from None
        except (TemplateError, *_EXPRESSION_ERRORS) as error:
            reason = str(error)[:300] or type(error).__name__
            raise InputError(f"{self._field} cannot be made: {reason}") from None
