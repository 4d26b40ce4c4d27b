"""The Responses API over HTTP on the demo model, with OpenAI's client and its types."""

import json
import re
import time
from typing import Literal

import msgspec
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("tokenizers")
pytest.importorskip("llguidance")
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
from openai.types.responses import Response, ResponseStreamEvent  # noqa: E402
from openai.types.responses.response_item_list import ResponseItemList  # noqa: E402
from pydantic import BaseModel, TypeAdapter  # noqa: E402
from serving import KEY  # noqa: E402

from atomc.runtime.server.chat.chat import ChoiceDelta  # noqa: E402
from atomc.runtime.server.http.responses import APIError  # noqa: E402
from atomc.runtime.server.parsers.message_deltas import (  # noqa: E402
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from atomc.runtime.server.responses.endpoints import _translate  # noqa: E402
from atomc.runtime.server.responses.events import OutputItems  # noqa: E402
from atomc.runtime.server.responses.items import chat_messages, input_items  # noqa: E402
from atomc.runtime.server.responses.request import ResponsesRequest  # noqa: E402
from atomc.runtime.server.service.response_store import (  # noqa: E402
    ResponseStore,
    StoredResponse,
    item_bytes,
)

pytestmark = pytest.mark.xdist_group("server")
EVENT = TypeAdapter(ResponseStreamEvent)
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
WRITTEN = """<think>
Paris it is.
</think>

One moment.
<tool_call>
{"name": "weather", "arguments": {"city": "Paris"}}
</tool_call>"""


@pytest.fixture(scope="module")
def client(api_server):
    return openai.OpenAI(base_url=f"{api_server.url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def http(api_server):
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=api_server.url, headers=headers, timeout=60) as found:
        yield found


def asked(given="She looked at him and said", **more):
    return {"model": "atomc-demo", "input": given, "temperature": 0, "max_output_tokens": 8} | more


def written(text, **more):
    """A request whose output is this text."""
    return (
        asked(max_output_tokens=300, extra_body={"structured_outputs": {"choice": [text]}}) | more
    )


def checked(response):
    """The response, whose JSON fits the client's type."""
    Response.model_validate_json(response.model_dump_json(warnings=False, by_alias=True))
    return response


def streamed(http, body):
    """The events of a stream, each of which fits the client's type."""
    body = {key: value for key, value in body.items() if key != "extra_body"} | body.get(
        "extra_body", {}
    )
    answer = http.post("/v1/responses", json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    *parts, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    events = []
    for part in parts:
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        EVENT.validate_python(events[-1])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_ids(items):
    return [
        {key: value for key, value in item.items() if key not in ("id", "call_id")}
        for item in items
    ]


# Text


def test_a_response_is_the_text_that_a_chat_gives_with_its_usage(client):
    found = checked(client.responses.create(**asked(instructions="Be short.", metadata={"a": "b"})))
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "She looked at him and said"},
    ]
    chat = client.chat.completions.create(
        model="atomc-demo", messages=messages, temperature=0, max_tokens=8
    )
    assert found.output_text == chat.choices[0].message.content != ""
    assert found.usage.input_tokens == chat.usage.prompt_tokens
    assert (found.usage.output_tokens, found.usage.total_tokens) == (
        chat.usage.completion_tokens,
        chat.usage.total_tokens,
    )
    assert found.metadata == {"a": "b"} and found.instructions == "Be short."
    # top_p is the default of the model's generation_config.json.
    assert (found.temperature, found.top_p, found.store) == (0, 0.95, True)


def test_a_response_that_reaches_max_output_tokens_is_incomplete(client, http):
    found = checked(client.responses.create(**asked()))
    assert found.status == "incomplete" and found.completed_at is None
    assert found.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in found.output] == ["incomplete"]
    events = streamed(http, asked())
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == found.output_text


def test_a_stream_has_the_events_of_openai_in_their_order(http, client):
    body = written("One moment.")
    whole = checked(client.responses.create(**body)).to_dict()
    events = streamed(http, body)
    kinds = [event["type"].removeprefix("response.") for event in events]
    num_deltas = kinds.count("output_text.delta")
    assert num_deltas >= 1
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * num_deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(event.get("delta", "") for event in events) == "One moment."
    assert events[0]["response"]["status"] == "in_progress" and whole["status"] == "completed"
    last = events[-1]["response"]
    assert without_ids(last["output"]) == without_ids(whole["output"])
    assert last["output"][0] == events[-2]["item"]
    assert {**last["usage"], "input_tokens_details": 0} == {
        **whole["usage"],
        "input_tokens_details": 0,
    }


