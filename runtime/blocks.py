"""Who owns which blocks of the caches, in groups of layers that are paged alike."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from atomc.runtime.prefix_cache import first_read, longest_match

NO_LIMIT = 2**62
NewBlocks = tuple[int, tuple[int, ...]]  # place of the first in the table, and the blocks


class Group:
    """The blocks of one group: who uses them, which are free, and what the full ones hold.

    A free block may still hold something; it can be used for that again until it is taken for
    something else, the longest unused first.
    """

    def __init__(self, num_blocks: int, window: int) -> None:
        self.num_blocks, self.window = num_blocks, window
        self.users = [0] * num_blocks
        # In the order in which they are taken: those that hold nothing come first, the last one
        # released first of all, which may still be in a processor's cache.
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.key_of: dict[int, bytes] = {}
        self.block_of: dict[bytes, int] = {}

    def take(self) -> int:
        """A free block, which holds nothing any more."""
        block, _ = self.free.popitem(last=False)
        self.unname(block)
        self.users[block] = 1
        return block

    def share(self, key: bytes) -> int:
        """The block of this key, with one user more."""
        block = self.block_of[key]
        if not self.users[block]:
            del self.free[block]
        self.users[block] += 1
        return block

    def drop(self, block: int) -> None:
        """One user less."""
        self.users[block] -= 1
        if not self.users[block]:
            self.free[block] = None
            self.free.move_to_end(block, last=block in self.key_of)

    def name(self, block: int, key: bytes) -> None:
        """From now on the block can be found by this key, unless there is another of the same."""
        if key not in self.block_of and block not in self.key_of:
            self.block_of[key] = block
            self.key_of[block] = key

    def unname(self, block: int) -> None:
        """The block can no longer be found."""
        key = self.key_of.pop(block, None)
        if key is not None:
            del self.block_of[key]

    def check(self, tables: Sequence["Table"]) -> None:
        users = [0] * self.num_blocks
        for table in tables:
            assert len(set(table.blocks)) == len(table.blocks), (
                "a block is in two places of one table"
            )
            for block in table.blocks:
                users[block] += 1
        assert users == self.users, "a block is lost, or its users are counted wrong"
        assert {i for i, count in enumerate(users) if not count} == set(self.free), (
            "free and unused blocks differ"
        )
        assert {key: block for block, key in self.key_of.items()} == self.block_of, (
            "keys and blocks differ"
        )


@dataclass
class Table:
    """An owner's blocks of one group: blocks[i] holds its tokens (first + i) * block_size onwards.

    told   blocks up to this place are known to whoever asked for what is new
    """

    first: int = 0
    blocks: list[int] = field(default_factory=list)
    told: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)


class BlockPool:
    """num_blocks blocks of block_size tokens in each group.

    windows   one for each group: 0 keeps all tokens of an owner; n lets go of blocks that nobody
              reads any more. Without groups nothing is kept per token, and there is always room
    shares    whether owners may share full blocks that hold the same

    Raises ValueError for sizes below 1.
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
        if min(counts, default=1) < 1 or block_size < 1:
            raise ValueError(
                f"a pool of {min(counts, default=0)} blocks of {block_size} tokens is empty, "
                "both must be at "
                "least 1"
            )
        self.block_size = block_size
        self.shares = shares
        self.groups = [Group(count, window) for count, window in zip(counts, windows, strict=True)]
        self._tables: dict[str, list[Table]] = {}

    @property
    def num_blocks(self) -> int:
        return sum(group.num_blocks for group in self.groups)

    @property
    def num_free(self) -> int:
        return sum(len(group.free) for group in self.groups)

    @property
    def num_tokens(self) -> int:
        """Tokens that a group holds which keeps all of them; where all have windows, the largest. 0
        without groups.
        """
        whole = [group.num_blocks for group in self.groups if not group.window]
        return (
            min(whole or [max([group.num_blocks for group in self.groups], default=0)])
            * self.block_size
        )

    def tokens_used(self, computed: Mapping[str, int]) -> int:
        """Of what `num_tokens` counts, the tokens held for owners with so many computed; a shared
        one counts once.
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
        """Tokens of the longest sequence that fits if it is alone; at most `most_new` of them wait
        to be read.
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
        """The owner's blocks in the order of its tokens; empty if it has none."""
        return tuple(self._tables[owner][group].blocks) if owner in self._tables else ()

    def match(self, keys: Sequence[bytes]) -> int:
        """So many leading blocks of these keys need not be computed."""
        if not (self.shares and keys):
            return 0
        windows = [group.window for group in self.groups]
        return longest_match(
            keys, self.block_size, windows, [group.block_of.__contains__ for group in self.groups]
        )

    def admit(self, owner: str, keys: Sequence[bytes], now: int, ahead: int) -> bool:
        """Give a new owner the blocks of these keys, and further ones: groups with a window up to
        `now` tokens, others up to `ahead`. False, and nothing changed, if the free blocks do not
        last.
        """
        assert owner not in self._tables, f"{owner!r} owns blocks already"
        if not self.has_room(keys, now, ahead):
            return False
        self._tables[owner] = [
            Table(first, [group.share(key) for key in keys[first:]], first)
            for group, first in zip(self.groups, self._firsts(len(keys)), strict=True)
        ]
        return self.reserve(owner, now, ahead)

    def has_room(self, keys: Sequence[bytes], now: int, ahead: int) -> bool:
        """Whether `admit` would succeed."""
        for group, first in zip(self.groups, self._firsts(len(keys)), strict=True):
            unused = sum(not group.users[group.block_of[key]] for key in keys[first:])
            if self._blocks(now if group.window else ahead) - len(keys) + unused > len(group.free):
                return False
        return True

    def reserve(self, owner: str, now: int, ahead: int | None = None) -> bool:
        """Extend the owner's tables as in `admit`. False, and nothing changed, if the free blocks
        do not last.
        """
        tables = self._tables.get(owner) or [Table() for _ in self.groups]
        missing = [
            self._blocks(now if group.window else ahead or now) - table.end
            for group, table in zip(self.groups, tables, strict=True)
        ]
        if any(count > len(group.free) for count, group in zip(missing, self.groups, strict=True)):
            return False
        for count, group, table in zip(missing, self.groups, tables, strict=True):
            table.blocks.extend(group.take() for _ in range(count))
        if not self.groups or any(table.blocks for table in tables):
            self._tables[owner] = tables
        return True

    def trim(self, owner: str, computed: int) -> None:
        """Let go of blocks that no token from position `computed` on reads."""
        for group, table in zip(self.groups, self._tables[owner], strict=True):
            gone = (
                min(first_read(computed, group.window) // self.block_size, table.end) - table.first
            )
            for block in table.blocks[: max(gone, 0)]:
                group.drop(block)
            if gone > 0:
                del table.blocks[:gone]
                table.first += gone

    def release(self, owner: str) -> None:
        """Let go of all blocks of the owner, which may have none; the last ones are taken first by
        others.
        """
        for group, table in zip(self.groups, self._tables.pop(owner, []), strict=False):
            for block in reversed(table.blocks):
                group.drop(block)

    def name(self, owner: str, place: int, key: bytes) -> None:
        """The owner's block at this place of its tables is full and holds what the key says."""
        if self.shares:
            for group, table in zip(self.groups, self._tables[owner], strict=True):
                if place >= table.first:
                    group.name(table.blocks[place - table.first], key)

    def unname(self, owner: str) -> None:
        """No block of the owner, shared ones included, is found by its key any more."""
        for group, table in zip(self.groups, self._tables.get(owner, []), strict=False):
            for block in table.blocks:
                group.unname(block)

    def news(self, owner: str) -> tuple[NewBlocks, ...]:
        """For each group, the blocks that came since this was last asked."""
        return tuple([_news(table) for table in self._tables[owner]])

    def forget_told(self, owner: str) -> None:
        """All blocks of the owner are news again."""
        for table in self._tables.get(owner, ()):
            table.told = table.first

    def drop_cached(self) -> bool:
        """Nobody finds what blocks hold any more. False, and nothing changed, if somebody uses
        one.
        """
        if self._tables:
            return False
        for group in self.groups:
            group.key_of.clear()
            group.block_of.clear()
        return True

    def check(self) -> None:
        """Assert that the users of each block are right, and that each block without one is
        free.
        """
        without = [
            owner
            for owner, tables in self._tables.items()
            if not any(table.blocks for table in tables)
        ]
        assert not self.groups or not without, "an owner without blocks"
        for i, group in enumerate(self.groups):
            group.check([tables[i] for tables in self._tables.values()])

    def _firsts(self, num_blocks: int) -> list[int]:
        """For each group, the first block that is read after so many."""
        return [
            first_read(num_blocks * self.block_size, group.window) // self.block_size
            for group in self.groups
        ]

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def _news(table: Table) -> NewBlocks:
    start = max(table.told, table.first)
    table.told = table.end
    return start, tuple(table.blocks[start - table.first :])
