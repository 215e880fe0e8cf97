"""Whether a request could ever be finished here, however long it waited.

ParameterError
└── CapacityError    the prompt and its max_tokens can never fit
"""

from engine.sampling_params import ParameterError, SamplingParams


class CapacityError(ParameterError):
    """More tokens than the model takes, or than the KV cache holds when it is empty."""

    code = "exceeds_capacity"

    def __init__(self, param: str, limit: str, needed: int, available: int) -> None:
        super().__init__(
            param, f"prompt + max_tokens is {needed} tokens, the {limit} {available} at most"
        )
        self.needed = needed
        self.available = available


def check_capacity(
    num_prompt_tokens: int,
    params: SamplingParams,
    *,
    max_model_len: int,
    max_num_seqs: int,
    num_blocks: int,
    block_size: int,
) -> None:
    """Raises CapacityError, and ParameterError for an empty prompt or too many beams.

    Beams go on together or not at all, so all of them must fit at once, with nothing shared.
    """
    if num_prompt_tokens < 1:
        raise ParameterError("prompt", "prompt must have at least 1 token, got 0")
    if params.num_beams > max_num_seqs:
        raise ParameterError(
            "num_beams",
            f"num_beams must be at most the {max_num_seqs} sequences of a step here, "
            f"got {params.num_beams}",
        )
    needed = num_prompt_tokens + params.max_tokens
    kv_tokens = num_blocks * block_size
    for limit, available in (("model takes", max_model_len), ("KV cache holds", kv_tokens)):
        if needed > available:
            param = "prompt" if num_prompt_tokens >= available else "max_tokens"
            raise CapacityError(param, limit, needed, available)
    each = num_blocks // params.num_beams * block_size
    if needed > each:
        limit = f"KV cache takes with {params.num_beams} beams"
        raise CapacityError("num_beams", limit, needed, each)