def test_logprobs_are_included_on_request_and_the_same_in_a_stream(http, client):
    body = asked(include=["message.output_text.logprobs"], top_logprobs=2)
    part = checked(client.responses.create(**body)).output[0].content[0]
    assert len(part.logprobs) == 8 and all(len(each.top_logprobs) == 2 for each in part.logprobs)
    text = b"".join(bytes(each.bytes) for each in part.logprobs).decode()
    assert text.strip() == part.text.strip()
    events = streamed(http, body)
    deltas = [each for event in events if "delta" in event for each in event["logprobs"]]
    assert deltas == [each.to_dict() for each in part.logprobs]
    plain = client.responses.create(**asked()).output[0].content[0]
    assert plain.logprobs == []


# Several turns


def test_a_conversation_continues_by_id_as_it_does_with_its_items(client):
    first = client.responses.create(**asked())
    more = asked("And then?")
    by_id = client.responses.create(**more, previous_response_id=first.id)
    items = [
        {"role": "user", "content": "She looked at him and said"},
        *first.output,
        {"role": "user", "content": "And then?"},
    ]
    by_items = client.responses.create(**more | {"input": items})
    assert by_id.output_text == by_items.output_text
    assert by_id.usage.input_tokens == by_items.usage.input_tokens > first.usage.input_tokens
    listed = client.responses.input_items.list(by_id.id, order="asc").data
    assert [item.role for item in listed] == ["user", "assistant", "user"]
    assert listed[1].content[0].text == first.output_text


def test_instructions_are_not_carried_over(client):
    first = client.responses.create(**asked(instructions="Be short. " * 20))
    second = client.responses.create(**asked("And?"), previous_response_id=first.id)
    assert second.instructions is None
    assert second.usage.input_tokens < first.usage.input_tokens


def test_a_response_is_retrieved_and_deleted(client, http):
    made = client.responses.create(**asked())
    assert client.responses.retrieve(made.id) == made
    page = http.get(f"/v1/responses/{made.id}/input_items")
    ResponseItemList.model_validate(page.json())
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            call(made.id)
    with pytest.raises(openai.NotFoundError, match="does not exist") as raised:
        client.responses.create(**asked(), previous_response_id=made.id)
    assert raised.value.param == "previous_response_id"


def test_a_response_that_is_not_to_be_stored_is_not(client):
    made = client.responses.create(**asked(store=False))
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_compaction_is_not_found_with_what_to_do_instead(client):
    with pytest.raises(openai.NotFoundError, match="ask the model for a summary"):
        client.responses.compact(model="atomc-demo", input="Hello")


def test_a_response_is_of_the_key_that_it_was_made_with(client, http):
    made = client.responses.create(**asked())
    stranger = {"Authorization": "Bearer second-key"}
    path = f"/v1/responses/{made.id}"
    for answer in (
        http.get(path, headers=stranger),
        http.get(f"{path}/input_items", headers=stranger),
        http.delete(path, headers=stranger),
        http.post("/v1/responses", json=asked(previous_response_id=made.id), headers=stranger),
    ):
        assert answer.status_code == 404
        assert "made with another API key" in answer.json()["error"]["message"]
    assert client.responses.retrieve(made.id) == made


def test_a_streamed_response_can_be_retrieved(client, http):
    last = streamed(http, asked())[-1]["response"]
    assert client.responses.retrieve(last["id"]).to_dict() == last


def test_items_of_a_conversation_have_different_ids():
    before = input_items([{"role": "user", "content": "a", "id": "x"}])
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "id": "y"}
    items = input_items([{"role": "user", "content": "b", "id": "x"}, call, call], before)
    ids = [item["id"] for item in items]
    assert ids[0].startswith("msg_") and ids[1] == "y" and ids[2].startswith("fc_")


def test_input_items_come_in_pages(client):
    turns = [{"role": "user", "content": f"Turn {number}"} for number in range(5)]
    made = client.responses.create(**asked(turns))
    listed = client.responses.input_items.list(made.id, limit=2)
    assert listed.has_more and len(listed.data) == 2
    texts = [item.content[0].text for item in listed]  # asks for the further pages
    assert texts == [f"Turn {number}" for number in reversed(range(5))]
    with pytest.raises(openai.BadRequestError, match="limit is 101"):
        client.responses.input_items.list(made.id, limit=101)
    with pytest.raises(openai.BadRequestError, match="after is 'x'"):
        client.responses.input_items.list(made.id, after="x")


# Tools, reasoning, structured output


