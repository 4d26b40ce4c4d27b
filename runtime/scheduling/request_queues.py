"""The requests that wait and those that run, in order, and the slots of the running ones."""

from bisect import insort
from collections.abc import Iterable

from atomc.runtime.requests.request import Request


class RequestQueues:
    """`running` requests have a slot, `waiting` ones do not. Both lists are sorted by arrival; with
    by_priority by priority (lowest value first), then by arrival.

    requests    all of them, by id
    num_pooled  how many of them pool
    """

    def __init__(self, num_slots: int, *, by_priority: bool) -> None:
        self.num_slots, self.by_priority = num_slots, by_priority
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.num_pooled = 0
        self._num_added = 0
        self._free_slots = list(reversed(range(num_slots)))
        # Slots released since the last step.
        self._released: set[int] = set()

    @property
    def has_slot(self) -> bool:
        return bool(self._free_slots)

    def add(self, request: Request) -> None:
        request.number = self._num_added
        self._num_added += 1
        self.num_pooled += request.pooling is not None
        self.requests[request.id] = request
        insort(self.waiting, request, key=self._rank)

    def start(self, request: Request) -> None:
        """Give a waiting request a slot."""
        self.waiting.remove(request)
        insort(self.running, request, key=self._rank)
        request.slot = self._free_slots.pop()

    def stop(self, request: Request) -> None:
        """Let a running request wait again."""
        self._release_slot(request)
        insort(self.waiting, request, key=self._rank)

    def remove(self, request: Request) -> None:
        if request.slot is None:
            self.waiting.remove(request)
        else:
            self._release_slot(request)
        self.num_pooled -= request.pooling is not None
        del self.requests[request.id]

    def take_released(self) -> tuple[int, ...]:
        """The slots that were released since the last call."""
        released = tuple(sorted(self._released))
        self._released.clear()
        return released

    def undo_take(self, released: Iterable[int]) -> None:
        """Return slots that the last call returned."""
        self._released.update(released)

    def check(self) -> None:
        """Assert that each request is in one queue, and each slot has one owner."""
        queued = sorted(request.id for request in (*self.running, *self.waiting))
        assert sorted(self.requests) == queued, "a request is missing or queued twice"
        slots = [request.slot for request in self.running if request.slot is not None]
        assert len(slots) == len(self.running), "a running request has no slot"
        assert sorted(slots + self._free_slots) == list(range(self.num_slots)), (
            "a slot is lost or has two owners"
        )
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=self._rank), "a queue is not sorted"

    def _release_slot(self, request: Request) -> None:
        assert request.slot is not None
        self.running.remove(request)
        self._free_slots.append(request.slot)
        self._released.add(request.slot)
        request.slot = request.state_from = None

    def _rank(self, request: Request) -> tuple[int, int]:
        return (request.priority if self.by_priority else 0, request.number)
