"""Which cached blocks a request starts from, and what a request adds to the prefix cache."""

from collections.abc import Iterable

from atomc.runtime.requests.request import Request
from atomc.runtime.requests.request_errors import RequestErrors
from atomc.runtime.scheduling.blocks import BlockPool
from atomc.runtime.scheduling.prefix_cache import extend_keys
from atomc.runtime.scheduling.snapshots import Snapshots


class PrefixSharing:
    """The prefixes that requests share: blocks of the pool, and with state per sequence snapshots.

    For each request: `num_cached_blocks` and `must_wait` while it waits, `start` when it is
    admitted, `cache_full_blocks` after its steps, `stop` when it runs no longer.

    snapshots   None: there is no state per sequence, or no prefix is shared
    """

    def __init__(
        self, pool: BlockPool, snapshots: Snapshots | None, request_errors: RequestErrors
    ) -> None:
        self.pool, self.snapshots, self.request_errors = pool, snapshots, request_errors
        # Keys of blocks that running requests will fill, with the request. If prefixes need a
        # snapshot: only of the blocks after which one will be taken.
        self._in_progress: dict[bytes, Request] = {}

    def num_cached_blocks(self, request: Request) -> int:
        """Number of leading blocks in the prefix cache. At least one token is left to compute; 0 if
        every row is needed (mean pooling, prompt_logprobs).
        """
        if not self.pool.shares or request.pooling == "mean" or request.scores_prompt:
            return 0
        return (
            self.request_errors.run(
                request.id, "looking up its prefix in the cache", self._match, request
            )
            or 0
        )

    def must_wait(self, request: Request) -> bool:
        """Whether a running request will compute the next block that this one needs, or take a
        snapshot from which this one could start.
        """
        if not self._in_progress:
            return False
        num_cached = self.num_cached_blocks(request)
        missing = request.keys[num_cached : (len(request.tokens) - 1) // self.pool.block_size]
        if self.snapshots is None:
            missing = missing[:1]  # blocks are filled in order
        return any(key in self._in_progress for key in missing)

    def start(self, request: Request, num_cached: int) -> None:
        """The request runs, from the end of its first `num_cached` blocks on."""
        request.num_cached_blocks, request.shares_prefix = num_cached, True
        if self.snapshots is None:
            keys = request.keys[num_cached:]
        else:
            self.snapshots.start(request, num_cached)
            block_size = self.pool.block_size
            keys = [request.keys[point // block_size - 1] for point in request.snapshot_points]
        for key in keys:
            self._in_progress.setdefault(key, request)

    def stop(self, request: Request) -> None:
        """The request computes no more blocks."""
        for key in request.keys[request.num_cached_blocks :]:
            self._forget(key, request)

    def cache_full_blocks(self, request: Request, computed: int) -> None:
        """Add full blocks of computed tokens to the prefix cache."""
        full = min(computed, len(request.tokens)) // self.pool.block_size
        shares = self.pool.shares and request.shares_prefix
        if request.num_cached_blocks >= full or not shares:
            return
        extend_keys(request, self.pool.block_size)
        for place in range(request.num_cached_blocks, full):
            key = request.keys[place]
            self.pool.cache(request.id, place, key)
            self._forget(key, request)
        request.num_cached_blocks = full

    def evict(self, request: Request) -> None:
        """Remove what the request computed, and what it shares."""
        self.pool.evict(request.id)
        if self.snapshots is not None:
            for key in request.keys:
                self.snapshots.evict(key)

    def clear(self, running: Iterable[Request] = ()) -> None:
        """Forget all prefixes; what the running requests compute is not shared either. No step may
        be in flight.
        """
        self.pool.reset_prefix_cache()
        self._in_progress.clear()
        if self.snapshots is not None:
            self.snapshots.clear()
        for request in running:
            request.shares_prefix = False
            request.snapshot_points, request.moving_snapshot = (), None

    def check(self) -> None:
        """Assert that only running requests compute blocks."""
        owners = {request.id for request in self._in_progress.values()}
        assert owners <= self.pool.owners, "keys of a request that is not running"

    def _match(self, request: Request) -> int:
        extend_keys(request, self.pool.block_size)
        keys = request.keys[: (len(request.tokens) - 1) // self.pool.block_size]
        if self.snapshots is not None:
            return self.snapshots.match(keys, self.pool.match)
        return self.pool.match(keys)

    def _forget(self, key: bytes, request: Request) -> None:
        """The request does not compute the block with this key any more."""
        if self._in_progress.get(key) is request:
            del self._in_progress[key]