def test_reasoning_content_and_a_call_are_three_items(client, http):
    body = written(WRITTEN, tools=[WEATHER])
    found = checked(client.responses.create(**body))
    reasoning, message, call = found.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Paris it is.")
    assert message.content[0].text == found.output_text == "One moment."
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    assert 0 < found.usage.output_tokens_details.reasoning_tokens < found.usage.output_tokens
    events = streamed(http, body)
    last = events[-1]["response"]
    assert without_ids(last["output"]) == without_ids(found.to_dict()["output"])
    for index, kind in enumerate(("reasoning_text", "output_text", "function_call_arguments")):
        deltas = [each for each in events if each["type"] == f"response.{kind}.delta"]
        (done,) = [each for each in events if each["type"] == f"response.{kind}.done"]
        assert {each["output_index"] for each in [*deltas, done]} == {index}
        assert {each["item_id"] for each in [*deltas, done]} == {last["output"][index]["id"]}
        text = done["arguments"] if kind == "function_call_arguments" else done["text"]
        assert "".join(each["delta"] for each in deltas) == text != ""


def test_a_call_and_its_result_go_back_to_the_model(client):
    first = client.responses.create(**written(WRITTEN, tools=[WEATHER]))
    result = {
        "type": "function_call_output",
        "call_id": first.output[-1].call_id,
        "output": "Sunny",
    }
    more = asked([result], tools=[WEATHER])
    by_id = client.responses.create(**more, previous_response_id=first.id)
    items = [{"role": "user", "content": asked()["input"]}, *first.output, result]
    by_items = client.responses.create(**more | {"input": items})
    assert by_id.output_text == by_items.output_text
    assert by_id.usage.input_tokens == by_items.usage.input_tokens


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "weather"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "weather"}],
        },
    ],
    ids=["required", "named", "allowed"],
)
def test_a_tool_choice_forces_the_call(client, http, choice):
    clock = {**WEATHER, "name": "clock"}
    body = asked(
        tools=[clock, WEATHER] if choice != "required" else [WEATHER],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_output_tokens=60,
    )
    found = checked(client.responses.create(**body))
    (call,) = found.output
    assert (call.type, call.name, found.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    assert found.parallel_tool_calls is False
    assert streamed(http, body)[-1]["response"]["output"][0]["arguments"] == call.arguments


def test_a_forced_call_needs_no_text_of_the_requested_format(client):
    form = {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}
    given = asked(tools=[WEATHER], tool_choice="required", max_output_tokens=60)
    (call,) = client.responses.create(**given, text={"format": form}).output
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    with pytest.raises(openai.BadRequestError, match="excludes structured_outputs"):
        client.responses.create(**given, extra_body={"structured_outputs": {"regex": "x"}})


def test_the_client_parses_structured_output_whole_and_streamed(client):
    class Weather(BaseModel):
        city: Literal["Paris", "Rome"]
        sunny: bool

    body = asked(max_output_tokens=60)
    found = checked(client.responses.parse(**body, text_format=Weather))
    assert isinstance(found.output_parsed, Weather) and found.text.format.type == "json_schema"
    with client.responses.stream(**body, text_format=Weather) as stream:
        snapshots = [each.snapshot for each in stream if each.type == "response.output_text.delta"]
        last = stream.get_final_response()
    assert last.output_parsed == found.output_parsed and snapshots[-1] == last.output_text


def test_a_json_object_is_one(client):
    found = client.responses.create(
        **asked(max_output_tokens=200, text={"format": {"type": "json_object"}}, temperature=1)
    )
    assert found.output_text.startswith("{")


# Errors


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        ({"input": []}, "input", "messages is empty"),
        (
            {"input": [{"type": "computer_call"}]},
            "input",
            r"input\[0\] has the type 'computer_call'",
        ),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", r"input\[0\].role is 'tool'"),
        ({"input": [{"role": ["user"], "content": "x"}]}, "input", r"input\[0\].role is"),
        ({"input": [{"role": "user"}]}, "input", "content is null"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input",
            "'input_file'",
        ),
        (
            {"input": [{"role": "user", "content": ["x"]}]},
            "input",
            "expected an object with a type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input",
            "file_id is not supported",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input",
            "this model reads no images",
        ),
        ({"input": [{"type": "function_call", "call_id": 3}]}, "input", "call_id is 3"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input", "decrypted"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "'item_reference'"),
        ({"background": True}, "background", "background is not supported"),
        ({"conversation": "conv_1"}, "conversation", "continue with previous_response_id"),
        ({"prompt": {"id": "x"}}, "prompt", "prompt is not supported"),
        ({"truncation": "auto"}, "truncation", "only 'disabled'"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "has the type 'file_search'"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "sun"}},
            "tool_choice",
            "'sun'",
        ),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "sun"}],
                },
            },
            "tool_choice",
            "allows 'sun', expected one of the tools: weather",
        ),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "needs the fields name and schema"),
        ({"top_logprobs": 2}, "top_logprobs", "needs include"),
        ({"include": ["other"]}, "include", "include"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "maximum context length"),
        ({"metadata": {"a": 3}}, "metadata", "metadata"),
        ({"metadata": {str(key): "" for key in range(17)}}, "metadata", "at most 16"),
        ({"input": [{"role": "user", "content": ""}] * 4097}, "input", "at most 4096"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_the_reason(http, body, param, part):
    answer = http.post("/v1/responses", json=asked() | body)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert re.search(part, error["message"]), error["message"]
    assert error["param"] == param and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"metadata": {"a": "\ud800"}}, "not valid Unicode"),
        ({"input": [{"role": "user", "content": "x", "id": "\ud800"}]}, "not valid Unicode"),
        (
            {"tools": [{**WEATHER, "parameters": {"a": "\ud800"}}], "tool_choice": "none"},
            "not valid Unicode",
        ),
    ],
    ids=["metadata", "id", "tool"],
)
def test_what_a_response_could_not_repeat_is_refused_before_it_begins(http, stream, body, part):
    content = json.dumps(asked(stream=stream) | body)
    answer = http.post(
        "/v1/responses", content=content, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400 and part in answer.json()["error"]["message"], answer.text


def test_a_conversation_that_grows_beyond_the_context_is_refused(client):
    made = client.responses.create(**asked("word " * 1500))
    with pytest.raises(openai.BadRequestError, match="maximum context length") as raised:
        client.responses.create(**asked("word " * 1500), previous_response_id=made.id)
    assert raised.value.code == "context_length_exceeded"


def test_a_stored_response_is_not_streamed(client):
    made = client.responses.create(**asked())
    with pytest.raises(openai.BadRequestError, match="cannot be streamed"):
        client.responses.retrieve(made.id, stream=True)


def test_a_client_that_goes_away_ends_its_response(api_server, http):
    body = asked(max_output_tokens=1900, ignore_eos=True)
    names = [{"X-Request-Id": "left-a-response-stream"}, {"X-Request-Id": "left-a-response"}]
    with http.stream(
        "POST", "/v1/responses", json={**body, "stream": True}, headers=names[0]
    ) as it:
        lines = it.iter_lines()
        name = json.loads([next(lines), next(lines)][1].removeprefix("data: "))["response"]["id"]
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/responses", json=body, headers=names[1], timeout=0.3)
    for header in names:
        line = api_server.wait_for(f"request {header['X-Request-Id']}: .*", 60)[0]
        assert line.endswith("finish disconnect")
    time.sleep(0.1)
    assert http.get(f"/v1/responses/{name}").status_code == 404


# Items


def test_items_of_one_turn_become_one_message_of_the_assistant():
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
    items = input_items(
        [
            {"role": "developer", "content": [{"type": "input_text", "text": "Short."}]},
            {"role": "user", "content": "Hello"},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "A"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Hm"}]},
            call,
            {**call, "call_id": "c2"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "2"}],
            },
            {"type": "reasoning", "summary": [], "content": []},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "B"}]},
            call,
            {"role": "assistant", "content": "Done"},
            {"role": "user", "content": "More"},
            call,
        ]
    )
    function = {"name": "weather", "arguments": "{}"}
    called = [{"id": name, "type": "function", "function": function} for name in ("c1", "c2")]
    assert chat_messages("Be kind.", items) == [
        {"role": "system", "content": "Be kind."},
        {"role": "developer", "content": "Short."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "reasoning_content": "A", "content": "Hm", "tool_calls": called},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "assistant", "reasoning_content": "B", "tool_calls": called[:1], "content": ""},
        {"role": "assistant", "content": "Done"},
        {"role": "user", "content": "More"},
        {"role": "assistant", "tool_calls": called[:1], "content": ""},
    ]
    assert items[2]["id"] == "rs_1" and len({item["id"] for item in items}) == len(items)


