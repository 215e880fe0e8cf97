"""Which part of a model each rank of tensor parallel holds.

Knows numbers only. Source: Shoeybi et al. 2019 (Megatron-LM), section 3: the first matrix of a pair
is split by columns, the second by rows, so that a layer's two halves need one sum each.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    rank: int = 0
    size: int = 1  # ranks

    def part(self, total: int) -> slice:
        """An equal part of what the number of ranks divides."""
        assert total % self.size == 0, (total, self.size)
        each = total // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def kv_heads(self, total: int) -> slice:
        """An equal part, or where there are fewer heads than ranks, the one that it shares."""
        if total >= self.size:
            return self.part(total)
        assert self.size % total == 0, (total, self.size)
        head = self.rank * total // self.size
        return slice(head, head + 1)

    def width(self, total: int) -> int:
        """Of a part that is filled up where the number of ranks does not divide the whole."""
        return -(-total // self.size)

    def filled_part(self, total: int) -> slice:
        """The part of the whole that this rank's `width` begins with."""
        start = min(self.rank * self.width(total), total)
        return slice(start, min(start + self.width(total), total))


def size(part: slice) -> int:
    length: int = part.stop - part.start
    return length
