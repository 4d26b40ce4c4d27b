"""Responses that clients can retrieve and continue. They are kept in memory only."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from atomc.files.json_types import JSONObject

# Of a conversation's item, beyond its JSON.
ITEM_BYTES = 512
MAX_RESPONSES = 2**14


@dataclass(frozen=True)
class StoredResponse:
    """One response.

    caller  the number of the API key with which it was made: other keys do not see it
    body    the response object as JSON
    input   the items of the conversation that it answers. Responses to one conversation share
            them: they must not be changed
    input_bytes   item_bytes of them
    output  its own items, without log-probabilities
    """

    id: str
    caller: int
    body: bytes
    input: Sequence[JSONObject]
    input_bytes: int
    output: Sequence[JSONObject]

    @property
    def conversation_bytes(self) -> int:
        """item_bytes of input and output."""
        return self.input_bytes + item_bytes(self.output)

    def num_bytes(self) -> int:
        """An estimate that counts shared items for each response."""
        return len(self.body) + self.conversation_bytes


def item_bytes(items: Sequence[JSONObject]) -> int:
    """An estimate of their size. It encodes them, which takes long for many and for images."""
    return len(msgspec.json.encode(items)) + ITEM_BYTES * len(items)


@dataclass
class ResponseStore:
    """The responses that were used last, up to `max_bytes` and `max_responses` of them."""

    max_bytes: int
    max_responses: int = MAX_RESPONSES
    num_bytes: int = 0

    def __post_init__(self) -> None:
        self._kept: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response: StoredResponse) -> None:
        """Keeps it, unless it alone exceeds the limit, and drops the least recently used."""
        num_bytes = response.num_bytes()
        if num_bytes > self.max_bytes:
            return
        self._kept[response.id] = response, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes or len(self._kept) > self.max_responses:
            self.delete(next(iter(self._kept)))

    def get(self, name: str, caller: int) -> StoredResponse | None:
        """The response of this caller with this id."""
        if name not in self._kept or self._kept[name][0].caller != caller:
            return None
        self._kept.move_to_end(name)
        return self._kept[name][0]

    def delete(self, name: str) -> bool:
        """Whether there was one."""
        if name not in self._kept:
            return False
        self.num_bytes -= self._kept.pop(name)[1]
        return True

    def check(self) -> None:
        assert self.num_bytes == sum(size for _, size in self._kept.values())
        assert self.num_bytes <= self.max_bytes and len(self._kept) <= self.max_responses
