"""The form of a reply that must be a call: a grammar for structured output, in a model's dialect.

What `tool_choice` asks for with `required` or a function's name. A call is spelled as templates
print it, its arguments keep to the function's own schema, and a thought may come first where the
model has tags for one. Grammar: llguidance's variant of Lark, in which <tag> is a single token.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from engine.reply import CALL, END_CALL, END_THINK, THINK, ToolFormat
from engine.schema_escapes import allowed_escapes
from engine.schema_numbers import with_kept_numbers
from engine.structured_outputs import BOUNDED_WHITESPACE

# of a schema that stands in a grammar; a schema's own, if it brings any, is put out of force
_GUIDANCE = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": False,
    "whitespace_pattern": BOUNDED_WHITESPACE,
    "coerce_one_of": False,
    "lenient": False,
}


def call_grammar(
    tools: Sequence[Mapping[str, Any]],
    *,
    tool_format: ToolFormat,
    tag_tokens: Collection[str],  # tags that are single tokens of the vocabulary
    in_thought: bool,
    thinks: bool,
    parallel: bool,
) -> str:
    """A reply of at least one call of these tools, and of exactly one unless `parallel`.

    Bare JSON has one call at most: the templates of such models take no more. Raises
    UnkeptNumberError.
    """

    def spelled(tag: str) -> str:
        return tag if tag in tag_tokens else json.dumps(tag)

    key = "arguments" if tool_format is ToolFormat.TAGGED_JSON else "parameters"
    calls = " | ".join(f"call{i}" for i in range(len(tools)))
    if tool_format is ToolFormat.BARE_JSON:
        lines = [f"start: thought ({calls})"]
    else:
        more = r' ("\n" one)*' if parallel else ""
        one = rf'one: {spelled(CALL)} "\n" ({calls}) "\n" {spelled(END_CALL)}'
        lines = [f"start: thought one{more}", one]
    lines += _thought(spelled(THINK), spelled(END_THINK), in_thought=in_thought, thinks=thinks)
    for i, tool in enumerate(tools):
        function = tool["function"]
        beginning = json.dumps(f'{{"name": "{function["name"]}", "{key}": ')
        # one without a type would let anything be the arguments
        parameters = with_kept_numbers(function["parameters"])
        guidance = _GUIDANCE | {"json_allowed_escapes": allowed_escapes(parameters)}
        schema = {**parameters, "type": "object", "x-guidance": guidance}
        lines += [
            f'call{i}: {beginning} arguments{i} "}}"',
            f"arguments{i}: %json {json.dumps(schema, ensure_ascii=False)}",
        ]
    return "\n".join([*lines, ""])


def _thought(start: str, end: str, *, in_thought: bool, thinks: bool) -> list[str]:
    if not thinks and not in_thought:
        return ['thought: ""']
    if end.startswith('"'):  # spelled in letters, so that the text has to end there
        text = [f"text[suffix={end}]: /(.|\\n)*/"]
    else:
        text = [f"text: words {end}", "words: /(.|\\n)*/"]
    space = "space: /\\n{0,2}/"
    if in_thought:
        return ["thought: text space", *text, space]
    return [f"thought: ({start} text space)?", *text, space]
