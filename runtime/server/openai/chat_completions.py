"""POST /v1/chat/completions."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from atomc.runtime.requests.request import TokenLogprobs
from atomc.runtime.server.chat.chat import Chat, ChoiceDelta, start_chat
from atomc.runtime.server.http.responses import SSE_DONE, TextEvents, sse_event
from atomc.runtime.server.parsers.message_deltas import (
    ContentDelta,
    MessageDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    merge_deltas,
)
from atomc.runtime.server.service import response_types as types
from atomc.runtime.server.service.generation import Answer
from atomc.runtime.server.service.logprobs import chat_logprobs, encoded, prompt_logprobs
from atomc.runtime.server.service.protocol import ChatRequest
from atomc.runtime.server.service.service import Service


async def chat(service: Service, body: ChatRequest, request: Request) -> Response:
    """Answer a chat."""
    return await ChatAnswer(body, await start_chat(service, body, request)).respond()


@dataclass
class _ChoiceState:
    """One choice of a response without stream: its deltas and log-probabilities so far."""

    deltas: list[MessageDelta] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[types.ChatTokenLogprob | msgspec.Raw] = field(
        default_factory=list
    )  # encoded per delta, to keep the event loop free
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatAnswer(Answer[ChatRequest]):
    """An Answer as a chat completion."""

    def __init__(self, body: ChatRequest, chat: Chat) -> None:
        super().__init__(body, chat.generation)
        self.chat, self.id = chat, f"chatcmpl-{self.request_id}"

    async def complete(self) -> types.ChatCompletion:
        states = [_ChoiceState() for _ in range(self.body.n)]
        async for delta in self.chat:
            state = states[delta.index]
            state.deltas += delta.deltas
            state.tokens += delta.tokens
            state.finish_reason, state.stop_reason = delta.finish_reason, delta.stop_reason
            if self.body.logprobs:
                state.logprobs += encoded(self._logprobs(delta.logprobs)["content"])
        choices: list[types.ChatChoice] = [
            {
                "index": index,
                "message": _message(state.deltas),
                "logprobs": {"content": state.logprobs, "refusal": None}
                if self.body.logprobs
                else None,
                "finish_reason": state.finish_reason,
                "stop_reason": state.stop_reason,
            }
            for index, state in enumerate(states)
        ]
        response: types.ChatCompletion = {
            "id": self.id,
            "created": self.created,
            "model": self.generation.model_name,
            "object": "chat.completion",
            "choices": choices,
            "usage": self.chat.usage(),
        }
        if self.body.prompt_logprobs is not None:
            scored = next(iter(self.generation.choices.values())).prompt_logprobs or ()
            response["prompt_logprobs"] = await asyncio.to_thread(
                prompt_logprobs, self.service.model, scored
            )
        if self.body.return_token_ids:
            response["prompt_token_ids"] = self.generation.prompts[0]
            for choice, state in zip(choices, states, strict=True):
                choice["token_ids"] = state.tokens
        return response

    async def events(self) -> AsyncIterator[bytes]:
        body, started = self.body, set[int]()
        texts: dict[int, TextEvents] = {}
        if not (
            body.logprobs
            or body.return_token_ids
            or body.effective_stream_options.continuous_usage_stats
        ):
            texts = {index: self._text_events(index) for index in range(body.n)}
        async for delta in self.chat:
            match delta.deltas:
                case [ContentDelta(text)] if (
                    delta.finish_reason is None and delta.index in started and texts
                ):
                    yield texts[delta.index].encode(text)
                case _:
                    if events := b"".join(self._events(delta, started)):
                        yield events
        if body.effective_stream_options.include_usage:
            yield sse_event(self._event([]) | {"usage": self.chat.usage()})
        yield SSE_DONE

    def _text_events(self, index: int) -> TextEvents:
        """The events of a choice that have content only, after its first one."""
        chunk = _empty_chunk(index)
        return TextEvents(lambda text: self._event([{**chunk, "delta": {"content": text}}]))

    def _events(self, delta: ChoiceDelta, started: set[int]) -> Iterator[bytes]:
        """The events of a delta. started: as of _chunks."""
        is_first = not started
        for chunk in self._chunks(delta, started):
            event = self._event([chunk])
            if self.body.return_token_ids and is_first:
                event["prompt_token_ids"] = self.generation.prompts[0]
                is_first = False
            if self.body.effective_stream_options.continuous_usage_stats:
                event["usage"] = self.chat.usage()
            yield sse_event(event)

    def _event(self, choices: list[types.ChatChunkChoice]) -> types.ChatChunk:
        return {
            "id": self.id,
            "created": self.created,
            "model": self.generation.model_name,
            "object": "chat.completion.chunk",
            "choices": choices,
        }

    def _chunks(self, delta: ChoiceDelta, started: set[int]) -> list[types.ChatChunkChoice]:
        """One chunk per message delta; the first has the log-probabilities and tokens. A separate
        last one has the finish reason. started: the choices that had a chunk, to which this one is
        added.
        """
        deltas = [_delta(part) for part in delta.deltas]
        if delta.index not in started and (deltas or delta.tokens or delta.finish_reason):
            started.add(delta.index)
            deltas = deltas or [{"content": ""}]
            deltas[0] = {"role": "assistant", **deltas[0]}
        empty = _empty_chunk(delta.index)
        chunks: list[types.ChatChunkChoice] = [{**empty, "delta": part} for part in deltas]
        if self.body.logprobs and delta.logprobs:
            chunks = chunks or [empty.copy()]
            chunks[0]["logprobs"] = self._logprobs(delta.logprobs)
        if self.body.return_token_ids and delta.tokens:
            chunks = chunks or [empty.copy()]
            chunks[0]["token_ids"] = delta.tokens
        if delta.finish_reason is not None:
            chunks.append(
                {**empty, "finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            )
        return chunks

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> types.ChatLogprobs:
        return chat_logprobs(self.service.model, logprobs, self.body.top_logprobs or 0)


def _empty_chunk(index: int) -> types.ChatChunkChoice:
    return {"index": index, "delta": {}, "logprobs": None, "finish_reason": None}


def _delta(delta: MessageDelta) -> types.ChatDelta:
    match delta:
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ContentDelta(text):
            return {"content": text}
        case ToolCallStart(index, call_id, name):
            function: types.FunctionCall = {"name": name, "arguments": ""}
            return {
                "tool_calls": [
                    {"index": index, "id": call_id, "type": "function", "function": function}
                ]
            }
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _message(deltas: Sequence[MessageDelta]) -> types.ChatMessage:
    """The message that the deltas add up to; content is null if there are only tool calls."""
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    calls: list[types.ToolCall] = []
    for delta in merge_deltas(deltas):
        if isinstance(delta, ToolCallStart):
            calls.append(
                {
                    "id": delta.id,
                    "type": "function",
                    "function": {"name": delta.name, "arguments": ""},
                }
            )
        elif isinstance(delta, ToolCallArguments):
            calls[delta.index]["function"]["arguments"] += delta.text
    message: types.ChatMessage = {
        "role": "assistant",
        "content": content if content or not calls else None,
        "refusal": None,
    }
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message
