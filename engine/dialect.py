"""What a model's own chat template and vocabulary say of how it thinks and calls functions.

A template is asked by rendering: a chat with a call in it shows how the model was taught to write
one. Its source alone would not do, since many forms share a tag and differ within it; and a model's
name says nothing of the template that came with it.

    ParameterError                      (engine.sampling_params)
    ├── NoToolFormatError               tools, for a model without a format of calls known here
    └── TemplateVariableError           a variable that the model's template does not use
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.chat_template import ChatTemplate
from engine.reply import CALL, END_CALL, END_THINK, THINK, ToolFormat
from engine.sampling_params import ParameterError

SETTABLE_VARIABLES = frozenset({"enable_thinking"})
_NAME = "probe_function"
_ARGUMENTS = {"probe_key": "probe value"}
_PARAMETERS = {
    "type": "object",
    "properties": {"probe_key": {"type": "string", "description": "a key"}},
    "required": ["probe_key"],
}
_TOOL = {
    "type": "function",
    "function": {"name": _NAME, "description": "a probe", "parameters": _PARAMETERS},
}
_TOOL_CALL = {
    "id": "call_0",
    "type": "function",
    "function": {"name": _NAME, "arguments": _ARGUMENTS},
}
_QUESTION = {"role": "user", "content": "the question"}
_CHAT_WITH_CALL: list[dict[str, Any]] = [
    _QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [_TOOL_CALL]},
    {"role": "tool", "content": "the probe's result", "tool_call_id": "call_0", "name": _NAME},
]
_DECODER = json.JSONDecoder()


class NoToolFormatError(ParameterError):
    code = "no_tool_format"

    def __init__(self, param: str, what: str) -> None:
        super().__init__(
            param,
            f"{what} cannot be used: this model's chat template shows no format of tool calls "
            f"known here ({CALL} and {END_CALL} around JSON, or JSON with name and parameters)",
        )


class TemplateVariableError(ParameterError):
    code = "no_template_variable"

    def __init__(self, name: str) -> None:
        param = f"chat_template_kwargs.{name}"
        super().__init__(param, f"{param} cannot be used: this model's chat template has no {name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one model's replies are made. The default is that of a model without a chat template."""

    tool_format: ToolFormat | None = None
    thinks: bool = False  # it has the tags <think> and </think>
    variables: frozenset[str] = frozenset()  # of its chat template, that a request may set
    added_tokens: frozenset[str] = frozenset()  # of its vocabulary: a tag there is a single token

    @classmethod
    def of(cls, template: ChatTemplate, vocabulary: Collection[str]) -> "Dialect":
        """`vocabulary` are the texts of added tokens."""
        in_vocabulary = THINK in vocabulary and END_THINK in vocabulary
        return cls(
            tool_format=_tool_format(template),
            thinks=in_vocabulary or END_THINK in template.source,
            variables=template.variables & SETTABLE_VARIABLES,
            added_tokens=frozenset(vocabulary),
        )

    @property
    def tags(self) -> frozenset[str]:
        """What its replies are read by: part of the text, even where they are special tokens."""
        tags = {THINK, END_THINK} if self.thinks else set()
        if self.tool_format is ToolFormat.TAGGED_JSON:
            tags |= {CALL, END_CALL}
        return frozenset(tags)

    def check(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> None:
        """Raises NoToolFormatError or TemplateVariableError for what this model cannot be told."""
        for name in variables:
            if name not in self.variables:
                raise TemplateVariableError(name)
        if self.tool_format is not None:
            return
        if tools:
            raise NoToolFormatError("tools", "tools")
        for i, message in enumerate(messages):
            if message.get("tool_calls"):
                raise NoToolFormatError(f"messages[{i}].tool_calls", f"messages[{i}].tool_calls")
            if message.get("role") == "tool":
                raise NoToolFormatError(f"messages[{i}].role", f"messages[{i}].role 'tool'")


def _tool_format(template: ChatTemplate) -> ToolFormat | None:
    """None unless the template shows tools to the model and prints calls in a form known here."""
    try:
        offered = template.render([_QUESTION], tools=[_TOOL])
        called = template.render(_CHAT_WITH_CALL, tools=[_TOOL])
    except ParameterError:
        return None
    if _NAME not in offered:
        return None
    expected = {"name": _NAME, "arguments": _ARGUMENTS}
    for match in re.finditer(f"{CALL}(.*?){END_CALL}", called, re.DOTALL):
        if _first_value(match.group(1).strip()) == expected:
            return ToolFormat.TAGGED_JSON
    # alone: where the reply begins, without a tag or a list around it
    expected = {"name": _NAME, "parameters": _ARGUMENTS}
    if called.startswith(offered) and _first_value(called[len(offered) :].lstrip()) == expected:
        return ToolFormat.BARE_JSON
    return None


def _first_value(text: str) -> object:
    try:
        return _DECODER.raw_decode(text)[0]
    except (ValueError, RecursionError):
        return None
