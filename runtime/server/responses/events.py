"""Output items, and the events of a stream, from the deltas of a chat.

An item is open while deltas of its kind arrive; one of another kind closes it and opens the next.
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeAlias

import msgspec

from atomc.files.json_types import JSONObject
from atomc.runtime.server.chat.chat import ChoiceDelta
from atomc.runtime.server.parsers.message_deltas import (
    ContentDelta,
    MessageDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from atomc.runtime.server.responses.items import ITEM_TYPES, new_id

# Values of any JSON type, and msgspec.Raw.
Event: TypeAlias = dict[str, Any]
Logprobs: TypeAlias = Sequence[msgspec.Raw]


class _Item:
    """One item, and its text so far. kind: its type. events: how the names of its events begin."""

    kind: ClassVar[str]
    events: ClassVar[str]

    def __init__(self) -> None:
        self.id = new_id(ITEM_TYPES[self.kind])
        self.texts: list[str] = []
        self.status = "in_progress"

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self) -> Event:
        """The content part of an item that has one."""
        raise NotImplementedError

    def fields(self) -> Event:
        """Those of this type only."""
        return {"content": [self.part()] if self.status != "in_progress" else []}

    def item(self) -> Event:
        return {"id": self.id, "type": self.kind, "status": self.status, **self.fields()}


class _Message(_Item):
    kind, events = "message", "response.output_text"

    def __init__(self) -> None:
        super().__init__()
        self.logprobs: list[msgspec.Raw] = []

    def part(self) -> Event:
        part = {"type": "output_text", "text": self.text, "annotations": []}
        return part | {"logprobs": list(self.logprobs)}

    def fields(self) -> Event:
        return {"role": "assistant", **super().fields()}


class _Reasoning(_Item):
    kind, events = "reasoning", "response.reasoning_text"

    def part(self) -> Event:
        return {"type": "reasoning_text", "text": self.text}

    def fields(self) -> Event:
        return {"summary": [], **super().fields()}


class _FunctionCall(_Item):
    kind, events = "function_call", "response.function_call_arguments"

    def __init__(self, call_id: str, name: str) -> None:
        super().__init__()
        self.call_id, self.name = call_id, name

    def fields(self) -> Event:
        return {"call_id": self.call_id, "name": self.name, "arguments": self.text}


class OutputItems:
    """The items of one response. `add` each delta, then `finish`; both yield events, without
    sequence numbers.

    Log-probabilities are of the item that is open after them, the first ones of the first item.
    """

    def __init__(self) -> None:
        self._items: list[_Item] = []
        self._logprobs: list[msgspec.Raw] = []

    def items(self) -> list[Event]:
        return [item.item() for item in self._items]

    def conversation_items(self) -> list[JSONObject]:
        """The items as those of a later request have them: without log-probabilities."""
        items = self.items()
        for item in items:
            for part in item.get("content", ()):
                part.pop("logprobs", None)
        return items

    def add(self, delta: ChoiceDelta, logprobs: Logprobs) -> Iterator[Event]:
        self._logprobs += logprobs
        last = len(delta.deltas) - 1
        for number, part in enumerate(delta.deltas):
            yield from self._add(part, last=number == last)
        item = self._items[-1] if self._items else None
        if item is None:
            return
        if isinstance(item, _Message) and self._logprobs:
            yield self._delta("")  # tokens without text
        self._logprobs.clear()

    def finish(self, complete: bool) -> Iterator[Event]:
        """Closes the last item. A response without text is an empty message."""
        if not self._items:
            yield from self._open(_Message())
        yield from self._close("completed" if complete else "incomplete")

    def interrupt(self) -> None:
        """The last item ends here, without events."""
        if self._items:
            self._items[-1].status = "incomplete"

    def _add(self, delta: MessageDelta, last: bool) -> Iterator[Event]:
        item = self._items[-1] if self._items else None
        match delta:
            case ToolCallStart(_, call_id, name):
                yield from self._open(_FunctionCall(call_id, name))
                return
            case ToolCallArguments():
                assert isinstance(item, _FunctionCall), "arguments follow the start of their call"
            case ContentDelta() if not isinstance(item, _Message):
                yield from self._open(_Message())
            case ReasoningDelta() if not isinstance(item, _Reasoning):
                yield from self._open(_Reasoning())
        yield self._delta(delta.text, with_logprobs=last)

    def _delta(self, text: str, with_logprobs: bool = True) -> Event:
        item = self._items[-1]
        item.texts.append(text)
        event = self._event(f"{item.events}.delta") | {"delta": text}
        if isinstance(item, _Message):
            event["logprobs"] = self._logprobs.copy() if with_logprobs else []
            if with_logprobs:
                item.logprobs += self._logprobs
                self._logprobs.clear()
        return event

    def _open(self, item: _Item) -> Iterator[Event]:
        if self._items:
            yield from self._close("completed")
        self._items.append(item)
        yield self._item_event("added")
        if not isinstance(item, _FunctionCall):
            yield self._event("response.content_part.added") | {"part": item.part()}

    def _close(self, status: str) -> Iterator[Event]:
        item = self._items[-1]
        item.status = status
        done = self._event(f"{item.events}.done")
        if isinstance(item, _FunctionCall):
            yield done | {"name": item.name, "arguments": item.text}
        else:
            part = item.part()
            if isinstance(item, _Message):
                done["logprobs"] = part["logprobs"]
            yield done | {"text": part["text"]}
            yield self._event("response.content_part.done") | {"part": part}
        yield self._item_event("done")

    def _item_event(self, what: str) -> Event:
        index = len(self._items) - 1
        item = self._items[index].item()
        return {"type": f"response.output_item.{what}", "output_index": index, "item": item}

    def _event(self, kind: str) -> Event:
        """An event of the open item."""
        item = self._items[-1]
        event = {"type": kind, "item_id": item.id, "output_index": len(self._items) - 1}
        return event if isinstance(item, _FunctionCall) else event | {"content_index": 0}