def test_an_image_is_passed_with_its_detail_and_fields_that_are_unknown_are_dropped():
    image = {"type": "input_image", "image_url": "data:,", "more": 1}
    (item,) = input_items([{"role": "user", "content": [image], "more": 1}])
    assert item["content"] == [{"type": "input_image", "image_url": "data:,", "detail": "auto"}]
    assert "more" not in item
    (message,) = chat_messages(None, [item])
    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": "data:,", "detail": "auto"}}
    ]


def test_a_message_with_too_many_items_is_refused_before_they_are_read():
    with pytest.raises(APIError, match="4097 items"):
        input_items([{}] * 4097)


# Output items


def test_fields_of_other_apis_are_ignored_and_named(http):
    body = {"input": "She said", "max_output_tokens": 2, "max_tokens": 5, "n": 2}
    answer = http.post("/v1/responses", json=body)
    assert answer.json()["usage"]["output_tokens"] == 2
    assert answer.headers["X-Ignored-Fields"] == "max_tokens, n"


def test_logprobs_are_of_the_item_that_is_open_after_them():
    raw = [msgspec.Raw(str(number).encode()) for number in range(6)]
    output, events = OutputItems(), []
    steps = [
        ([], raw[:1]),  # the opening tag
        ([ReasoningDelta("A")], raw[1:2]),
        ([], raw[2:3]),  # the closing tag
        ([ReasoningDelta("!"), ContentDelta("B")], raw[3:5]),
        ([], raw[5:]),  # a part of a character
        ([ToolCallStart(0, "c", "f"), ToolCallArguments(0, "{}")], raw[:2]),
    ]
    for deltas, logprobs in steps:
        events += output.add(ChoiceDelta(0, deltas), logprobs)
    events += output.finish(complete=True)
    reasoning, message, call = output.items()
    assert reasoning["content"][0]["text"] == "A!" and message["content"][0]["text"] == "B"
    assert message["content"][0]["logprobs"] == raw[3:]
    deltas = [each for each in events if each["type"] == "response.output_text.delta"]
    assert [(each["delta"], each["logprobs"]) for each in deltas] == [
        ("B", raw[3:5]),
        ("", raw[5:]),
    ]
    assert (call["call_id"], call["name"], call["arguments"]) == ("c", "f", "{}")
    assert "logprobs" not in output.conversation_items()[1]["content"][0]


