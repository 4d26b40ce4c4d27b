"""POST /v1/responses, and the endpoints of stored responses."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from atomc.files.json_types import JSONObject
from atomc.runtime.server.chat.chat import Chat, ChoiceDelta, start_chat
from atomc.runtime.server.http.responses import SSE_DONE, APIError, invalid, sse_event
from atomc.runtime.server.responses.events import Event, OutputItems
from atomc.runtime.server.responses.items import input_items, new_id
from atomc.runtime.server.responses.request import ResponsesRequest, chat_request, check_supported
from atomc.runtime.server.responses.response import DeletedResponse, InputItems
from atomc.runtime.server.service.generation import Answer
from atomc.runtime.server.service.logprobs import chat_logprobs, encoded
from atomc.runtime.server.service.protocol import ChatRequest, RequestModel
from atomc.runtime.server.service.response_store import StoredResponse, item_bytes
from atomc.runtime.server.service.service import Service

# Fields of a chat request -> those of this API, for errors.
PARAMS = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
}
MAX_LISTED = 100


async def create_response(service: Service, body: ResponsesRequest, request: Request) -> Response:
    """Answer items of a conversation, and store the response."""
    check_supported(body)
    previous = None
    if body.previous_response_id is not None:
        name = body.previous_response_id
        previous = _stored(service, request, name, "previous_response_id")
    # In a thread: the input can have many items.
    conversation, chat_body = await asyncio.to_thread(_translate, body, previous)
    try:
        chat = await start_chat(service, chat_body, request)
    except APIError as error:
        error.param = PARAMS.get(error.param or "", error.param)
        raise
    return await ResponsesAnswer(body, conversation, chat).respond()


@dataclass(frozen=True)
class _Conversation:
    """The items before a response; num_bytes: item_bytes of them."""

    items: Sequence[JSONObject]
    num_bytes: int


def _translate(
    body: ResponsesRequest, previous: StoredResponse | None
) -> tuple[_Conversation, ChatRequest]:
    before = [] if previous is None else [*previous.input, *previous.output]
    items_of_body = input_items(body.input, before)
    # The response repeats both. When it is built, it is too late for a 400 for lone surrogates.
    msgspec.json.encode([items_of_body, body.model_dump(exclude={"input"})])
    items = [*before, *items_of_body]
    num_bytes = item_bytes(items_of_body) + (0 if previous is None else previous.conversation_bytes)
    return _Conversation(items, num_bytes), chat_request(body, items)


async def refuse_compact(service: Service) -> Response:
    raise APIError(
        404,
        "no endpoint POST /v1/responses/compact: this server does not compact conversations; "
        "ask the model for a summary, and send it instead of the older items",
    )


async def retrieve_response(
    service: Service, response_id: str, request: Request, stream: bool = False
) -> Response:
    """Get a stored response."""
    stored = _stored(service, request, response_id, "response_id")
    if stream:
        raise invalid("a stored response cannot be streamed: retrieve it without stream", "stream")
    return Response(stored.body, media_type="application/json")


async def delete_response(service: Service, response_id: str, request: Request) -> DeletedResponse:
    """Delete a stored response."""
    _stored(service, request, response_id, "response_id")
    service.responses.delete(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


async def list_input_items(
    service: Service,
    response_id: str,
    request: Request,
    order: Literal["asc", "desc"] = "desc",
    limit: int = 20,
    after: str | None = None,
) -> InputItems:
    """List the conversation before a stored response."""
    stored = _stored(service, request, response_id, "response_id")
    if not 1 <= limit <= MAX_LISTED:
        raise invalid(f"limit is {limit}, expected 1 to {MAX_LISTED}", "limit")
    items = stored.input if order == "asc" else stored.input[::-1]
    if after is not None:
        names = [item["id"] for item in items]
        if after not in names:
            raise invalid(f"after is {after!r:.80}, expected the id of an input item", "after")
        items = items[names.index(after) + 1 :]
    listed = list(items[:limit])
    return {
        "object": "list",
        "data": listed,
        "first_id": str(listed[0]["id"]) if listed else None,
        "last_id": str(listed[-1]["id"]) if listed else None,
        "has_more": len(items) > limit,
    }


def _stored(service: Service, request: Request, name: str, param: str) -> StoredResponse:
    stored = service.responses.get(name, request.state.caller)
    if stored is None:
        raise APIError(
            404,
            f"response {name!r:.80} does not exist: it was not stored, was deleted, made room "
            "for others, or was made with another API key",
            param=param,
            code="response_not_found",
        )
    return stored


class ResponsesAnswer(Answer[ResponsesRequest]):
    """An Answer as a response of the Responses API. conversation: that it answers."""

    def __init__(self, body: ResponsesRequest, conversation: _Conversation, chat: Chat) -> None:
        super().__init__(body, chat.generation)
        self.conversation, self.chat = conversation, chat
        # Not the request's id, which a client chooses: whoever knows it can retrieve the response.
        self.id = new_id("resp")
        self.store = body.store is not False and self.service.responses.max_bytes > 0
        self.output = OutputItems()
        self.status = "in_progress"
        self._numbers = count()

    async def complete(self) -> Event:
        async for delta in self.chat:
            for _ in self._events(delta):
                pass
        return self._finished()

    async def events(self) -> AsyncIterator[bytes]:
        for kind in ("created", "in_progress"):
            yield self._response_event(kind, self._response())
        async for delta in self.chat:
            if events := b"".join(map(self._numbered, self._events(delta))):
                yield events
        response = self._finished()
        yield self._response_event(self.status, response) + SSE_DONE

    def failure(self, error: APIError) -> bytes:
        self.status = "failed"
        self.output.interrupt()
        fields = {"code": error.code or error.kind, "message": error.message, "param": error.param}
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        response = self._response(error={"code": code, "message": error.message})
        event = self._numbered({"type": "error", **fields})
        return event + self._response_event("failed", response) + SSE_DONE

    def _response_event(self, kind: str, response: Event) -> bytes:
        return self._numbered({"type": f"response.{kind}", "response": response})

    def _numbered(self, event: Event) -> bytes:
        event["sequence_number"] = next(self._numbers)
        return sse_event(event, event["type"])

    def _events(self, delta: ChoiceDelta) -> Iterator[Event]:
        logprobs: list[msgspec.Raw] = []
        if self.body.logprobs and delta.logprobs:
            scores = chat_logprobs(self.service.model, delta.logprobs, self.body.top_logprobs or 0)
            logprobs = encoded(scores["content"])
        yield from self.output.add(delta, logprobs)
        if delta.finish_reason is not None:
            self.status = "incomplete" if delta.finish_reason == "length" else "completed"
            yield from self.output.finish(self.status == "completed")

    def _finished(self) -> Event:
        """The response; it is stored before the client gets it."""
        response = self._response()
        if self.store:
            self.service.responses.put(
                StoredResponse(
                    self.id,
                    self.request.state.caller,
                    msgspec.json.encode(response),
                    self.conversation.items,
                    self.conversation.num_bytes,
                    self.output.conversation_items(),
                )
            )
        return response

    def _response(self, error: dict[str, str] | None = None) -> Event:
        body, finished = self.body, self.status in ("completed", "incomplete")
        incomplete = {"reason": "max_output_tokens"} if self.status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if self.status == "completed" else None,
            "status": self.status,
            "error": error,
            "incomplete_details": incomplete,
            "model": self.generation.model_name,
            "output": self.output.items() if self.status != "in_progress" else [],
            "usage": self._usage() if finished else None,
            **self._settings(),
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": self.store,
            "truncation": "disabled",
            "user": body.user,
        }

    def _settings(self) -> Event:
        """How the output was chosen, with defaults."""
        body, params = self.body, self.generation.params
        choice, text, reasoning = body.tool_choice, body.text, body.reasoning
        format = (
            {"type": "text"}
            if text is None or text.format is None
            else text.format.model_dump(by_alias=True, exclude_unset=True)
        )
        return {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "top_logprobs": body.top_logprobs or 0,
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "tool_choice": choice.model_dump()
            if isinstance(choice, RequestModel)
            else choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "text": {"format": format},
            "reasoning": {
                "effort": reasoning.effort if reasoning is not None else None,
                "summary": None,
            },
        }

    def _usage(self) -> Event:
        usage = self.chat.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            # Writing to the prefix cache costs nothing, so no tokens are counted for it.
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
