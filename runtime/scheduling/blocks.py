"""Block pool: allocates cache blocks and shares prefixes, per group of layers with equal paging."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from atomc.runtime.requests.request import NO_LIMIT
from atomc.runtime.scheduling.prefix_cache import first_read, longest_match

NewBlocks = tuple[int, tuple[int, ...]]  # position of the first in the block table, block ids


class BlockGroup:
    """The blocks of one group: reference counts, free list, and the index of cached blocks.

    A free block keeps its content, and can be shared again, until it is allocated; the least
    recently used one is allocated first.
    """

    def __init__(self, num_blocks: int, window: int) -> None:
        self.num_blocks, self.window = num_blocks, window
        self.ref_counts = [0] * num_blocks
        # In the order of allocation: blocks without cached content first, starting with the last
        # one released, which may still be in a processor's cache.
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.key_of: dict[int, bytes] = {}
        self.block_of: dict[bytes, int] = {}

    def allocate(self) -> int:
        """Allocate a free block and evict its content."""
        block, _ = self.free.popitem(last=False)
        self.evict(block)
        self.ref_counts[block] = 1
        return block

    def share(self, key: bytes) -> int:
        """The cached block of this key; increments its reference count."""
        block = self.block_of[key]
        if not self.ref_counts[block]:
            del self.free[block]
        self.ref_counts[block] += 1
        return block

    def release(self, block: int) -> None:
        """Decrement the reference count; free the block at 0."""
        self.ref_counts[block] -= 1
        if not self.ref_counts[block]:
            self.free[block] = None
            self.free.move_to_end(block, last=block in self.key_of)

    def cache(self, block: int, key: bytes) -> None:
        """Add the block to the index under this key, unless the key has a block."""
        if key not in self.block_of and block not in self.key_of:
            self.block_of[key] = block
            self.key_of[block] = key

    def evict(self, block: int) -> None:
        """Remove the block from the index."""
        key = self.key_of.pop(block, None)
        if key is not None:
            del self.block_of[key]

    def check(self, tables: Sequence["BlockTable"]) -> None:
        ref_counts = [0] * self.num_blocks
        for table in tables:
            assert len(set(table.blocks)) == len(table.blocks), "a block is twice in one table"
            for block in table.blocks:
                ref_counts[block] += 1
        assert ref_counts == self.ref_counts, "a reference count is wrong"
        assert {i for i, count in enumerate(ref_counts) if not count} == set(self.free), (
            "the free list differs from the blocks without references"
        )
        assert {key: block for block, key in self.key_of.items()} == self.block_of, (
            "the index is inconsistent"
        )


@dataclass
class BlockTable:
    """An owner's blocks of one group: blocks[i] holds its tokens from (first + i) * block_size.

    sent_end   position up to which `take_new_blocks` has returned the blocks
    """

    first: int = 0
    blocks: list[int] = field(default_factory=list)
    sent_end: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)


class BlockPool:
    """num_blocks blocks of block_size tokens in each group.

    windows   attention window of each group in tokens; 0: all tokens are kept. Blocks outside the
              window are released. Without groups there is no state per token, and any request fits
    shares    whether owners may share full blocks with equal content (prefix cache)
    """

    def __init__(
        self,
        num_blocks: int | Sequence[int],
        block_size: int,
        windows: Sequence[int] = (0,),
        *,
        shares: bool = True,
    ) -> None:
        counts = [num_blocks] * len(windows) if isinstance(num_blocks, int) else list(num_blocks)
        self.block_size = block_size
        self.shares = shares
        self.groups = [
            BlockGroup(count, window) for count, window in zip(counts, windows, strict=True)
        ]
        self._tables: dict[str, list[BlockTable]] = {}
        # What `computed % block_size` is when a block can be shared, or leaves a window.
        self.borders = {(window - 1) % block_size for window in windows if window}
        self.borders |= {0} if shares else set()

    @property
    def num_blocks(self) -> int:
        return sum(group.num_blocks for group in self.groups)

    @property
    def num_free(self) -> int:
        return sum(len(group.free) for group in self.groups)

    @property
    def num_tokens(self) -> int:
        """Capacity in tokens of the smallest group without a window, or of the largest group if all
        have windows; 0 without groups.
        """
        unwindowed = [group.num_blocks for group in self.groups if not group.window]
        return (
            min(unwindowed or [max([group.num_blocks for group in self.groups], default=0)])
            * self.block_size
        )

    def tokens_used(self, computed: Mapping[str, int]) -> int:
        """Tokens in use, of the capacity `num_tokens`; shared tokens count once.

        computed   number of computed tokens by owner
        """
        if not self.groups:
            return 0
        index = max(
            range(len(self.groups)),
            key=lambda i: (not self.groups[i].window, self.groups[i].num_blocks),
        )
        group, tables = (
            self.groups[index],
            {owner: tables[index] for owner, tables in self._tables.items()},
        )
        held = sum(
            computed[owner] - table.first * self.block_size for owner, table in tables.items()
        )
        shared = sum(len(table.blocks) for table in tables.values()) - (
            group.num_blocks - len(group.free)
        )
        return held - shared * self.block_size

    def longest(self, most_new: int) -> int:
        """Maximum length in tokens of a sequence that has the pool to itself.

        most_new   maximum number of tokens in flight
        """
        held = [(group.num_blocks * self.block_size, group.window) for group in self.groups]
        return min(
            [
                NO_LIMIT if window and tokens >= window + most_new + 2 * self.block_size else tokens
                for tokens, window in held
            ],
            default=NO_LIMIT,
        )

    @property
    def owners(self) -> Set[str]:
        return self._tables.keys()

    def table(self, owner: str, group: int = 0) -> tuple[int, ...]:
        """The owner's block ids in token order; empty without blocks."""
        return tuple(self._tables[owner][group].blocks) if owner in self._tables else ()

    def match(self, keys: Sequence[bytes]) -> int:
        """Number of leading blocks that are cached, for these keys."""
        if not (self.shares and keys):
            return 0
        windows = [group.window for group in self.groups]
        return longest_match(
            keys, self.block_size, windows, [group.block_of.__contains__ for group in self.groups]
        )

    def admit(self, owner: str, keys: Sequence[bytes], now: int, ahead: int) -> bool:
        """Give a new owner the cached blocks of these keys, and new blocks for `now` tokens in
        groups with a window and for `ahead` tokens in the others. False, without changes, if there
        are not enough free blocks.
        """
        assert owner not in self._tables, f"{owner!r} owns blocks already"
        if not self.has_room(keys, now, ahead):
            return False
        self._tables[owner] = [
            BlockTable(first, [group.share(key) for key in keys[first:]], first)
            for group, first in zip(self.groups, self._first_blocks_read(len(keys)), strict=True)
        ]
        return self.reserve(owner, now, ahead)

    def has_room(self, keys: Sequence[bytes], now: int, ahead: int) -> bool:
        """Whether `admit` would succeed."""
        for group, first in zip(self.groups, self._first_blocks_read(len(keys)), strict=True):
            unused = sum(not group.ref_counts[group.block_of[key]] for key in keys[first:])
            if self._num_blocks(now if group.window else ahead) - len(keys) + unused > len(
                group.free
            ):
                return False
        return True

    def reserve(self, owner: str, now: int, ahead: int | None = None) -> bool:
        """Extend the owner's tables as in `admit`. False, without changes, if there are not enough
        free blocks.
        """
        tables = self._tables.get(owner) or [BlockTable() for _ in self.groups]
        missing = []
        for group, table in zip(self.groups, tables, strict=True):
            count = self._num_blocks(now if group.window else ahead or now) - table.end
            if count > len(group.free):
                return False
            missing.append(count)
        for count, group, table in zip(missing, self.groups, tables, strict=True):
            table.blocks += [group.allocate() for _ in range(count)]
        if not self.groups or any([table.blocks for table in tables]):
            self._tables[owner] = tables
        return True

    def trim(self, owner: str, computed: int) -> None:
        """Release blocks outside the windows of all tokens from position `computed`."""
        for group, table in zip(self.groups, self._tables[owner], strict=True):
            if not group.window:
                continue
            gone = (
                min(first_read(computed, group.window) // self.block_size, table.end) - table.first
            )
            for block in table.blocks[: max(gone, 0)]:
                group.release(block)
            if gone > 0:
                del table.blocks[:gone]
                table.first += gone

    def release(self, owner: str) -> None:
        """Release all blocks of the owner, if it has any, last to first: the last ones are reused
        first.
        """
        for group, table in zip(self.groups, self._tables.pop(owner, []), strict=False):
            for block in reversed(table.blocks):
                group.release(block)

    def cache(self, owner: str, index: int, key: bytes) -> None:
        """Add the full block at this position of the owner's tables to the prefix cache."""
        if self.shares:
            for group, table in zip(self.groups, self._tables[owner], strict=True):
                if index >= table.first:
                    group.cache(table.blocks[index - table.first], key)

    def evict(self, owner: str) -> None:
        """Remove the owner's blocks, including shared ones, from the prefix cache."""
        for group, table in zip(self.groups, self._tables.get(owner, []), strict=False):
            for block in table.blocks:
                group.evict(block)

    def take_new_blocks(self, owner: str) -> tuple[NewBlocks, ...]:
        """For each group, the blocks added since the last call."""
        return tuple([_take_new_blocks(table) for table in self._tables[owner]])

    def resend_blocks(self, owner: str) -> None:
        """Make the next `take_new_blocks` return all blocks of the owner."""
        for table in self._tables.get(owner, ()):
            table.sent_end = table.first

    def reset_prefix_cache(self) -> None:
        """Remove all blocks from the prefix cache. Owners keep theirs."""
        for group in self.groups:
            group.key_of.clear()
            group.block_of.clear()

    def check(self) -> None:
        """Assert that reference counts, free lists and indexes are consistent."""
        without = [
            owner
            for owner, tables in self._tables.items()
            if not any(table.blocks for table in tables)
        ]
        assert not self.groups or not without, "an owner without blocks"
        for i, group in enumerate(self.groups):
            group.check([tables[i] for tables in self._tables.values()])

    def _first_blocks_read(self, num_blocks: int) -> list[int]:
        """For each group, the first block that a token after num_blocks blocks reads."""
        return [
            first_read(num_blocks * self.block_size, group.window) // self.block_size
            for group in self.groups
        ]

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def _take_new_blocks(table: BlockTable) -> NewBlocks:
    start = max(table.sent_end, table.first)
    table.sent_end = table.end
    return start, tuple(table.blocks[start - table.first :])
