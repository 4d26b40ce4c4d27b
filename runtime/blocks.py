"""Who owns which blocks of the caches."""

from collections.abc import Set


class BlockPool:
    """num_blocks blocks of block_size tokens. An owner has a table: block i holds its tokens i * block_size onwards.

    Raises ValueError for sizes below 1.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens is empty, both must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Taken from the end: what was released last is used first, and may still be in a processor's cache.
        self._free = list(reversed(range(num_blocks)))
        self._tables: dict[str, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_tokens(self) -> int:
        """Tokens that all blocks hold together."""
        return self.num_blocks * self.block_size

    @property
    def owners(self) -> Set[str]:
        return self._tables.keys()

    def table(self, owner: str) -> tuple[int, ...]:
        """The owner's blocks in the order of its tokens; empty if it has none."""
        return tuple(self._tables.get(owner, ()))

    def reserve(self, owner: str, num_tokens: int) -> bool:
        """Extend the owner's table to num_tokens. False, and nothing changed, if the free blocks do not last."""
        owned = len(self._tables.get(owner, ()))
        missing = -(-num_tokens // self.block_size) - owned
        if missing > len(self._free):
            return False
        if missing > 0:
            self._tables.setdefault(owner, []).extend(self._free.pop() for _ in range(missing))
        return True

    def release(self, owner: str) -> None:
        """Free all blocks of the owner, which may have none."""
        self._free.extend(reversed(self._tables.pop(owner, [])))

    def check(self) -> None:
        """Assert that each block is free or has one owner."""
        owned = [block for table in self._tables.values() for block in table]
        assert all(self._tables.values()), "an owner without blocks"
        assert sorted(owned + self._free) == list(range(self.num_blocks)), "a block is lost, or is in two places"
