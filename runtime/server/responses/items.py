"""Items of a conversation: those of a request as the API lists them, and as messages of a chat."""

import uuid
from collections.abc import Iterable, Sequence

from atomc.files.json_types import JSON, JSONObject, json_kind
from atomc.runtime.server.http.limits import MESSAGES, check_length
from atomc.runtime.server.http.responses import APIError, invalid

ROLES = ("user", "assistant", "system", "developer")
# Types of items -> the prefixes of their ids.
ITEM_TYPES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}
# Content parts: the type -> the field that is the text.
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def input_items(
    body_input: str | Sequence[JSONObject], before: Iterable[JSONObject] = ()
) -> list[JSONObject]:
    """The items with the fields that this server knows; all others are dropped. Raises a 400 for an
    item that it cannot pass to a model.

    Their ids are those of the client, unless an earlier item, also one of `before`, has the same:
    a page of the list begins after an id.
    """
    if isinstance(body_input, str):
        body_input = [{"role": "user", "content": body_input}]
    check_length(MESSAGES, body_input, "input", "items")
    items = [_item(item, f"input[{index}]") for index, item in enumerate(body_input)]
    used = {str(item["id"]) for item in before}
    for item in items:
        if not item["id"] or item["id"] in used:
            item["id"] = new_id(ITEM_TYPES[str(item["type"])])
        used.add(str(item["id"]))
    return items


def _item(item: JSONObject, where: str) -> JSONObject:
    fields: JSONObject
    kind = item.get("type")
    if kind is None and "role" in item:
        kind = "message"
    match kind:
        case "message":
            fields = _message(item, where)
        case "function_call":
            fields = {name: _text(item, name, where) for name in ("call_id", "name", "arguments")}
        case "function_call_output":
            fields = {"call_id": _text(item, "call_id", where)}
            output = item.get("output")
            is_text = isinstance(output, str)
            fields["output"] = output if is_text else _content(output, "user", f"{where}.output")
        case "reasoning":
            fields = {"summary": [], "content": _reasoning(item, where)}
        case _:
            types = ", ".join(ITEM_TYPES)
            raise _invalid(f"{where} has the type {kind!r:.40}, expected one of {types}")
    name = item.get("id")
    status: JSONObject = {} if kind == "reasoning" else {"status": "completed"}
    return {"id": name if isinstance(name, str) else "", "type": kind, **status, **fields}


def _message(item: JSONObject, where: str) -> JSONObject:
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _invalid(f"{where}.role is {role!r:.40}, expected one of {', '.join(ROLES)}")
    content = item.get("content")
    if isinstance(content, str):
        content = [{"type": "input_text", "text": content}]
    return {"role": role, "content": _content(content, role, f"{where}.content")}


def _content(parts: JSON, role: str, where: str) -> list[JSON]:
    if not isinstance(parts, list):
        raise _invalid(f"{where} is {json_kind(parts)}, expected a string or a list of parts")
    return [_part(part, role, f"{where}[{index}]") for index, part in enumerate(parts)]


def _part(part: JSON, role: str, where: str) -> JSONObject:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise _invalid(f"{where} is {part!r:.40}, expected an object with a type")
    if kind in TEXT_PARTS:
        text = _text(part, TEXT_PARTS[kind], where)
        if role == "assistant":
            return {"type": "output_text", "text": text, "annotations": []}
        return {"type": "input_text", "text": text}
    if kind == "input_image" and part.get("file_id") is None:
        url, detail = _text(part, "image_url", where), part.get("detail")
        return {"type": "input_image", "image_url": url, "detail": detail or "auto"}
    if kind == "input_image":
        raise _invalid(f"{where}.file_id is not supported: send the image as image_url")
    raise _invalid(
        f"{where} has the type {kind!r:.40}, expected input_text, input_image, output_text or "
        "refusal"
    )


def _reasoning(item: JSONObject, where: str) -> list[JSON]:
    """Its text, else its summary."""
    content = item.get("content")
    field = "content" if content else "summary"
    parts = item.get(field) or []
    if not isinstance(parts, list):
        raise _invalid(f"{where}.{field} is {json_kind(parts)}, expected a list of parts")
    texts: list[JSON] = []
    for index, part in enumerate(parts):
        if not isinstance(part, dict):
            raise _invalid(f"{where}.{field}[{index}] is {part!r:.40}, expected an object")
        text = _text(part, "text", f"{where}.{field}[{index}]")
        texts.append({"type": "reasoning_text", "text": text})
    if not texts and item.get("encrypted_content"):
        raise _invalid(
            f"{where}.encrypted_content cannot be decrypted: send the content of the reasoning item"
        )
    return texts


def _text(item: JSONObject, field: str, where: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise _invalid(f"{where}.{field} is {value!r:.40}, expected a string")
    return value


def _invalid(message: str) -> APIError:
    return invalid(message, "input")


# Messages of a chat


def chat_messages(instructions: str | None, items: Sequence[JSONObject]) -> list[JSONObject]:
    """The messages that a chat template gets.

    reasoning, message, function_call, function_call    =>    one message of the assistant
    """
    messages: list[JSONObject] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    answer: JSONObject | None = None  # the message of the assistant that later items add to
    for item in items:
        kind = item["type"]
        if kind == "function_call_output" or (kind == "message" and item["role"] != "assistant"):
            answer = None
            messages.append(_chat_message(item))
            continue
        if kind == "reasoning" and not item["content"]:
            continue
        # Reasoning is the first part of a message, its tool calls the last.
        complete = answer is not None and ("content" in answer or "tool_calls" in answer)
        if answer is None or (complete and kind != "function_call"):
            answer = {"role": "assistant"}
            messages.append(answer)
        _add_to_answer(answer, item)
    for message in messages:
        message.setdefault("content", "")
    return messages


def _add_to_answer(answer: JSONObject, item: JSONObject) -> None:
    match item["type"]:
        case "reasoning":
            content = item["content"]
            assert isinstance(content, list)
            texts = [str(part["text"]) for part in content if isinstance(part, dict)]
            before = str(answer.get("reasoning_content", ""))
            answer["reasoning_content"] = before + "".join(texts)
        case "message":
            answer["content"] = _chat_content(item["content"])
        case "function_call":
            calls = answer.setdefault("tool_calls", [])
            assert isinstance(calls, list)
            function: JSONObject = {"name": item["name"], "arguments": item["arguments"]}
            calls.append({"id": item["call_id"], "type": "function", "function": function})


def _chat_message(item: JSONObject) -> JSONObject:
    if item["type"] == "message":
        return {"role": item["role"], "content": _chat_content(item["content"])}
    return {
        "role": "tool",
        "tool_call_id": item["call_id"],
        "content": _chat_content(item["output"]),
    }


def _chat_content(content: JSON) -> JSON:
    """One text as a string, others as parts."""
    if not isinstance(content, list):
        return content
    parts: list[JSON] = []
    for part in content:
        assert isinstance(part, dict), "_content has checked it"
        if part["type"] == "input_image":
            image: JSONObject = {"url": part["image_url"], "detail": part["detail"]}
            parts.append({"type": "image_url", "image_url": image})
        else:
            parts.append({"type": "text", "text": part["text"]})
    match parts:
        case [{"type": "text", "text": text}]:
            return text
    return parts
