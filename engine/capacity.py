"""Whether a request could ever be finished here, however long it waited.

ParameterError
└── CapacityError    the prompt and its max_tokens can never fit
"""

from engine.sampling_params import ParameterError


class CapacityError(ParameterError):
    """More tokens than the model takes, or than the KV cache holds when it is empty."""

    def __init__(self, param: str, limit: str, needed: int, available: int) -> None:
        super().__init__(
            param, f"prompt + max_tokens is {needed} tokens, the {limit} {available} at most"
        )
        self.needed = needed
        self.available = available


def check_capacity(
    num_prompt_tokens: int, max_tokens: int, *, max_model_len: int, kv_tokens: int
) -> None:
    """Raises CapacityError, and ParameterError for an empty prompt."""
    if num_prompt_tokens < 1:
        raise ParameterError("prompt", "prompt must have at least 1 token, got 0")
    needed = num_prompt_tokens + max_tokens
    for limit, available in (("model takes", max_model_len), ("KV cache holds", kv_tokens)):
        if needed > available:
            param = "prompt" if num_prompt_tokens >= available else "max_tokens"
            raise CapacityError(param, limit, needed, available)
