"""A chat from its request to the deltas of its messages. Each endpoint that serves chats writes
them in its own format.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from starlette.requests import Request

from atomc.runtime.constrained.reasoning_budget import CLOSE, tag_tokens
from atomc.runtime.requests.request import TokenLogprobs
from atomc.runtime.requests.sampling_params import Structured
from atomc.runtime.server.chat.chat_prompt import ChatPrompt, chat_prompt
from atomc.runtime.server.chat.tool_mode import ToolMode, tool_mode
from atomc.runtime.server.http.limits import check_total_size
from atomc.runtime.server.http.responses import invalid
from atomc.runtime.server.parsers.message_deltas import (
    MessageDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from atomc.runtime.server.parsers.output_parser import OutputParser, uses_special_tokens
from atomc.runtime.server.parsers.reasoning_parsers import (
    PromptEnd,
    ThinkParser,
    reasoning_parser,
)
from atomc.runtime.server.parsers.tool_parsers.harmony import HARMONY, HarmonyParser
from atomc.runtime.server.service.generation import Generation
from atomc.runtime.server.service.image_budget import image_reservation
from atomc.runtime.server.service.model_info import ModelInfo
from atomc.runtime.server.service.protocol import ChatRequest
from atomc.runtime.server.service.response_types import ChatUsage, CompletionTokensDetails
from atomc.runtime.server.service.sampling import (
    check_context_length,
    check_logprobs,
    check_num_choices,
    prompt_limit,
    sampling_params,
    structured_output,
    truncated_prompt,
)
from atomc.runtime.server.service.service import Service
from atomc.runtime.text.text_stream import TextDelta

# Variables of chat templates that switch the reasoning: of Qwen3 and GLM, of DeepSeek and Granite.
THINKING_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True)
class ChoiceDelta:
    """What is new in one choice.

    tokens         the generated tokens; the text may lag behind them
    logprobs       one per token, if the request asks for them
    finish_reason  set in the last delta of a choice: stop, length or tool_calls
    stop_reason    the stop string or token id that ended the choice
    """

    index: int
    deltas: list[MessageDelta]
    tokens: tuple[int, ...] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class _ReasoningTokens:
    """Counts the tokens of the reasoning of a choice: up to its closing tag, if that is a token.
    Otherwise a token is of the kind of the last delta, the first ones of the first; this depends on
    how the engine's outputs are grouped.
    """

    closing: int | None
    count: int = 0
    _last: MessageDelta | None = None
    _num_before: int = 0  # tokens before the first delta
    _ended: bool = False

    def add(self, deltas: Sequence[MessageDelta], tokens: Sequence[int]) -> None:
        if self._ended:
            return
        has_reasoning = any(isinstance(delta, ReasoningDelta) for delta in (*deltas, self._last))
        if has_reasoning and self.closing in tokens:
            self.count += self._num_before + tokens.index(self.closing) + 1
            self._ended = True
            return
        self._num_before += len(tokens)
        self._last = deltas[-1] if deltas else self._last
        if self._last is None:
            return
        if isinstance(self._last, ReasoningDelta):
            self.count += self._num_before
        self._num_before = 0


@dataclass
class Chat:
    """A chat that the engine has accepted: iterate once, in a `with` block of its generation."""

    generation: Generation
    _parsers: Sequence[OutputParser]
    _mode: ToolMode

    def __post_init__(self) -> None:
        self._calls_tools = [False] * len(self._parsers)
        tags = tag_tokens(self.generation.service.model.tokenizer)
        closing = None if tags is None else tags[1]
        self._reasoning = [_ReasoningTokens(closing) for _ in self._parsers]

    async def __aiter__(self) -> AsyncIterator[ChoiceDelta]:
        """The deltas until all choices have finished. Raises as Generation does."""
        async for choice, delta in self.generation:
            yield self._parse(choice.index, delta)

    def usage(self) -> ChatUsage:
        """As Generation.usage, and the tokens of the reasoning of all choices."""
        count = sum(counter.count for counter in self._reasoning)
        details: CompletionTokensDetails = {"reasoning_tokens": count}
        return {**self.generation.usage(), "completion_tokens_details": details}

    def _parse(self, index: int, delta: TextDelta) -> ChoiceDelta:
        deltas = self._parsers[index].feed(delta.text)
        if delta.finish_reason is not None:
            deltas += self._parsers[index].finish()
        self._reasoning[index].add(deltas, delta.token_ids)
        if self._mode.single_call:
            deltas = [item for item in deltas if not _is_further_call(item)]
        self._calls_tools[index] |= any(isinstance(item, ToolCallStart) for item in deltas)
        finish_reason: str | None = delta.finish_reason
        # OpenAI: "stop" if tool_choice names the function.
        if self._calls_tools[index] and self._mode.function_name is None:
            finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
        return ChoiceDelta(
            index,
            deltas,
            delta.token_ids,
            delta.logprobs or (),
            finish_reason,
            delta.stop_reason,
        )


async def rendered_prompt(service: Service, body: ChatRequest, request: Request) -> ChatPrompt:
    """The prompt of the chat. Raises as tool_mode and chat_prompt do."""
    service.model.check_name(body.model)
    return await _prompt(service, body, request, tool_mode(service, body))


async def start_chat(
    service: Service, body: ChatRequest, request: Request, *, fit_max_tokens: bool = False
) -> Chat:
    """Returns when the engine has accepted the chat. Raises a 400 for a request that cannot be
    served, and as Generation.start does.

    fit_max_tokens: a max_tokens above what the context has left is reduced to it
    """
    model = service.model
    model.check_name(body.model)
    check_num_choices(service, body.n, "n")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
    check_logprobs(body, "top_logprobs", service.config)
    num_logprobs = max(body.top_logprobs or 0, body.prompt_logprobs or 0)
    check_total_size(body.n, num_logprobs, 0, model.max_len, "messages")
    mode = tool_mode(service, body)
    chat = await _prompt(service, body, request, mode)
    assert model.tokenizer is not None, "chat_prompt raises an error without a tokenizer"
    max_tokens = (
        body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    )
    prompt = _truncated(chat, body, max_tokens, model)
    if not prompt:
        raise invalid("the chat template rendered an empty prompt", "messages")
    check_total_size(body.n, num_logprobs, body.n * len(prompt), model.max_len, "messages")
    if fit_max_tokens and max_tokens is not None:
        max_tokens = min(max_tokens, max(model.max_len - len(prompt), 1))
    check_context_length(len(prompt), max_tokens, model)
    structured = _structured(service, body, mode)
    # Text of a call may have the tags of reasoning.
    has_reasoning = mode.structured is None and not _is_content(structured)
    end = _prompt_end(chat.text, body, model) if has_reasoning else None
    parsers = [output_parser(model.reasoning, mode, end) for _ in range(body.n)]
    keep_special_tokens = not body.skip_special_tokens or uses_special_tokens(
        model.tokenizer, *parsers[0].parsers
    )
    thoughts = parsers[0].parsers[0]
    params = await sampling_params(
        body,
        model,
        num_choices=body.n,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        structured=structured,
        skip_special_tokens=not keep_special_tokens,
        # A grammar that forces content leaves no reasoning to limit.
        thinking_token_budget=None if end is None else body.thinking_token_budget,
        thinking_is_open=isinstance(thoughts, ThinkParser) and thoughts.opened,
    )
    generation = Generation(service, request, body, [prompt], params, chat.images)
    await generation.start()
    # The engine has the images now.
    del chat
    image_reservation(request).release()
    return Chat(generation, parsers, mode)


def _structured(service: Service, body: ChatRequest, mode: ToolMode) -> Structured | None:
    """The structure of the answer: that of the tool calls, if they are required."""
    structured = structured_output(body, body.response_format, service.config)
    if mode.structured is None:
        return structured
    # As with OpenAI, response_format is of text; the answer is a tool call and has none.
    if structured_output(body, None, service.config) is not None:
        raise invalid(
            "tool_choice requires a tool call: it excludes structured_outputs", "tool_choice"
        )
    return mode.structured


def _is_content(structured: Structured | None) -> bool:
    """Whether a grammar forces content from the first token on, even if the prompt ends with an
    opening reasoning tag: one that has the closing tag begins with the reasoning.
    """
    if structured is None:
        return False
    sources = (structured.regex or "", structured.grammar or "", *(structured.choice or ()))
    return not any(CLOSE in source.replace("\\", "") for source in sources)


def _prompt_end(prompt: str, body: ChatRequest, model: ModelInfo) -> PromptEnd:
    last = _last_text(body)
    template = "" if model.template is None else model.template.source
    switches = body.chat_template_kwargs or {}
    thinking = any(switches.get(name) is True and name in template for name in THINKING_SWITCHES)
    return PromptEnd(prompt, last if body.continue_final_message else None, last or "", thinking)


def _last_text(body: ChatRequest) -> str | None:
    """The text of the last message, or of its last part."""
    content = body.messages[-1].get("content") if body.messages else None
    last = content[-1] if isinstance(content, list) and content else content
    text = last.get("text") if isinstance(last, dict) else last
    return text if isinstance(text, str) else None


def output_parser(reasoning: str | None, mode: ToolMode, end: PromptEnd | None) -> OutputParser:
    """A parser for one choice. reasoning: the name of the reasoning parser. end: as there."""
    if mode.structured is not None:  # the text is JSON, whose strings may have any markers
        return OutputParser(None, mode.parser())
    if mode.parser_name == reasoning == HARMONY:
        # One parser of all messages: a second one would not see where those of the first begin.
        return OutputParser(None, HarmonyParser(reasoning=True))
    thoughts = None if reasoning is None else reasoning_parser(reasoning, end)
    return OutputParser(thoughts, mode.parser())


def _is_further_call(delta: MessageDelta) -> bool:
    return isinstance(delta, ToolCallStart | ToolCallArguments) and delta.index > 0


async def _prompt(
    service: Service, body: ChatRequest, request: Request, mode: ToolMode
) -> ChatPrompt:
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    limit = prompt_limit(body, service.model)
    return await chat_prompt(service, request, body, mode.template_tools, kwargs, limit)


def _truncated(
    chat: ChatPrompt, body: ChatRequest, max_tokens: int | None, model: ModelInfo
) -> list[int]:
    """The tokens of the prompt that truncate_prompt_tokens keeps."""
    name = "truncate_prompt_tokens"
    if chat.images and body.truncate_prompt_tokens is not None:
        raise invalid(f"{name} would cut images of the prompt: leave it out, or send text", name)
    return truncated_prompt(chat.tokens, body, max_tokens, model)
