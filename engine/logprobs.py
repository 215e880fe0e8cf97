"""Log-probabilities of tokens, and the likeliest tokens, from logits as the model gave them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.outputs import TokenLogprobs


class Scores(NamedTuple):
    """Of some places, where the logits are."""

    chosen: Tensor  # [R] float32, of the token that stands there
    ranks: Tensor  # [R] int64
    values: Tensor  # [R, K] float32, of the likeliest
    ids: Tensor  # [R, K] int64


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
    return told(
        score(logits, torch.tensor(token_ids).to(logits.device), max(num_top)), token_ids, num_top
    )


def score(
    logits: Tensor,  # [R, vocab] float32
    token_ids: Tensor,  # [R] int64
    most: int,  # of the likeliest that are wanted
) -> Scores:
    """Without a wait for the device."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    values, ids = logprobs.topk(min(most, logits.shape[1]), dim=-1)
    return Scores(chosen.squeeze(1), ranks, values, ids)


def told(scores: Scores, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(top[:count], tops[:count], strict=True)))
        for token_id, logprob, rank, tops, top, count in zip(
            token_ids, *(part.tolist() for part in scores), num_top, strict=True
        )
    ]
