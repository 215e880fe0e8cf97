"""Penalties, and one token for each row of logits, in plain PyTorch on any device.

A draw is Gumbel-max over the tokens that top_k, then top_p, then min_p leave; the noise of token v
is a function of (seed, v, position). Nothing here waits for a device: ids stay on it.
"""

import torch
from torch import Tensor

from engine.kernels.philox import philox_4x32_10

BROKEN = -1  # in place of an id, where a row's largest logit is no finite number


def draw(
    logits: Tensor,  # [R, vocab] float32
    numbers: Tensor,  # [R, 3] float64: temperature, top_p, log min_p (-inf: none)
    words: Tensor,  # [R, 3] int64: top_k (0: none), seed's 64 bits, position
) -> Tensor:  # [R] int64, BROKEN where a row is
    """One token for each row: of a temperature of 0 the likeliest, the first of equals."""
    peaks = logits.amax(-1, keepdim=True)
    temperature = numbers[:, :1].float()
    greedy = temperature == 0
    scaled = (logits - peaks) / torch.where(greedy, 1.0, temperature)
    values, ids = scaled.log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    values = values.double()
    top_k = words[:, :1].double()
    top_k = torch.where(top_k > 0, top_k, torch.inf)
    top_p = torch.where(numbers[:, 1:2] < 1, numbers[:, 1:2], torch.inf)
    kept, _ = kept_candidates(values, top_k, top_p, numbers[:, 2:])
    noise = torch.where(greedy, 0.0, gumbel(ids, words))
    best = (values + noise).masked_fill(~kept, -torch.inf).argmax(-1, keepdim=True)
    return torch.where(peaks.isfinite(), ids.gather(1, best), BROKEN).squeeze(1)


def kept_candidates(
    values: Tensor,  # [R, K] float64 log-probabilities of the K likeliest tokens, falling
    top_k: Tensor,  # [R, 1] float64, infinite where there is none
    top_p: Tensor,  # [R, 1] float64, likewise
    log_min_p: Tensor,  # [R, 1] float64, -inf where there is none
) -> tuple[Tensor, Tensor]:  # [R, K], [R] bool
    """Which candidates stay, and in which rows no token beyond the candidates could stay too.

    A filter keeps or drops tokens of equal probability together, so the order in which they come
    does not matter. top_p is measured on what top_k leaves.
    """
    width = values.shape[1]
    kth = values.gather(1, (top_k.clamp(max=width) - 1).long())
    in_k = (values > -torch.inf) & ((values >= kth) | (top_k > width))
    mass = values.exp() * in_k
    total = torch.where(top_k.isfinite(), mass.sum(dim=1, keepdim=True), 1.0)
    likelier = mass.cumsum(dim=1) - mass  # the mass of the tokens before
    num_in_p = (in_k & (likelier < top_p * total)).sum(dim=1, keepdim=True)
    lowest = values.gather(1, (num_in_p - 1).clamp(min=0))
    kept = in_k & (values >= lowest) & (values >= values[:, :1] + log_min_p)
    open_ended = kept[:, -1] | (in_k[:, -1] & top_k.isfinite().squeeze(1))
    return kept, ~open_ended


def gumbel(
    token_ids: Tensor,  # [R, K] or [1, K] int64
    words: Tensor,  # [R, 3] int64, as `draw` has them
) -> Tensor:  # [R, K] float64
    """-log(-log u) with u = (word + ½) / 2³², word the first of Philox(seed; v, position, …)."""
    _, seed, position = words.unsqueeze(2).unbind(1)
    zero = torch.zeros_like(position)
    key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    word = philox_4x32_10((token_ids, position, zero, zero), key)[0]
    return -(-((word.double() + 0.5) * 2.0**-32).log()).log()


def penalize(
    logits: Tensor,  # [R, vocab] float32, changed
    places: Tensor,  # [E] int64, row × vocab + id; none twice
    terms: Tensor,  # [4, E] float32: times generated, repetition, frequency, presence penalty
) -> None:
    """Lower the logits of tokens that have come before. Sources: Keskar et al. 2019, and OpenAI."""
    counts, repetition, frequency, presence = terms
    flat = logits.view(-1)
    before = flat[places]
    values = torch.where(before > 0, before / repetition, before * repetition)
    values -= frequency * counts
    values -= presence * (counts > 0)
    # the least repetition penalties divide beyond float32; an infinity of the model's own stays
    huge = torch.finfo(logits.dtype).max
    flat[places] = torch.where(before.isfinite(), values.clamp(-huge, huge), values)
