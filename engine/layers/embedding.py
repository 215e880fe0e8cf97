"""Token ids to vectors."""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.collectives import ALONE, Group


class Embedding:
    def __init__(
        self,
        weight: Tensor,  # [vocab, hidden]
        scale: float = 1.0,  # of the vectors; rounded to the weight's type, as Gemma was trained
        *,
        first: int = 0,  # the id of the weight's first row
        summed_over: Group = ALONE,  # ranks that hold the other rows
    ) -> None:
        self.weight = weight
        self.first = first
        self.summed_over = summed_over
        self.scale = torch.tensor(scale).to(weight.dtype).item()

    def __call__(
        self,
        token_ids: Tensor,  # [T] int64, in [0, vocab): the caller has checked
    ) -> Tensor:  # [T, hidden]
        if self.summed_over is ALONE:
            vectors = F.embedding(token_ids, self.weight)
        else:
            row = token_ids - self.first
            elsewhere = (row < 0) | (row >= self.weight.shape[0])
            vectors = F.embedding(row.masked_fill(elsewhere, 0), self.weight)
            vectors = self.summed_over.sum(vectors.masked_fill(elsewhere.unsqueeze(1), 0.0))
        return vectors if self.scale == 1.0 else vectors * self.scale
