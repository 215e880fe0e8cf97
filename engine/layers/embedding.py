"""Token ids to vectors."""

import torch.nn.functional as F
from torch import Tensor


class Embedding:
    def __init__(
        self,
        weight: Tensor,  # [vocab, hidden]
    ) -> None:
        self.weight = weight

    def __call__(
        self,
        token_ids: Tensor,  # [T] int64, in [0, vocab): the caller has checked
    ) -> Tensor:  # [T, hidden]
        return F.embedding(token_ids, self.weight)
