"""Snapshots: states of sequences at block borders, from which requests with the same prefix start.

State per sequence is replaced by each token, so a prefix can be shared only where its state was
copied. A snapshot has the key of the prefix's last block (atomc.runtime.prefix_cache).

A prompt has a snapshot at its last full block, where a request with the same or a longer prompt
continues, and at the end of the blocks that it has in common with an earlier prompt: many requests
begin with the same instructions or document, whose end is known only from the second one on. Its
chunks end there. Beyond these points a request keeps one snapshot that moves along with it: for the
next turn of a conversation, and to resume after a preemption.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

# A snapshot of fewer new tokens saves less time than the step that ends at it costs.
LEAST_TOKENS = 64
# Between two snapshots of a request that computes: after a preemption it repeats at most this many
# tokens and the rest of a block.
INTERVAL = 256
MOST_KEYS_SEEN = 2**16


@dataclass
class _Snapshot:
    row: int
    used: bool = False


class Snapshots:
    """The rows of snapshots, by key. A row is free, reserved by a step in flight, or in the index;
    the least recently used of these is evicted for the next one.

    first, count   the rows (StateRows)
    least, interval   LEAST_TOKENS and INTERVAL

    Without tensors; the rows are copied by `SequenceStates`.
    """

    def __init__(
        self,
        first: int,
        count: int,
        block_size: int,
        *,
        least: int = LEAST_TOKENS,
        interval: int = INTERVAL,
    ) -> None:
        self.block_size, self.least, self.interval = block_size, least, interval
        self._rows = range(first, first + count)
        self._free = list(reversed(self._rows))
        self._reserved: set[int] = set()
        self._by_key: OrderedDict[bytes, _Snapshot] = OrderedDict()
        # Keys of the prompts of the last requests; the most recent last.
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_cached(self) -> int:
        return len(self._by_key)

    def match(self, keys: Sequence[bytes], blocks: Callable[[Sequence[bytes]], int]) -> int:
        """Number of leading blocks whose state has a snapshot and which are all cached.

        blocks   number of leading blocks that are cached, for these keys
        """
        count = len(keys)
        while count:
            count = next((n for n in range(count, 0, -1) if keys[n - 1] in self._by_key), 0)
            cached = blocks(keys[:count])
            if cached == count:
                break
            count = cached
        return count

    def use(self, key: bytes) -> int:
        """The row of the snapshot with this key, which is now the most recently used one."""
        self._by_key.move_to_end(key)
        self._by_key[key].used = True
        return self._by_key[key].row

    def points(self, keys: Sequence[bytes], found: int) -> tuple[int, ...]:
        """Positions at which a request takes snapshots; its prompt is remembered.

        keys    of its full blocks before the last token
        found   number of leading blocks that it has from the cache
        """
        known = next((n for n in range(len(keys), 0, -1) if keys[n - 1] in self._seen), 0)
        for key in keys:
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > MOST_KEYS_SEEN:
            self._seen.popitem(last=False)
        last, found_points = found * self.block_size, []
        for end in sorted({known * self.block_size, len(keys) * self.block_size}):
            if end - last >= self.least:
                found_points.append(end)
                last = end
        return tuple(found_points)

    def reserve(self) -> int | None:
        """A row for a snapshot that a step takes; None if all are reserved. `cache` or `drop`
        follows.
        """
        if not self._free and self._by_key:
            _, evicted = self._by_key.popitem(last=False)
            self._free.append(evicted.row)
        if not self._free:
            return None
        row = self._free.pop()
        self._reserved.add(row)
        return row

    def cache(self, row: int, key: bytes) -> bool:
        """Index a reserved row, which has been written; False if there is a snapshot with this
        key, and the row is free.
        """
        if key in self._by_key:
            self.drop(row)
            return False
        self._reserved.remove(row)
        self._by_key[key] = _Snapshot(row)
        return True

    def drop(self, row: int) -> None:
        """Free a reserved row."""
        self._reserved.remove(row)
        self._free.append(row)

    def evict(self, key: bytes, *, unused: bool = False) -> None:
        """Remove the snapshot with this key, if there is one; unused: only if no request started
        from it.
        """
        snapshot = self._by_key.get(key)
        if snapshot is not None and not (unused and snapshot.used):
            del self._by_key[key]
            self._free.append(snapshot.row)

    def clear(self) -> None:
        """Forget all snapshots and prompts. No row may be reserved."""
        assert not self._reserved, "a step in flight takes a snapshot"
        self._free = list(reversed(self._rows))
        self._by_key.clear()
        self._seen.clear()

    def check(self, reserved: Set[int]) -> None:
        """Assert that each row has one use. reserved: the rows of the steps in flight."""
        assert self._reserved == reserved, "a reserved row belongs to no step in flight"
        rows = [snapshot.row for snapshot in self._by_key.values()]
        assert sorted([*self._free, *self._reserved, *rows]) == list(self._rows), (
            "a row of snapshots is lost or has two uses"
        )
