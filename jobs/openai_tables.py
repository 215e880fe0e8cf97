"""Every field of a chat's and a completion's body, and what becomes of it.

Who reads bodies (`jobs.openai`) and who describes them (`api.document`) have these tables.
"""

from collections.abc import Callable
from typing import Any

from jobs import openai_fields as fields
from jobs import structured_outputs

OPTIONS: dict[str, Callable[[str, object], Any]] = {
    "n": fields.integer,
    "temperature": fields.number,
    "top_p": fields.number,
    "seed": fields.integer,
    "stop": fields.texts,
    # vLLM's names for what OpenAI lacks
    "top_k": fields.integer,
    "min_p": fields.number,
    "min_tokens": fields.integer,
    "ignore_eos": fields.boolean,
    "stop_token_ids": fields.token_ids,
    "presence_penalty": fields.number,
    "frequency_penalty": fields.number,
    "logit_bias": fields.logit_bias,
    "repetition_penalty": fields.number,
    "allowed_token_ids": fields.token_ids,
    "bad_words": fields.list_of_texts,
    "include_stop_str_in_output": fields.boolean,
    "skip_special_tokens": fields.boolean,
    "prompt_logprobs": fields.integer,
    "repetition_detection": fields.counts,
    "thinking_token_budget": fields.integer,
    "timeout_s": fields.number,  # our own
    "length_penalty": fields.number,  # vLLM's too
    # transformers' names
    "num_beams": fields.integer,
    "early_stopping": fields.boolean_or_text,
    "num_beam_groups": fields.integer,
    "diversity_penalty": fields.number,
}
CHAT_FIELDS = {
    "model", "messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs",
    "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "store",
}  # fmt: skip
COMPLETIONS_FIELDS = {"model", "prompt", "max_tokens", "logprobs", "echo"}

BOTH_WORK = structured_outputs.NAMES | {"use_beam_search", "stream", "stream_options"}

# labels for the sender's own use, and hints about caching that change no output
HARMLESS: dict[str, Callable[[str, object], Any]] = {
    "user": fields.text,
    "metadata": fields.labels,
    "safety_identifier": fields.text,
    "prompt_cache_key": fields.text,
}
# accepted only at a value that asks for nothing
CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
}
COMPLETIONS_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
}
CHAT_REFUSED = frozenset({
    "audio", "moderation", "prediction", "prompt_cache_options", "prompt_cache_retention",
    "reasoning_effort", "verbosity", "web_search_options",
})  # fmt: skip
