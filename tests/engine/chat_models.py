"""Chat models without weights: small vocabularies with templates in the forms that are in the wild.

The templates are shortened versions, in words of our own, of what such checkpoints carry.
"""

import json
from pathlib import Path

from tokenizers import AddedToken

from tests.engine.tokenizers_on_disk import byte_level, write

# Hermes 2 Pro, Qwen2.5, Qwen3: ChatML, calls in tags, results in a user's turn, thought on demand
TAGGED = """\
{%- macro turn(role, text) %}
    {{- '<|im_start|>' + role + '\\n' + text + '<|im_end|>\\n' }}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'You may call these functions:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nWrite each call as:\\n<tool_call>\\n' }}
    {{- '{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- turn('system', messages[0].content) }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is string %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- turn('user', '<tool_response>\\n' + message.content + '\\n</tool_response>') }}
    {%- elif message.role == 'user' or not loop.first %}
        {{- turn(message.role, message.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
# Llama 3.1 and 3.2: tools in the first user turn, a call is bare JSON, results of role ipython
BARE = """\
{%- macro head(role) %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
{%- endmacro %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- head('assistant') + '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- head('ipython') + (message.content | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- head(message.role) }}
        {%- if loop.first and tools %}
            {{- 'To call a function, answer with {"name": its name, "parameters": an object}.\\n' }}
            {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
        {%- endif %}
        {{- message.content | trim }}{{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- head('assistant') }}{%- endif %}
"""
# Hermes 2 Pro: the arguments first, and results by name only
NAMED_RESULTS = TAGGED.replace(
    """\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n""",
    """\\n{ "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- ', "name": "' + call.function.name + '"}\\n""",
).replace(
    "{{- turn('user', '<tool_response>\\n' + message.content",
    """{%- if not message.name is defined %}
            {{- raise_exception('a tool response needs a name') }}
        {%- endif %}
        {{- turn('tool', '<tool_response>\\n' + message.name + ': ' + message.content""",
)
# no word of tools: they would be silently left out of the prompt
PLAIN = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# DeepSeek R1's kind: every reply begins in a thought
THINKING = PLAIN.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
# GLM and Qwen3-Coder: the same tag around something that is not JSON
TAGGED_XML = TAGGED.replace(
    """'\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": '""",
    """'\\n<tool_call>\\n<function=' + call.function.name + '>\\n'""",
)
# Mistral's: a list of calls behind a control token
LIST = BARE.replace("""'{"name": "'""", """'[TOOL_CALLS] [{"name": "'""")

CONTROLS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
MAX_MODEL_LEN = 4096


def write_chat_model(folder: Path, template: str | None, *, special_tags: bool = False) -> Path:
    """A vocabulary of bytes, control tokens and tags; `special_tags`: tags are special tokens."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROLS])
    tags = [AddedToken(text, special=special_tags, normalized=False) for text in TAGS]
    (tokenizer.add_special_tokens if special_tags else tokenizer.add_tokens)(tags)
    write(folder, tokenizer, template=template, eos_token="<|im_end|>")
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"max_position_embeddings": MAX_MODEL_LEN}
    path.write_text(json.dumps(config))
    return folder


def function(name="get_weather", **fields):
    """A tool as a client gives it."""
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    }
    described = {"name": name, "description": "Weather of a city", "parameters": parameters}
    return {"type": "function", "function": described | fields}


def call(name="get_weather", arguments=None, call_id="call_1"):
    """A call as a template is given it: its arguments are an object."""
    arguments = {"city": "Oslo"} if arguments is None else arguments
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
