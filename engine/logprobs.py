"""Log-probabilities of tokens, and the likeliest tokens, from logits as the model gave them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.outputs import TokenLogprobs


def token_logprobs(
    logits: Tensor,  # [R, vocab] float32
    token_ids: Sequence[int],  # [R] the token that stands at each place
    num_top: Sequence[int],  # [R] how many of the likeliest are wanted
) -> list[TokenLogprobs]:
    """What is known of each place; NaN where its logits are not numbers.

    Of tokens with equal probability any may come first. A beam search asks for twice as many of the
    likeliest as it has beams.
    """
    if not token_ids:
        return []
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))
    ranks = ((logprobs > chosen).sum(dim=-1) + 1).tolist()
    values, ids = logprobs.topk(min(max(num_top), logits.shape[1]), dim=-1)
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(top[:count], tops[:count], strict=True)))
        for token_id, logprob, rank, top, tops, count in zip(
            token_ids,
            chosen.squeeze(1).tolist(),
            ranks,
            ids.tolist(),
            values.tolist(),
            num_top,
            strict=True,
        )
    ]
