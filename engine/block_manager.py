"""Which sequence holds which KV block, and which blocks can be found again by their content.

Owns block ids, reference counts and the prefix cache; knows nothing of what is in a block's memory,
who may run, or when. Source: Kwon et al. 2023 (PagedAttention), sections 4.2 and 4.4.

A block is held (reference count > 0), free and blank, or free and cached: its content can still be
found, and it is taken, least recently used first, only once no blank one is left. A full block is
*sealed* under a key when its K and V have been computed. Sealed content never changes: whoever
writes to a sealed block unseals it first, whoever writes to a shared one copies it.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from struct import pack

from engine.sequence import Sequence

NO_ADAPTER = b""  # the key has a field for the adapter, so that serving one cannot mix caches


@dataclass(frozen=True, slots=True)
class Seal:
    """What a sealed block holds: everything its key was made of, to be compared on a hit."""

    key: bytes
    previous_key: bytes  # of the block before it; b"" for a sequence's first block
    salt: bytes
    token_ids: tuple[int, ...]


def block_key(
    model_id: bytes, salt: bytes, adapter: bytes, previous_key: bytes, token_ids: tuple[int, ...]
) -> bytes:
    """SHA-256 of every field behind its length, so that no two lists of fields read the same."""
    digest = sha256()
    for part in (model_id, salt, adapter, previous_key, pack(f"<{len(token_ids)}I", *token_ids)):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


class BlockManager:
    """The books of a fixed pool of blocks. Every method leaves them balanced; `check` proves it."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        model_id: bytes = b"",
    ) -> None:
        assert num_blocks > 0, num_blocks
        assert block_size > 0, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        self._model_id = model_id
        self._ref_counts = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 is taken first
        self._cached: OrderedDict[int, None] = OrderedDict()  # free and sealed, oldest first
        self._seals: dict[int, Seal] = {}  # block -> what it holds
        self._blocks_by_key: dict[bytes, int] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody holds, cached ones included: all of them may be taken."""
        return len(self._blank) + len(self._cached)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def fits(self, sequence: Sequence, *, spare: int = 0, without: Iterable[Sequence] = ()) -> bool:
        """Whether `admit` would find its blocks and leave `spare` free, were `without` freed."""
        released = Counter(block for victim in without for block in victim.block_table)
        freed = sum(self._ref_counts[block] == count for block, count in released.items())
        # a hit that stays with another holder is free of charge; one in the free pool leaves it
        shared = sum(
            self._ref_counts[block] > released[block] for block in self._find_prefix(sequence)
        )
        needed = self.num_blocks_for(sequence.num_tokens) - shared
        return needed + spare <= self.num_free_blocks + freed

    def admit(self, sequence: Sequence) -> None:
        """Give a sequence its cached prefix, and blocks for every other token it knows.

        Sets num_computed_tokens to the length of that prefix: always less than the tokens known,
        for the last one has to be computed to get its logits.
        """
        assert not sequence.block_table, sequence
        for block in self._find_prefix(sequence):  # before any block is taken: taking may evict
            self._share(block)
            sequence.block_table.append(block)
        sequence.num_computed_tokens = len(sequence.block_table) * self.block_size
        self._grow(sequence, sequence.num_tokens)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child share its parent's blocks as far as it knows the tokens computed in them.

        That is all of its tokens, or all but a last one that the parent lacks. The half-filled last
        block is shared too: the first of them to write to it copies it. All but the last of the
        child's tokens count as computed.
        """
        assert not child.block_table, child
        assert child.num_tokens <= parent.num_computed_tokens + 1, (parent, child)
        num_known = min(child.num_tokens, parent.num_computed_tokens)
        for block in parent.block_table[: self.num_blocks_for(num_known)]:
            self._share(block)
            child.block_table.append(block)
        child.num_computed_tokens = child.num_tokens - 1

    def num_blocks_kept(self, sequences: Iterable[Sequence]) -> int:
        """Entries of the sequences' block tables that will not be replaced by a copy.

        Of a block to which every holder has yet to write, one holder keeps the original.
        """
        kept = 0
        to_copy: list[int] = []
        for sequence in sequences:
            kept += len(sequence.block_table)
            unwritten = sequence.block_table[sequence.num_computed_tokens // self.block_size :]
            to_copy += [block for block in unwritten if self._ref_counts[block] > 1]
        for block, num_writers in Counter(to_copy).items():
            kept -= num_writers - (num_writers == self._ref_counts[block])
        return kept

    def prepare(self, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]] | None:
        """Make the slots of the next `num_tokens` tokens the sequence's own to write to.

        Returns (source, destination) blocks whose memory must be copied before the step; None, and
        nothing is changed, when too few blocks are free.
        """
        table = sequence.block_table
        computed = sequence.num_computed_tokens
        num_blocks = self.num_blocks_for(computed + num_tokens)
        written = range(computed // self.block_size, min(num_blocks, len(table)))
        shared = [index for index in written if self._ref_counts[table[index]] > 1]
        if max(0, num_blocks - len(table)) + len(shared) > self.num_free_blocks:
            return None
        for index in written:
            if self._ref_counts[table[index]] == 1:
                self._unseal(table[index])
        copies = []
        for index in shared:
            block = table[index]
            self._ref_counts[block] -= 1
            table[index] = self._take()
            if computed > index * self.block_size:  # else nothing in it is kept
                copies.append((block, table[index]))
        self._grow(sequence, computed + num_tokens)
        return copies

    def mark_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """The step has written the next `num_tokens` tokens: count them and seal what is full."""
        first = sequence.num_computed_tokens // self.block_size
        sequence.num_computed_tokens += num_tokens
        assert sequence.num_computed_tokens <= sequence.num_tokens, sequence
        if self._enable_prefix_caching:
            for index in range(first, sequence.num_computed_tokens // self.block_size):
                self._seal(sequence, index)

    def free(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Take a sequence's blocks back; nothing of it counts as computed any more.

        Their content can be found until it is evicted, unless `forget`: what a sequence that went
        wrong has computed must not reach others.
        """
        # last block first: a prefix is worth more than what follows it, so it is evicted later
        for block in reversed(sequence.block_table):
            if forget:
                self._unseal(block)
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0, block
            if self._ref_counts[block] > 0:
                continue
            if block in self._seals:
                self._cached[block] = None
            else:
                self._blank.append(block)
        sequence.block_table.clear()
        sequence.num_computed_tokens = 0

    def check(self, holders: Iterable[Sequence]) -> None:
        """Assert that the books balance, given every sequence that holds blocks."""
        holders = list(holders)
        held = Counter(block for sequence in holders for block in sequence.block_table)
        for block, count in enumerate(self._ref_counts):
            assert count == held[block], f"block {block}: {count} counted, {held[block]} held"
        free = [*self._blank, *self._cached]
        assert len(free) == len(set(free)), "a block is free twice"
        assert len(free) + len(held) == self.num_blocks, "a block is lost"
        assert held.keys().isdisjoint(free), "a block is free and held"
        assert all(block in self._seals for block in self._cached), "cached but not sealed"
        assert not any(block in self._seals for block in self._blank), "blank but sealed"
        assert self._blocks_by_key == {seal.key: block for block, seal in self._seals.items()}
        for sequence in holders:
            self._check_holder(sequence)

    def _check_holder(self, sequence: Sequence) -> None:
        table = sequence.block_table
        assert len(set(table)) == len(table), f"a block twice in one table: {table}"
        assert sequence.num_computed_tokens <= len(table) * self.block_size, sequence
        for index, block in enumerate(table):
            seal = self._seals.get(block)
            if seal is None:
                continue
            assert seal.salt == sequence.cache_salt, f"block {block} is another tenant's"
            # a fork may know only part of a full block: it copies it before it writes on
            known = self._token_ids(sequence, index)
            assert seal.token_ids[: len(known)] == known, f"block {block} holds other tokens"

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """The longest run of sealed blocks with the tokens that the sequence need not compute."""
        found: list[int] = []
        if not self._enable_prefix_caching:
            return found
        for index in range(sequence.num_reusable_tokens // self.block_size):
            block = self._blocks_by_key.get(self._key(sequence, index))
            if block is None or self._seals[block] != self._seal_of(sequence, index):
                break
            found.append(block)
        return found

    def _token_ids(self, sequence: Sequence, index: int) -> tuple[int, ...]:
        return tuple(sequence.token_ids[index * self.block_size : (index + 1) * self.block_size])

    def _key(self, sequence: Sequence, index: int) -> bytes:
        """The key of a sequence's full block; kept, since known tokens never change."""
        keys = sequence.block_keys
        while len(keys) <= index:
            previous_key = keys[-1] if keys else b""
            token_ids = self._token_ids(sequence, len(keys))
            assert len(token_ids) == self.block_size, "only full blocks have a key"
            keys.append(
                block_key(self._model_id, sequence.cache_salt, NO_ADAPTER, previous_key, token_ids)
            )
        return keys[index]

    def _seal_of(self, sequence: Sequence, index: int) -> Seal:
        key = self._key(sequence, index)
        previous_key = self._key(sequence, index - 1) if index else b""
        return Seal(key, previous_key, sequence.cache_salt, self._token_ids(sequence, index))

    def _seal(self, sequence: Sequence, index: int) -> None:
        block = sequence.block_table[index]
        assert self._ref_counts[block] == 1, f"block {block} was written to while shared"
        assert block not in self._seals, f"block {block} was written to while sealed"
        seal = self._seal_of(sequence, index)
        if seal.key in self._blocks_by_key:
            return  # two computed the same at once: the first is found, this one stays private
        self._seals[block] = seal
        self._blocks_by_key[seal.key] = block

    def _unseal(self, block: int) -> None:
        seal = self._seals.pop(block, None)
        if seal is not None:
            del self._blocks_by_key[seal.key]

    def _share(self, block: int) -> None:
        if self._ref_counts[block] == 0:
            del self._cached[block]
        self._ref_counts[block] += 1

    def _grow(self, sequence: Sequence, num_tokens: int) -> None:
        while len(sequence.block_table) < self.num_blocks_for(num_tokens):
            sequence.block_table.append(self._take())

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            assert self._cached, "no block is free: callers ask first"
            block, _ = self._cached.popitem(last=False)
            self._unseal(block)
        assert self._ref_counts[block] == 0, f"block {block} was taken while held"
        self._ref_counts[block] = 1
        return block
