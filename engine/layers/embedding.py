"""Token ids to vectors."""

import torch
import torch.nn.functional as F
from torch import Tensor


class Embedding:
    def __init__(
        self,
        weight: Tensor,  # [vocab, hidden]
        scale: float = 1.0,  # of the vectors; rounded to the weight's type, as Gemma was trained
    ) -> None:
        self.weight = weight
        self.scale = torch.tensor(scale).to(weight.dtype).item()

    def __call__(
        self,
        token_ids: Tensor,  # [T] int64, in [0, vocab): the caller has checked
    ) -> Tensor:  # [T, hidden]
        vectors = F.embedding(token_ids, self.weight)
        return vectors if self.scale == 1.0 else vectors * self.scale