def test_a_chat_without_text_is_an_empty_message_and_an_interrupted_item_is_incomplete():
    output = OutputItems()
    assert [each["type"] for each in output.finish(complete=True)][-1].endswith("item.done")
    assert output.items()[0]["content"][0]["text"] == ""
    output = OutputItems()
    list(output.add(ChoiceDelta(0, [ContentDelta("Hal")], (5,)), []))
    assert output.items()[0]["content"] == []
    output.interrupt()
    (item,) = output.items()
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "Hal")


# The store


def stored(name, size=100):
    return StoredResponse(name, 0, b"x" * size, [], 0, [])


def test_the_store_drops_what_was_used_least_recently():
    size = stored("a").num_bytes()
    store = ResponseStore(3 * size)
    for name in "abc":
        store.put(stored(name))
    assert store.get("a", 0) is not None
    store.put(stored("d"))
    store.check()
    assert [name for name in "abcd" if store.get(name, 0)] == ["a", "c", "d"]
    assert store.delete("c") and not store.delete("c")
    store.check()
    assert len(store) == 2 and store.num_bytes == 2 * size


def test_a_continued_conversation_is_counted_without_encoding_it_again():
    def request(text):
        return ResponsesRequest(input=text)

    conversation, _ = _translate(request("a" * 1000), None)
    for text in ("b" * 500, "c" * 200):
        output = input_items([{"role": "assistant", "content": "Yes"}])
        previous = StoredResponse("r", 0, b"{}", conversation.items, conversation.num_bytes, output)
        conversation, _ = _translate(request(text), previous)
    assert len(conversation.items) == 5
    # Each part has two brackets of its own.
    assert 0 <= conversation.num_bytes - item_bytes(conversation.items) < 10


def test_the_store_bounds_the_number_of_responses():
    store = ResponseStore(10**6, max_responses=2)
    for name in "abc":
        store.put(stored(name))
        store.check()
    assert [name for name in "abc" if store.get(name, 0)] == ["b", "c"]


def test_a_response_larger_than_the_store_is_not_kept_and_drops_no_other():
    store = ResponseStore(1000)
    store.put(stored("a"))
    store.put(stored("b", 1000))
    store.check()
    assert store.get("a", 0) is not None and store.get("b", 0) is None


def test_a_store_of_size_zero_keeps_nothing():
    store = ResponseStore(0)
    store.put(stored("a"))
    store.check()
    assert len(store) == 0
