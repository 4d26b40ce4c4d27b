"""Translates requests of Anthropic's Messages API to chat requests."""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal, TypeAlias

from atomc.files.json_types import JSON
from atomc.runtime.server.anthropic import request as anthropic
from atomc.runtime.server.service import protocol
from atomc.runtime.server.service.protocol import JSONObject

AnyBlock: TypeAlias = anthropic.UserBlock | anthropic.AssistantBlock
# Claude Code begins the system prompt with this line, whose value is another in each request: the
# prefix cache would never match.
BILLING = "x-anthropic-billing-header:"
# Chat templates with an effort know low, medium and high.
EFFORTS = {"xhigh": "high", "max": "high"}


def generation_request(body: anthropic.MessagesRequest) -> protocol.ChatRequest:
    names = ("max_tokens", *protocol.SamplingFields.model_fields)
    update = {"stop": body.stop_sequences, **{name: getattr(body, name) for name in names}}
    if body.thinking is not None and body.thinking.type != "disabled":
        update["thinking_token_budget"] = body.thinking.budget_tokens
    return prompt_request(body).model_copy(update=update)


def prompt_request(body: anthropic.PromptRequest) -> protocol.ChatRequest:
    """A chat request with the same prompt. All fields about the generation have defaults."""
    choice, output = body.tool_choice, body.output_config or anthropic.OutputConfig()
    effort = output.effort
    return protocol.ChatRequest(
        model=body.model,
        messages=list(_messages(body)),
        continue_final_message=bool(body.messages) and body.messages[-1].role == "assistant",
        tools=[_tool(tool) for tool in body.tools] if body.tools else None,
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
        chat_template_kwargs=_thinking_switch(body) | (body.chat_template_kwargs or {}),
        reasoning_effort=None if effort is None else EFFORTS.get(effort, effort),
        response_format=protocol.ResponseFormat(
            type="json_schema",
            json_schema=protocol.JsonSchema(name="output", schema=output.format.schema_),
        )
        if output.format
        else None,
    )


def _tool(tool: anthropic.CustomTool) -> protocol.Tool:
    function = protocol.Function(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return protocol.Tool(type="function", function=function)


def _tool_choice(
    choice: anthropic.ToolChoice | anthropic.NamedToolChoice | None,
) -> Literal["none", "auto", "required"] | protocol.NamedTool | None:
    if choice is None:
        return None
    if isinstance(choice, anthropic.NamedToolChoice):
        return protocol.NamedTool(function=protocol.NamedFunction(name=choice.name))
    return "required" if choice.type == "any" else choice.type


def _thinking_switch(body: anthropic.PromptRequest) -> JSONObject:
    """Variables that switch the reasoning in chat templates, of Qwen3 and GLM, of DeepSeek-V3.1 and
    Granite. Templates without a switch do not read them.
    """
    if body.thinking is None:
        return {}
    on = body.thinking.type != "disabled"
    return {"enable_thinking": on, "thinking": on}


def _messages(body: anthropic.PromptRequest) -> Iterator[JSONObject]:
    """Consecutive messages of one role are one turn, as in Anthropic's API."""
    if system := _system_parts(body.system or ()):
        yield {"role": "system", "content": _content(system)}
    for role, turn in groupby(body.messages, key=lambda message: message.role):
        blocks: list[AnyBlock] = [block for message in turn for block in message.content]
        if role == "user":
            yield from _user_messages(blocks)
        elif role == "assistant":
            yield _assistant_message(blocks)
        else:
            yield {"role": "system", "content": _content(_system_parts(blocks))}


def _system_parts(blocks: Sequence[AnyBlock]) -> list[JSONObject]:
    texts = [block.text for block in blocks if isinstance(block, anthropic.TextBlock)]
    texts = [text.partition("\n")[2] if text.startswith(BILLING) else text for text in texts]
    return [_text_part(text) for text in texts if text]


def _user_messages(blocks: Sequence[AnyBlock]) -> Iterator[JSONObject]:
    """A message for each result of a tool, and for what the user says around the results."""
    parts: list[JSONObject] = []
    for block in blocks:
        if isinstance(block, anthropic.TextBlock | anthropic.ImageBlock):
            parts.append(_part(block))
        elif isinstance(block, anthropic.ToolResultBlock):
            if parts:
                yield {"role": "user", "content": _content(parts)}
                parts = []
            result = _content([_part(part) for part in block.content])
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": result}
    if parts or not blocks:
        yield {"role": "user", "content": _content(parts)}


def _assistant_message(blocks: Sequence[AnyBlock]) -> JSONObject:
    texts = [_text_part(block.text) for block in blocks if isinstance(block, anthropic.TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, anthropic.ThinkingBlock)]
    calls: list[JSON] = [
        _tool_call(block) for block in blocks if isinstance(block, anthropic.ToolUseBlock)
    ]
    message: JSONObject = {"role": "assistant", "content": _content(texts)}
    if calls:
        message |= {"content": _content(texts) if texts else None, "tool_calls": calls}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message


def _tool_call(block: anthropic.ToolUseBlock) -> JSONObject:
    arguments = json.dumps(block.input, ensure_ascii=False)
    function: JSONObject = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _part(block: anthropic.TextBlock | anthropic.ImageBlock) -> JSONObject:
    if isinstance(block, anthropic.TextBlock):
        return _text_part(block.text)
    match block.source:
        case anthropic.Base64Source(media_type=media_type, data=data):
            url = f"data:{media_type};base64,{data}"
        case anthropic.UrlSource(url=url):
            pass
    return {"type": "image_url", "image_url": {"url": url}}


def _text_part(text: str) -> JSONObject:
    return {"type": "text", "text": text}


def _content(parts: Sequence[JSONObject]) -> JSON:
    """A single text as it is: templates that get the parts may treat them in another way."""
    if not parts:
        return ""
    first, *others = parts
    return first["text"] if not others and first["type"] == "text" else list(parts)
