"""POST /v1/chat/completions."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from atomc.runtime.logprobs import TokenLogprobs
from atomc.runtime.output import TextDelta
from atomc.runtime.sampling_params import Structured
from atomc.runtime.server.answer import Answer, hides_markers
from atomc.runtime.server.errors import invalid
from atomc.runtime.server.forced_tools import ListedCalls, NamedCall, arguments_schema, calls_schema
from atomc.runtime.server.generation import Generation
from atomc.runtime.server.http import DONE, EventStream, Json, event, request_id, while_connected
from atomc.runtime.server.limits import TOOLS, at_most, check_answers
from atomc.runtime.server.logprobs import chat_logprobs, encoded
from atomc.runtime.server.pieces import Content, Parser, Piece, Reasoning, ToolArguments, ToolStart
from atomc.runtime.server.prompts import check_number
from atomc.runtime.server.protocol import ChatRequest, Function, NamedTool
from atomc.runtime.server.reasoning import reasoning_parser
from atomc.runtime.server.sampling import (
    check_fits,
    check_logprobs,
    checked_form,
    sampling_params,
    structured_output,
)
from atomc.runtime.server.service import Service
from atomc.runtime.server.tools import TOOL_PARSERS, tool_parser


async def chat_completions(service: Service, body: ChatRequest, request: Request) -> Response:
    model = service.model
    model.check_name(body.model)
    check_number(service, body.n, "n")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
    check_logprobs(body.top_logprobs, "top_logprobs", service.config)
    check_answers(body.n, body.top_logprobs, 0, model.max_len, "messages")
    at_most(TOOLS, body.tools, "tools", "tools")
    calls = _calls(service, body)
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    text = await model.rendered(body.messages, calls.for_template, body.add_generation_prompt, kwargs)
    prompt = await model.encoded_chat(text)
    if not prompt:
        raise invalid("the conversation has no text", "messages")
    check_answers(body.n, body.top_logprobs, body.n * len(prompt), model.max_len, "messages")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    check_fits(len(prompt), max_tokens, model)
    structured = structured_output(body, body.response_format)
    if structured is not None and calls.structured is not None:
        raise invalid("tool_choice asks for a call, and response_format for something else", "tool_choice")
    structured = structured or calls.structured
    # A form of output holds from the first token on, also where the template has begun to think.
    opening = text if structured is None else ""
    parsers = [calls.parser(), _reasoning(model.reasoning, opening)]
    shown = not body.skip_special_tokens or hides_markers(model.tokenizer, *parsers)
    params = sampling_params(
        body, model, max_tokens=max_tokens, logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured=structured, skip_special_tokens=not shown,
    )  # fmt: skip
    generation = service.generation(request_id(request), [prompt], params, body)
    await service.begin(generation, request)
    answers = _Answers(service, body, request_id(request), generation, calls, opening)
    if body.stream:
        return EventStream(answers.stream())
    return Json(await while_connected(request, answers.whole()))


@dataclass(frozen=True)
class _Calls:
    """How this request's answers may call tools.

    for_template   what the model is told of
    known          the parser of calls that the model may make, by name
    named, listed  calls are certain: of one function, or of some
    structured     what makes them certain
    """

    for_template: list[dict[str, Any]] | None = None
    known: str | None = None
    named: str | None = None
    listed: bool = False
    structured: Structured | None = None

    def parser(self) -> Parser | None:
        """For one answer."""
        if self.named is not None:
            return NamedCall(self.named)
        if self.listed:
            return ListedCalls()
        return tool_parser(self.known) if self.known is not None else None


def _calls(service: Service, body: ChatRequest) -> _Calls:
    """Raises a 400 for a choice that cannot be."""
    tools = body.tools or []
    choice = body.tool_choice or ("auto" if tools else "none")
    if not tools and choice in ("none", "auto"):
        return _Calls()
    if not tools:
        raise invalid("tool_choice asks for a call, and there are no tools", "tool_choice")
    shown = [tool.model_dump(exclude_none=True) for tool in tools]
    if choice == "none":
        return _Calls()
    if choice == "auto":
        known = service.model.tools
        if known is None:
            raise invalid("how this model writes calls of tools is not known: ask for tool_choice 'required' or for a "
                          "function by name, or start the server with --tool-call-parser, one of "
                          f"{', '.join(TOOL_PARSERS)}", "tools")  # fmt: skip
        return _Calls(shown, known)
    functions = [tool.function for tool in tools]
    try:
        if isinstance(choice, NamedTool):
            function = _named(functions, choice.function.name)
            schema = arguments_schema(function)
            return _Calls(shown, named=function.name, structured=checked_form(Structured(json_schema=schema)))
        schema = calls_schema(functions, body.parallel_tool_calls is not False)
    except ValueError as error:
        raise invalid(str(error), "tools") from error
    return _Calls(shown, listed=True, structured=checked_form(Structured(json_schema=schema)))


def _named(functions: Sequence[Function], name: str) -> Function:
    found = next((function for function in functions if function.name == name), None)
    if found is None:
        names = ", ".join(function.name for function in functions)
        raise invalid(f"tool_choice names {name!r}, and tools has {names}", "tool_choice")
    return found


@dataclass
class _One:
    """One answer on its way: its parsers, and what they have found, for the whole message."""

    answer: Answer
    begun: bool = False
    called: bool = False
    pieces: list[Piece] = field(default_factory=list)
    logprobs: list[msgspec.Raw] = field(default_factory=list)  # encoded as they come: all at once would take long
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Answers:
    """The answers as one body, or as events."""

    def __init__(
        self, service: Service, body: ChatRequest, name: str, generation: Generation, calls: _Calls, opening: str
    ) -> None:
        self.service, self.body, self.generation, self.calls = service, body, generation, calls
        self.head = {"id": f"chatcmpl-{name}", "created": int(time.time()), "model": service.model.names[0]}
        self.ones = [_One(Answer(_reasoning(service.model.reasoning, opening), calls.parser())) for _ in range(body.n)]

    async def whole(self) -> dict[str, Any]:
        try:
            async for choice, delta in self.generation:
                one = self.ones[choice.index]
                one.pieces += self._pieces(one, delta)
                if self.body.logprobs:
                    one.logprobs += encoded(self._logprobs(delta.logprobs or ())["content"])
        except BaseException as error:
            self.generation.close(error)
            raise
        self.generation.close()
        choices = [
            {"index": index, "message": _message(one.pieces), "logprobs": self._whole_logprobs(one),
             "finish_reason": one.finish_reason, "stop_reason": one.stop_reason}
            for index, one in enumerate(self.ones)
        ]  # fmt: skip
        return {**self.head, "object": "chat.completion", "choices": choices, "usage": self.generation.usage()}

    async def stream(self) -> AsyncIterator[bytes]:
        head = {**self.head, "object": "chat.completion.chunk"}
        options = self.body.stream_options
        try:
            async for choice, delta in self.generation:
                one = self.ones[choice.index]
                for chunk in self._chunks(one, choice.index, delta):
                    usage = {"usage": self.generation.usage()} if options and options.continuous_usage_stats else {}
                    yield event({**head, "choices": [chunk], **usage})
            if options is not None and options.include_usage:
                yield event({**head, "choices": [], "usage": self.generation.usage()})
            yield DONE
        except Exception as error:
            self.generation.close(error)
            yield event(self.service.told(error).body())
        finally:
            self.generation.close()

    def _chunks(self, one: _One, index: int, delta: TextDelta) -> list[dict[str, Any]]:
        """A chunk for each piece; log-probabilities go with the first, the finish reason comes alone and last."""
        deltas = [_delta(piece) for piece in self._pieces(one, delta)]
        if not one.begun and (deltas or delta.token_ids or one.finish_reason):
            one.begun = True
            deltas = deltas or [{"content": ""}]
            deltas[0] = {"role": "assistant", **deltas[0]}
        empty = {"index": index, "delta": {}, "logprobs": None, "finish_reason": None}
        chunks: list[dict[str, Any]] = [{**empty, "delta": each} for each in deltas]
        if self.body.logprobs and delta.logprobs:
            chunks = chunks or [dict(empty)]
            chunks[0]["logprobs"] = self._logprobs(delta.logprobs)
        if one.finish_reason is not None:
            chunks.append({**empty, "finish_reason": one.finish_reason, "stop_reason": one.stop_reason})
        return chunks

    def _pieces(self, one: _One, delta: TextDelta) -> list[Piece]:
        pieces = one.answer.feed(delta.text)
        if delta.finish_reason is not None:
            pieces += one.answer.finish()
        one.called = one.called or any(isinstance(piece, ToolStart) for piece in pieces)
        if delta.finish_reason is not None:
            # OpenAI: "stop" where the client has named the function.
            calls = one.called and delta.finish_reason == "stop" and self.calls.named is None
            one.finish_reason = "tool_calls" if calls else delta.finish_reason
            one.stop_reason = delta.stop_reason
        return pieces

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return chat_logprobs(self.service.model, logprobs, self.body.top_logprobs or 0)

    def _whole_logprobs(self, one: _One) -> dict[str, Any] | None:
        return {"content": one.logprobs, "refusal": None} if self.body.logprobs else None


def _reasoning(name: str | None, prompt: str) -> Parser | None:
    return None if name is None else reasoning_parser(name, prompt)


def _delta(piece: Piece) -> dict[str, Any]:
    match piece:
        case Reasoning(text):
            return {"reasoning_content": text}
        case Content(text):
            return {"content": text}
        case ToolStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ToolArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _message(pieces: Sequence[Piece]) -> dict[str, Any]:
    """All pieces together; content is null where there are calls only."""
    said = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, ToolStart):
            calls.append({"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}})
        elif isinstance(piece, ToolArguments):
            calls[piece.index]["function"]["arguments"] += piece.text
    message: dict[str, Any] = {"role": "assistant", "content": said if said or not calls else None, "refusal": None}
    message |= {"reasoning_content": thought} if thought else {}
    return message | ({"tool_calls": calls} if calls else {})
