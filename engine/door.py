"""The options of a generation, checked the same way wherever one is taken in.

Imports no torch: the API asks here before a job is stored, a worker again before it runs one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.bounds import check_int
from engine.sampling_params import SamplingParams, check_prompt, max_scored_tokens, params_of
from engine.token_rules import token_rules
from engine.tokenizer import Tokenizer


def checked_params(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    options: Mapping[str, Any],
    *,
    forced_tools: Sequence[Mapping[str, Any]],
    parallel_calls: bool,
    max_tokens: int | None,
    room: int,
    max_model_len: int,
    max_n: int,
) -> SamplingParams:
    """`options` are as `params_of` takes them; one of `forced_tools` has to be called, if any.

    `room` is for tokens of prompt and output together; what the prompt leaves of it is the default
    of `max_tokens`, or as many of them as can be scored if they are to be. Raises ParameterError.
    """
    # before the bound that holds everywhere, so that what is said is the bound that holds here
    check_int("n", options.get("n", 1), 1, max_n)
    # at least 1, so that a prompt without room for output is refused for its own length
    left = max(1, room - len(token_ids))
    calls = tokenizer.call_options(token_ids, forced_tools, parallel=parallel_calls)
    params = params_of({**options, **calls}, max_tokens=left if max_tokens is None else max_tokens)
    if max_tokens is None:
        fitting = max(1, max_scored_tokens(len(token_ids), params))
        params = replace(params, max_tokens=min(left, fitting))
    check_prompt(token_ids, params, vocab_size=tokenizer.vocab_size, max_model_len=max_model_len)
    token_rules(params, tokenizer)
    return params
