"""Renders a model's own chat template, in a sandbox, as Hugging Face transformers renders it.

Owns the bound on what a template may print. Knows nothing of token ids.
A template is the operator's: it comes with the model, never with a request. The messages are the
client's: whatever a template makes of them, an error is about them and names them.

    ParameterError                  (engine.sampling_params)
    └── ChatTemplateError           the template cannot be compiled, or did what a sandbox forbids
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta
from jinja2.exceptions import SecurityError

from engine.sampling_params import ParameterError
from engine.template_sandbox import MAX_TEMPLATE_CHARS, SANDBOX

MAX_RENDERED_CHARS = 8 << 20  # a template's loops could print without end

# what an expression over odd messages may raise besides Jinja's own errors
_EXPRESSION_ERRORS = (
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RuntimeError,  # too much recursion is one
    MemoryError,
)
# what a source may raise besides a template's syntax: it is compiled to Python's own
_COMPILER_ERRORS = (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError)


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
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ChatTemplateError(
                f"the model's chat template has {len(source)} characters; "
                f"at most {MAX_TEMPLATE_CHARS} are read"
            )
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = SANDBOX.from_string(source)
            # what it uses and does not set itself
            self.variables = frozenset(meta.find_undeclared_variables(SANDBOX.parse(source)))
        except TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the model's chat template does not compile: line {error.lineno}: {error.message}"
            ) from error
        except _COMPILER_ERRORS as error:
            reason = str(error) or type(error).__name__
            raise ChatTemplateError(
                f"the model's chat template does not compile: {reason[:200]}"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt, ending where the assistant is to speak.

        Tools are objects of OpenAI's form, {"type": "function", "function": {…}}; the arguments of
        calls in messages are objects too. `variables` are the request's, beside a template's own.

        Raises ParameterError on `messages` when the template refuses them or prints too much, and
        ChatTemplateError when it reaches for what a sandbox forbids.
        """
        try:
            with SANDBOX.budget.rendering():
                return self._render(
                    **self._special_tokens,
                    **(variables or {}),
                    messages=messages,
                    tools=tools or None,
                    documents=None,
                    add_generation_prompt=True,
                )
        except SecurityError as error:
            raise ChatTemplateError(
                f"the model's chat template did what its sandbox forbids: {error}"
            ) from error
        except ParameterError:
            raise
        except (TemplateError, *_EXPRESSION_ERRORS) as error:
            raise ParameterError(
                "messages",
                "the model's chat template refuses these messages: "
                f"{str(error)[:1000] or type(error).__name__}",
            ) from error

    def _render(self, **variables: Any) -> str:
        parts: list[str] = []
        size = 0
        for part in self._template.generate(**variables):
            parts.append(part)
            size += len(part)
            if size > MAX_RENDERED_CHARS:
                raise ParameterError(
                    "messages",
                    f"messages rendered by the model's chat template must have at most "
                    f"{MAX_RENDERED_CHARS} characters",
                )
        return "".join(parts)
