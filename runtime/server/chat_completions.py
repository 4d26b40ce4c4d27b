"""POST /v1/chat/completions."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from atomc.runtime.sampling.logprobs import TokenLogprobs
from atomc.runtime.sampling.sampling_params import Structured
from atomc.runtime.server.chat_prompt import chat_prompt
from atomc.runtime.server.errors import invalid
from atomc.runtime.server.generation import Generation
from atomc.runtime.server.http import (
    SSE_DONE,
    EventStream,
    JSONResponse,
    cancel_on_disconnect,
    request_id,
    sse_event,
)
from atomc.runtime.server.image_budget import image_reservation
from atomc.runtime.server.limits import TOOLS, check_length, check_total_size
from atomc.runtime.server.logprobs import chat_logprobs, encoded
from atomc.runtime.server.message_deltas import (
    ContentDelta,
    MessageDelta,
    Parser,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from atomc.runtime.server.output_parser import OutputParser, uses_special_tokens
from atomc.runtime.server.prompts import check_num_choices
from atomc.runtime.server.protocol import ChatRequest, Function, JSONObject, NamedTool
from atomc.runtime.server.reasoning_parsers import reasoning_parser
from atomc.runtime.server.response_types import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    FunctionCall,
    ToolCall,
)
from atomc.runtime.server.sampling import (
    check_context_length,
    check_logprobs,
    check_structured,
    sampling_params,
    structured_output,
)
from atomc.runtime.server.service import Service
from atomc.runtime.server.tool_choice import (
    NamedToolParser,
    RequiredToolParser,
    arguments_schema,
    calls_schema,
)
from atomc.runtime.server.tool_parsers import TOOL_PARSERS, tool_parser
from atomc.runtime.text_stream import TextDelta


async def chat_completions(service: Service, body: ChatRequest, request: Request) -> Response:
    model = service.model
    model.check_name(body.model)
    check_num_choices(service, body.n, "n")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
    check_logprobs(body.top_logprobs, "top_logprobs", service.config)
    check_total_size(body.n, body.top_logprobs, 0, model.max_len, "messages")
    check_length(TOOLS, body.tools, "tools", "tools")
    tool_mode = _tool_mode(service, body)
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    chat = await chat_prompt(
        service,
        request,
        body.messages,
        tool_mode.template_tools,
        body.add_generation_prompt,
        kwargs,
    )
    assert model.tokenizer is not None, "chat_prompt raises an error without a tokenizer"
    prompt = chat.tokens
    if not prompt:
        raise invalid("the chat template rendered an empty prompt", "messages")
    check_total_size(body.n, body.top_logprobs, body.n * len(prompt), model.max_len, "messages")
    max_tokens = (
        body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    )
    check_context_length(len(prompt), max_tokens, model)
    structured = structured_output(body, body.response_format)
    if structured is not None and tool_mode.structured is not None:
        raise invalid(
            "tool_choice requires a tool call, which cannot be combined with response_format",
            "tool_choice",
        )
    structured = structured or tool_mode.structured
    # A grammar applies from the first token on, even if the prompt ends with an opening reasoning
    # tag.
    prompt_text = chat.text if structured is None else ""
    parsers = [tool_mode.parser(), _reasoning_parser(model.reasoning, prompt_text)]
    keep_special_tokens = not body.skip_special_tokens or uses_special_tokens(
        model.tokenizer, *parsers
    )
    params = sampling_params(
        body,
        model,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured=structured,
        skip_special_tokens=not keep_special_tokens,
    )
    generation = service.generation(request_id(request), [prompt], params, body, chat.images)
    await service.start(generation, request)
    # The engine has the images now.
    del chat
    image_reservation(request).release()
    response = _ResponseBuilder(
        service, body, request_id(request), generation, tool_mode, prompt_text
    )
    if body.stream:
        return EventStream(response.stream())
    return JSONResponse(await cancel_on_disconnect(request, response.complete()))


@dataclass(frozen=True)
class _ToolMode:
    """How the choices of a request may call tools.

    template_tools   the tools passed to the chat template
    parser_name      the tool parser, for tool_choice "auto"
    function_name    the function that tool_choice names
    required         tool_choice is "required"
    structured       the structured output that forces the calls, for a named function and for
                     "required"
    """

    template_tools: list[JSONObject] | None = None
    parser_name: str | None = None
    function_name: str | None = None
    required: bool = False
    structured: Structured | None = None

    def parser(self) -> Parser | None:
        """A new parser for one choice."""
        if self.function_name is not None:
            return NamedToolParser(self.function_name)
        if self.required:
            return RequiredToolParser()
        return tool_parser(self.parser_name) if self.parser_name is not None else None


def _tool_mode(service: Service, body: ChatRequest) -> _ToolMode:
    """Raises a 400 for a tool_choice that is not possible."""
    tools = body.tools or []
    choice = body.tool_choice or ("auto" if tools else "none")
    if not tools and choice in ("none", "auto"):
        return _ToolMode()
    if not tools:
        raise invalid("tool_choice requires a tool call, but tools is empty", "tool_choice")
    template_tools = [tool.model_dump(exclude_none=True) for tool in tools]
    if choice == "none":
        return _ToolMode()
    if choice == "auto":
        parser_name = service.model.tools
        if parser_name is None:
            raise invalid(
                "the tool call format of this model is unknown: use tool_choice 'required' or "
                "a named function, "
                f"or start the server with --tool-call-parser, one of {', '.join(TOOL_PARSERS)}",
                "tools",
            )
        return _ToolMode(template_tools, parser_name)
    functions = [tool.function for tool in tools]
    try:
        if isinstance(choice, NamedTool):
            function = _function_named(functions, choice.function.name)
            structured = check_structured(Structured(json_schema=arguments_schema(function)))
            return _ToolMode(template_tools, function_name=function.name, structured=structured)
        schema = calls_schema(functions, body.parallel_tool_calls is not False)
    except ValueError as error:
        raise invalid(str(error), "tools") from error
    return _ToolMode(
        template_tools, required=True, structured=check_structured(Structured(json_schema=schema))
    )


def _function_named(functions: Sequence[Function], name: str) -> Function:
    found = next((function for function in functions if function.name == name), None)
    if found is None:
        names = ", ".join(function.name for function in functions)
        raise invalid(
            f"tool_choice names {name!r}, expected one of the tools: {names}", "tool_choice"
        )
    return found


@dataclass
class _ChoiceState:
    """One choice in progress: its parser, and the deltas and log-probabilities so far."""

    parser: OutputParser
    started: bool = False
    has_tool_calls: bool = False
    deltas: list[MessageDelta] = field(default_factory=list)
    logprobs: list[ChatTokenLogprob | msgspec.Raw] = field(
        default_factory=list
    )  # encoded per delta, to keep the event loop free
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _ResponseBuilder:
    """Builds the response to one request: one JSON body, or a stream of events."""

    def __init__(
        self,
        service: Service,
        body: ChatRequest,
        name: str,
        generation: Generation,
        tool_mode: _ToolMode,
        prompt_text: str,
    ) -> None:
        self.service, self.body, self.generation, self.tool_mode = (
            service,
            body,
            generation,
            tool_mode,
        )
        self.id, self.created = f"chatcmpl-{name}", int(time.time())
        reasoning = service.model.reasoning
        self.states = [
            _ChoiceState(
                OutputParser(_reasoning_parser(reasoning, prompt_text), tool_mode.parser())
            )
            for _ in range(body.n)
        ]

    async def complete(self) -> ChatCompletion:
        with self.generation:
            async for choice, delta in self.generation:
                state = self.states[choice.index]
                state.deltas += self._parse(state, delta)
                if self.body.logprobs:
                    state.logprobs += encoded(self._logprobs(delta.logprobs or ())["content"])
        choices: list[ChatChoice] = [
            {
                "index": index,
                "message": _message(state.deltas),
                "logprobs": self._all_logprobs(state),
                "finish_reason": state.finish_reason,
                "stop_reason": state.stop_reason,
            }
            for index, state in enumerate(self.states)
        ]
        return {
            "id": self.id,
            "created": self.created,
            "model": self.service.model.names[0],
            "object": "chat.completion",
            "choices": choices,
            "usage": self.generation.usage(),
        }

    async def stream(self) -> AsyncIterator[bytes]:
        options = self.body.stream_options
        try:
            with self.generation:
                async for choice, delta in self.generation:
                    state = self.states[choice.index]
                    for chunk in self._chunks(state, choice.index, delta):
                        event = self._event([chunk])
                        if options is not None and options.continuous_usage_stats:
                            event["usage"] = self.generation.usage()
                        yield sse_event(event)
                if options is not None and options.include_usage:
                    yield sse_event(self._event([]) | {"usage": self.generation.usage()})
                yield SSE_DONE
        except Exception as error:  # the response has begun: its last event says what failed
            yield sse_event(self.service.stream_error(error).body())

    def _event(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return {
            "id": self.id,
            "created": self.created,
            "model": self.service.model.names[0],
            "object": "chat.completion.chunk",
            "choices": choices,
        }

    def _chunks(self, state: _ChoiceState, index: int, delta: TextDelta) -> list[ChatChunkChoice]:
        """One chunk per message delta; the first has the log-probabilities. A separate last one has
        the finish reason.
        """
        deltas = [_delta(each) for each in self._parse(state, delta)]
        if not state.started and (deltas or delta.token_ids or state.finish_reason):
            state.started = True
            deltas = deltas or [{"content": ""}]
            deltas[0] = {"role": "assistant", **deltas[0]}
        empty: ChatChunkChoice = {
            "index": index,
            "delta": {},
            "logprobs": None,
            "finish_reason": None,
        }
        chunks: list[ChatChunkChoice] = [{**empty, "delta": each} for each in deltas]
        if self.body.logprobs and delta.logprobs:
            chunks = chunks or [empty.copy()]
            chunks[0]["logprobs"] = self._logprobs(delta.logprobs)
        if state.finish_reason is not None:
            chunks.append(
                {**empty, "finish_reason": state.finish_reason, "stop_reason": state.stop_reason}
            )
        return chunks

    def _parse(self, state: _ChoiceState, delta: TextDelta) -> list[MessageDelta]:
        deltas = state.parser.feed(delta.text)
        if delta.finish_reason is not None:
            deltas += state.parser.finish()
        state.has_tool_calls = state.has_tool_calls or any(
            isinstance(each, ToolCallStart) for each in deltas
        )
        if delta.finish_reason is not None:
            # OpenAI: "stop" if tool_choice names the function.
            is_call = (
                state.has_tool_calls
                and delta.finish_reason == "stop"
                and self.tool_mode.function_name is None
            )
            state.finish_reason = "tool_calls" if is_call else delta.finish_reason
            state.stop_reason = delta.stop_reason
        return deltas

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
        return chat_logprobs(self.service.model, logprobs, self.body.top_logprobs or 0)

    def _all_logprobs(self, state: _ChoiceState) -> ChatLogprobs | None:
        return {"content": state.logprobs, "refusal": None} if self.body.logprobs else None


def _reasoning_parser(name: str | None, prompt: str) -> Parser | None:
    return None if name is None else reasoning_parser(name, prompt)


def _delta(delta: MessageDelta) -> ChatDelta:
    match delta:
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ContentDelta(text):
            return {"content": text}
        case ToolCallStart(index, call_id, name):
            function: FunctionCall = {"name": name, "arguments": ""}
            return {
                "tool_calls": [
                    {"index": index, "id": call_id, "type": "function", "function": function}
                ]
            }
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _message(deltas: Sequence[MessageDelta]) -> ChatMessage:
    """The message that the deltas add up to; content is null if there are only tool calls."""
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    calls: list[ToolCall] = []
    for delta in deltas:
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
    message: ChatMessage = {
        "role": "assistant",
        "content": content if content or not calls else None,
        "refusal": None,
    }
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message
