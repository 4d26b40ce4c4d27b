"""Snapshots: states of sequences at block borders, from which requests with the same prefix start.

State per sequence is replaced by each token, so a prefix can be shared only where its state was
copied. A snapshot has the key of the prefix's last block (atomc.runtime.scheduling.prefix_cache).

A prompt has a snapshot at its last full block, where a request with the same or a longer prompt
continues, and at the end of the blocks that it has in common with an earlier prompt: many requests
begin with the same instructions or document, whose end is known only from the second one on. Its
chunks end there. Beyond these points a request keeps one snapshot that moves along with it: for the
next turn of a conversation, and to resume after a preemption.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from atomc.runtime.requests.request import Request

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

    Without tensors; the rows are copied by `SequenceStates`.
    """

    def __init__(self, first: int, count: int, block_size: int) -> None:
        self.block_size, self.least, self.interval = block_size, LEAST_TOKENS, INTERVAL
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

    def start(self, request: Request, num_cached: int) -> None:
        """Let an admitted request start from the state after `num_cached` blocks, and choose where
        it takes snapshots.
        """
        request.last_snapshot = num_cached * self.block_size
        if num_cached:
            snapshot = self._by_key[key := request.keys[num_cached - 1]]
            snapshot.used, request.state_from = True, snapshot.row
            self._by_key.move_to_end(key)
        request.snapshot_points = self._points(
            request.keys[: (len(request.tokens) - 1) // self.block_size], num_cached
        )

    def due(self, request: Request, end: int) -> bool:
        """Whether the state of a running request after `end` tokens becomes a snapshot."""
        aligned = request.shares_prefix and not end % self.block_size
        return aligned and (
            end in request.snapshot_points or end - request.last_snapshot >= self.interval
        )

    def take(self, request: Request, end: int) -> int | None:
        """The row for a snapshot after `end` tokens, if one is due and a row is not reserved.
        `finish` or `drop` follows.
        """
        if not self.due(request, end):
            return None
        if not self._free and self._by_key:
            self.evict(next(iter(self._by_key)))
        if not self._free:
            return None
        row = self._free.pop()
        self._reserved.add(row)
        request.last_snapshot = end
        return row

    def finish(self, row: int, request: Request | None, end: int, admission: int) -> bool:
        """Index a row that a finished step has written: the state after `end` tokens of the
        request. False if it is freed instead: there is one already, or the request has failed
        (None).

        admission   num_admissions of the request when the step was scheduled
        """
        key = self._key(request, end)
        if request is None or key is None or key in self._by_key:
            self.drop(row)
            return False
        self._reserved.remove(row)
        self._by_key[key] = _Snapshot(row)
        if end not in request.snapshot_points or request.num_admissions != admission:
            if request.moving_snapshot is not None:
                self.evict(request.moving_snapshot, unused=True)
            request.moving_snapshot = key
        return True

    def _key(self, request: Request | None, end: int) -> bytes | None:
        """The key of the first `end` tokens; None if the request has failed, or ended before."""
        number = end // self.block_size
        if request is None or request.finish_reason in ("abort", "error"):
            return None
        return request.keys[number - 1] if number <= len(request.keys) else None

    def _points(self, keys: Sequence[bytes], num_cached: int) -> tuple[int, ...]:
        """Positions at which a request takes snapshots; its prompt is remembered.

        keys        of its full blocks before the last token
        num_cached  number of leading blocks that it has from the cache
        """
        num_seen = next((n for n in range(len(keys), 0, -1) if keys[n - 1] in self._seen), 0)
        for key in keys:
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > MOST_KEYS_SEEN:
            self._seen.popitem(last=False)
        last, points = num_cached * self.block_size, []
        for end in sorted({num_seen * self.block_size, len(keys) * self.block_size}):
            if end - last >= self.least:
                points.append(end)
                last = end
        return tuple(points)

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
