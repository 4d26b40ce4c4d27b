"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import groupby

import pydantic_core
from starlette.requests import Request
from starlette.responses import Response

from atomc.runtime.server.anthropic.chat_request import generation_request, prompt_request
from atomc.runtime.server.anthropic.errors import anthropic_error
from atomc.runtime.server.anthropic.request import MessagesRequest, PromptRequest
from atomc.runtime.server.anthropic.response import (
    AnthropicMessage,
    Caller,
    Content,
    InputTokens,
    StopFields,
    delta_usage,
    message_usage,
    stop,
)
from atomc.runtime.server.chat.chat import Chat, ChoiceDelta, rendered_prompt, start_chat
from atomc.runtime.server.http.responses import APIError, sse_event
from atomc.runtime.server.parsers.message_deltas import (
    ContentDelta,
    MessageDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from atomc.runtime.server.service.generation import Answer
from atomc.runtime.server.service.protocol import JSONObject
from atomc.runtime.server.service.service import Service

# Clients send a thinking block back only with a signature; this server accepts any.
SIGNATURE = "unsigned"


async def create_message(service: Service, body: MessagesRequest, request: Request) -> Response:
    """Answer a chat, in Anthropic's format."""
    chat_body = generation_request(body)
    if not service.model.limits_reasoning:  # clients send a budget to any model
        chat_body.thinking_token_budget = None
    chat = await start_chat(service, chat_body, request, fit_max_tokens=True)
    return await MessageAnswer(body, chat).respond()


async def count_message_tokens(
    service: Service, body: PromptRequest, request: Request
) -> InputTokens:
    """Count the tokens of a chat in Anthropic's format."""
    prompt = await rendered_prompt(service, prompt_request(body), request)
    return {"input_tokens": len(prompt.tokens)}


class MessageAnswer(Answer[MessagesRequest]):
    """An Answer as a message of Anthropic's API."""

    def __init__(self, body: MessagesRequest, chat: Chat) -> None:
        super().__init__(body, chat.generation)
        self.chat = chat
        self.shows_thinking = body.thinking is None or body.thinking.display != "omitted"

    async def complete(self) -> AnthropicMessage:
        deltas: list[MessageDelta] = []
        async for last in self.chat:
            deltas += last.deltas
        blocks = groupby(deltas, _block_key)
        content = [_block(list(block), self.shows_thinking) for _, block in blocks]
        return self._message(content, self._stop(last, _calls_tools(deltas)))

    async def events(self) -> AsyncIterator[bytes]:
        """The events. The first one waits for the first token: only then it is known how much of
        the prompt was cached.
        """
        blocks = _BlockEvents(self.shows_thinking)
        started = calls_tools = False
        async for last in self.chat:
            events = [event for delta in last.deltas for event in blocks.add(delta)]
            if not started:
                events.insert(0, _event("message_start", message=self._message([], stop(None))))
                started = True
            if events:
                yield b"".join(events)
            calls_tools |= _calls_tools(last.deltas)
        usage = delta_usage(self.chat.usage())
        end = _event("message_delta", delta=self._stop(last, calls_tools), usage=usage)
        yield b"".join((*blocks.stop(), end, _event("message_stop")))

    def failure(self, error: APIError) -> bytes:
        return sse_event(anthropic_error(error, self.request_id), "error")

    def _message(self, content: list[Content], end: StopFields) -> AnthropicMessage:
        return {
            "id": f"msg_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.generation.model_name,
            "content": content,
            **end,
            "usage": message_usage(self.chat.usage()),
        }

    def _stop(self, last: ChoiceDelta, calls_tools: bool) -> StopFields:
        if isinstance(last.stop_reason, str):
            return stop("stop_sequence", last.stop_reason)
        if last.finish_reason == "length":
            # max_tokens was more than the context had left.
            num_tokens = self.generation.usage()["completion_tokens"]
            is_cut = num_tokens >= self.body.max_tokens
            reason = "max_tokens" if is_cut else "model_context_window_exceeded"
        else:
            reason = "tool_use" if calls_tools else "end_turn"
        return stop(reason)


class _BlockEvents:
    """The events of the content blocks that the deltas of a message form."""

    def __init__(self, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._index = -1
        self._open: MessageDelta | None = None  # the first delta of the open block

    def add(self, delta: MessageDelta) -> Iterator[bytes]:
        if self._open is None or _block_key(self._open) != _block_key(delta):
            yield from self.stop()
            self._index, self._open = self._index + 1, delta
            yield _event(
                "content_block_start", index=self._index, content_block=_empty_block(delta)
            )
        match delta:
            case ContentDelta(text):
                yield self._delta("text_delta", text=text)
            case ReasoningDelta(text) if self._shows_thinking:
                yield self._delta("thinking_delta", thinking=text)
            case ToolCallArguments(_, text):
                yield self._delta("input_json_delta", partial_json=text)

    def stop(self) -> Iterator[bytes]:
        """Closes the open block."""
        if isinstance(self._open, ReasoningDelta):
            yield self._delta("signature_delta", signature=SIGNATURE)
        if self._open is not None:
            yield _event("content_block_stop", index=self._index)
        self._open = None

    def _delta(self, kind: str, **fields: str) -> bytes:
        delta = {"type": kind, **fields}
        return _event("content_block_delta", index=self._index, delta=delta)


def _block_key(delta: MessageDelta) -> int | type[object]:
    """Consecutive deltas with the same key are one content block."""
    if isinstance(delta, ToolCallStart | ToolCallArguments):
        return delta.index
    return type(delta)


def _empty_block(first: MessageDelta) -> Content:
    """The content block that begins with this delta, before its text."""
    match first:
        case ContentDelta():
            return {"type": "text", "text": "", "citations": None}
        case ReasoningDelta():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case ToolCallStart(_, call_id, name):
            caller: Caller = {"type": "direct"}
            return {"type": "tool_use", "id": call_id, "name": name, "input": {}, "caller": caller}
        case ToolCallArguments():
            raise AssertionError("the arguments of a call follow its start")


def _block(deltas: Sequence[MessageDelta], shows_thinking: bool) -> Content:
    """The content block that these deltas form."""
    block = _empty_block(deltas[0])
    text = "".join(delta.text for delta in deltas if not isinstance(delta, ToolCallStart))
    match block["type"]:
        case "text":
            return {**block, "text": text}
        case "thinking":
            thinking = text if shows_thinking else ""
            return {**block, "thinking": thinking, "signature": SIGNATURE}
        case "tool_use":
            return {**block, "input": _parsed_arguments(text)}


def _parsed_arguments(text: str) -> JSONObject:
    """The arguments that the model wrote. Of text that max_tokens cut, what came before; empty if
    it is not JSON.
    """
    try:
        parsed = pydantic_core.from_json(text, allow_partial=True, allow_inf_nan=False)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _calls_tools(deltas: Sequence[MessageDelta]) -> bool:
    return any(isinstance(delta, ToolCallStart) for delta in deltas)


def _event(kind: str, **fields: object) -> bytes:
    return sse_event({"type": kind, **fields}, kind)
