"""Anthropic's Messages API: with Anthropic's client, and with requests that it would not send."""

import json
import re

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("tokenizers")
httpx = pytest.importorskip("httpx")
anthropic = pytest.importorskip("anthropic")
from serving import KEY  # noqa: E402

from atomc.runtime.server.anthropic.chat_request import generation_request  # noqa: E402
from atomc.runtime.server.anthropic.endpoints import _parsed_arguments  # noqa: E402
from atomc.runtime.server.anthropic.request import MessagesRequest  # noqa: E402
from atomc.runtime.server.http.api_keys import ApiKeys  # noqa: E402

pytestmark = pytest.mark.xdist_group("server")
HELLO = [{"role": "user", "content": "She looked at him and said"}]
WEATHER = {
    "name": "weather",
    "description": "the weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
ENDED = {"stop_reason": None, "stop_sequence": None, "stop_details": None, "container": None}
COUNTS = {
    "input_tokens",
    "output_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
}
NOT_COUNTED = ("server_tool_use",)
OF_WHOLE = ("cache_creation", "inference_geo", "service_tier")  # not of the event message_delta
WRITTEN = f"<think>\nParis it is.\n</think>\n\nOne moment.\n{CALL % 'Paris'}\n{CALL % 'Rome'}"


@pytest.fixture(scope="module")
def client(api_server):
    return anthropic.Anthropic(base_url=api_server.url, api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def http(api_server):
    with httpx.Client(base_url=api_server.url, headers={"x-api-key": KEY}, timeout=60) as found:
        yield found


def greedy(**more):
    return {"model": "atomc-demo", "temperature": 0, "max_tokens": 8, "messages": HELLO, **more}


def writes(text, **more):
    """A request whose answer is this text."""
    return greedy(max_tokens=400, structured_outputs={"choice": [text]}, **more)


def answer_of(client, stream=False, **body):
    """The message that the client receives. It has no parameters for some fields."""
    others = ("temperature", "structured_outputs", "ignore_eos")
    asked = {key: value for key, value in body.items() if key not in others}
    asked["extra_body"] = {key: body[key] for key in others if key in body}
    if not stream:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as found:
        return found.get_final_message()


def events(http, body):
    """The (name, data) of each event of a stream."""
    answer = http.post("/v1/messages", json=body | {"stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for event in answer.text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


# Translation


def translated(**more):
    return generation_request(MessagesRequest.model_validate(greedy(**more)))


BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "user", "content": "b"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "any"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "c", "citations": None},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"x": "\u00e4"}},
            {"type": "tool_use", "id": "2", "name": "g", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": "r", "is_error": True},
            {"type": "tool_result", "tool_use_id": "2"},
            {"type": "text", "text": "d", "cache_control": {"type": "ephemeral"}},
        ],
    },
    {"role": "assistant", "content": [{"type": "tool_use", "id": "3", "name": "f", "input": {}}]},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "see"},
            {
                "type": "tool_result",
                "tool_use_id": "3",
                "content": [
                    {"type": "text", "text": "it: "},
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": "AA"},
                    },
                    {"type": "image", "source": {"type": "url", "url": "https://a/b"}},
                ],
            },
        ],
    },
    {"role": "system", "content": "e"},
    {"role": "user", "content": []},
]


def test_blocks_become_messages_of_a_chat():
    def call(name, tool, arguments):
        return {"id": name, "type": "function", "function": {"name": tool, "arguments": arguments}}

    def image(url):
        return {"type": "image_url", "image_url": {"url": url}}

    text = [{"type": "text", "text": each} for each in ("a", "b", "it: ")]
    assert translated(messages=BLOCKS, system=[{"type": "text", "text": "s"}]).messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": text[:2]},
        {
            "role": "assistant",
            "content": "c",
            "reasoning_content": "hm",
            "tool_calls": [call("1", "f", '{"x": "\u00e4"}'), call("2", "g", "{}")],
        },
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "tool", "tool_call_id": "2", "content": ""},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": None, "tool_calls": [call("3", "f", "{}")]},
        {"role": "user", "content": "see"},
        {
            "role": "tool",
            "tool_call_id": "3",
            "content": [text[2], image("data:image/png;base64,AA"), image("https://a/b")],
        },
        {"role": "system", "content": "e"},
        {"role": "user", "content": ""},
    ]


def test_sampling_fields_keep_their_values():
    body = translated(
        top_k=3, top_p=0.5, stop_sequences=["x"], min_p=0.1, cache_salt="mine", priority=2, seed=9
    )
    assert (body.max_tokens, body.temperature, body.top_k, body.top_p) == (8, 0, 3, 0.5)
    assert (body.stop, body.min_p, body.cache_salt) == (["x"], 0.1, "mine")
    assert (body.priority, body.seed) == (2, 9)


@pytest.mark.parametrize(
    ("thinking", "on"),
    [
        (None, None),
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive", "display": "omitted"}, True),
    ],
)
def test_thinking_is_the_switch_of_the_template(thinking, on):
    expected = {} if on is None else {"enable_thinking": on, "thinking": on}
    assert translated(thinking=thinking).chat_template_kwargs == expected
    given = translated(thinking=thinking, chat_template_kwargs={"enable_thinking": 1})
    assert given.chat_template_kwargs == expected | {"enable_thinking": 1}


@pytest.mark.parametrize(
    ("effort", "expected"), [(None, None), ("low", "low"), ("high", "high"), ("max", "high")]
)
def test_an_effort_is_one_that_templates_know(effort, expected):
    assert translated(output_config={"effort": effort}).reasoning_effort == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": [1, {"b": "x"}]}', {"a": [1, {"b": "x"}]}),
        ('{"a": 1, "b": [2, 3', {"a": 1, "b": [2, 3]}),
        ('{"a": 1, "b": wrong', {}),
        ("[1]", {}),
        ("", {}),
        ("[" * 5000, {}),
    ],
)
def test_arguments_that_were_cut_are_read_as_far_as_they_go(text, expected):
    assert _parsed_arguments(text) == expected


# Answers


def test_an_answer_is_that_of_a_chat(client, http):
    found = answer_of(client, **greedy())
    chat = http.post("/v1/chat/completions", json=greedy()).json()
    (block,) = found.content
    assert block.text == chat["choices"][0]["message"]["content"]
    assert (found.role, found.model, found.stop_reason) == ("assistant", "atomc-demo", "max_tokens")
    assert found.id == f"msg_{found._request_id}" and found.stop_sequence is None
    usage = found.usage
    assert usage.output_tokens == 8 and usage.cache_creation_input_tokens == 0
    num_prompt = usage.input_tokens + usage.cache_read_input_tokens
    assert num_prompt == chat["usage"]["prompt_tokens"]


def test_the_prompt_is_that_of_the_same_chat(client, http):
    asked = {
        "system": "You are brief.",
        "tools": [WEATHER],
        "messages": [
            *HELLO,
            {"role": "assistant", "content": [{"type": "text", "text": "nothing."}]},
            {"role": "user", "content": [{"type": "text", "text": "And he?"}]},
        ],
    }
    plain = [
        {"role": "system", "content": "You are brief."},
        *HELLO,
        {"role": "assistant", "content": "nothing."},
        {"role": "user", "content": "And he?"},
    ]
    count = client.messages.count_tokens(model="atomc-demo", **asked).input_tokens
    assert count == http.post("/tokenize", json={"messages": plain}).json()["count"]
    found = answer_of(client, **greedy(**asked))
    chat = http.post("/v1/chat/completions", json=greedy(messages=plain)).json()
    assert found.content[0].text == chat["choices"][0]["message"]["content"]
    assert found.usage.input_tokens + found.usage.cache_read_input_tokens == count


def test_a_last_message_of_the_assistant_is_continued(client, http):
    begun = greedy(messages=[*HELLO, {"role": "assistant", "content": "I am"}])
    found = answer_of(client, **begun)
    chat = http.post("/v1/chat/completions", json=begun | {"continue_final_message": True}).json()
    assert found.content[0].text == chat["choices"][0]["message"]["content"]
    num_prompt = found.usage.input_tokens + found.usage.cache_read_input_tokens
    assert num_prompt == chat["usage"]["prompt_tokens"]


def test_the_events_of_a_stream_form_the_whole_answer(client, http):
    whole = answer_of(client, **greedy(max_tokens=20))
    found = events(http, greedy(max_tokens=20))
    names = [name for name, _ in found]
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert all(data["type"] == name for name, data in found)
    start, last = found[0][1]["message"], found[-2][1]
    assert start["content"] == [] and start["stop_reason"] is None
    assert start["usage"]["output_tokens"] < last["usage"]["output_tokens"] == 20
    assert last["delta"] == ENDED | {"stop_reason": "max_tokens"}
    deltas = [data["delta"]["text"] for name, data in found if name == "content_block_delta"]
    assert len(deltas) > 1 and "".join(deltas) == whole.content[0].text
    final = answer_of(client, stream=True, **greedy(max_tokens=20))
    assert final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == 20


def test_a_message_has_each_field_that_anthropics_schema_requires(http):
    """Its clients read some of them without a default, in languages with static types."""
    whole = http.post("/v1/messages", json=greedy()).json()
    found = dict(events(http, greedy()))
    start, last = found["message_start"]["message"], found["message_delta"]
    fields = {"id", "type", "role", "model", "content", "usage", *ENDED}
    assert whole.keys() == start.keys() == fields
    assert {name: start[name] for name in ENDED} == ENDED
    assert {name: whole[name] for name in ENDED} == last["delta"]
    usages = whole["usage"], start["usage"], last["usage"]
    assert [usage.pop("output_tokens_details") for usage in usages] == [{"thinking_tokens": 0}] * 3
    assert whole["usage"].keys() == start["usage"].keys() == COUNTS | {*NOT_COUNTED, *OF_WHOLE}
    assert last["usage"].keys() == COUNTS | {*NOT_COUNTED}
    for usage in usages:
        assert {value for name, value in usage.items() if name not in COUNTS} == {None}
        assert all(type(usage[name]) is int for name in COUNTS)


def test_blocks_have_each_field_that_anthropics_schema_requires(http):
    asked = writes(WRITTEN, tools=[WEATHER])
    blocks = http.post("/v1/messages", json=asked).json()["content"]
    starts = [
        data["content_block"] for name, data in events(http, asked) if name == "content_block_start"
    ]
    for thinking, text, call, _ in (blocks, starts):
        assert thinking.keys() == {"type", "thinking", "signature"}
        assert text.keys() == {"type", "text", "citations"} and text["citations"] is None
        assert call.keys() == {"type", "id", "name", "input", "caller"}
        assert call["caller"] == {"type": "direct"}


def test_reasoning_text_and_calls_are_blocks_in_this_order(client, http):
    asked = writes(WRITTEN, tools=[WEATHER], thinking={"type": "enabled", "budget_tokens": 1024})
    whole = answer_of(client, **asked)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, *calls = whole.content
    assert (thinking.thinking, text.text) == ("Paris it is.", "One moment.")
    assert thinking.signature
    assert [(call.name, call.input) for call in calls] == [
        ("weather", {"city": "Paris"}),
        ("weather", {"city": "Rome"}),
    ]
    assert whole.stop_reason == "tool_use" and calls[0].id != calls[1].id
    final = answer_of(client, stream=True, **asked)

    def without_ids(message):
        return [block.model_dump(exclude={"id"}) for block in message.content]

    assert without_ids(final) == without_ids(whole) and final.stop_reason == "tool_use"
    starts = [data["index"] for name, data in events(http, asked) if name == "content_block_start"]
    assert starts == [0, 1, 2, 3]
    back = [*HELLO, {"role": "assistant", "content": whole.content}]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls
    ]
    answer_of(client, **greedy(messages=[*back, {"role": "user", "content": results}]))


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_can_be_left_out(client, stream):
    thinking = {"type": "adaptive", "display": "omitted"}
    asked = writes(WRITTEN, thinking=thinking)
    blocks = answer_of(client, stream, **asked).content
    assert blocks[0].thinking == "" and blocks[0].signature
    assert blocks[1].text.startswith("One moment.")


def test_one_call_at_most_if_parallel_calls_are_disabled(client):
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    asked = writes(WRITTEN, tools=[WEATHER], tool_choice=choice)
    calls = [each for each in answer_of(client, **asked).content if each.type == "tool_use"]
    assert [call.input for call in calls] == [{"city": "Paris"}]


@pytest.mark.parametrize(
    "choice",
    [{"type": "tool", "name": "weather"}, {"type": "any", "disable_parallel_tool_use": True}],
)
def test_a_tool_that_is_forced_is_called(client, choice):
    other = {"name": "clock", "input_schema": {"type": "object"}}
    tools = [other, WEATHER] if choice["type"] == "tool" else [WEATHER]
    asked = greedy(max_tokens=300, tools=tools, tool_choice=choice)
    whole = answer_of(client, **asked)
    (call,) = whole.content
    assert call.name == "weather" and call.input["city"] in ("Paris", "Rome")
    final = answer_of(client, stream=True, **asked)
    assert final.content[0].input == call.input
    assert whole.stop_reason == final.stop_reason == "tool_use"


def test_without_a_choice_of_tools_none_is_called(client):
    found = answer_of(client, **writes(WRITTEN, tools=[WEATHER], tool_choice={"type": "none"}))
    assert [block.type for block in found.content] == ["thinking", "text"]
    assert "<tool_call>" in found.content[1].text and found.stop_reason == "end_turn"


def test_a_call_that_max_tokens_cuts_has_the_arguments_so_far(client):
    choice = {"type": "tool", "name": "weather"}
    found = answer_of(client, **greedy(max_tokens=1, tools=[WEATHER], tool_choice=choice))
    assert found.stop_reason == "max_tokens" and found.content[0].input == {}


def test_a_schema_for_the_output_is_kept(client):
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "schema": schema}
    found = answer_of(client, **greedy(max_tokens=200, output_config={"format": form}))
    assert json.loads(found.content[0].text)["a"] in (1, 2) and found.stop_reason == "end_turn"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_ends_the_answer_before_it(client, stream):
    whole = answer_of(client, **greedy(max_tokens=30)).content[0].text
    stop = whole[7:11]
    asked = greedy(max_tokens=30, stop_sequences=["never", stop])
    found = answer_of(client, stream, **asked)
    assert found.content[0].text == whole[: whole.index(stop)]
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)


def test_max_tokens_above_the_context_is_what_the_context_has_left(client):
    messages = [{"role": "user", "content": "She said. " * 650}]
    asked = greedy(messages=messages, max_tokens=32_000, ignore_eos=True)
    found = answer_of(client, stream=True, **asked)
    usage = found.usage
    total = usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens
    assert (found.stop_reason, total) == ("model_context_window_exceeded", 2048)


def test_the_line_that_claude_code_changes_in_each_request_does_not_hide_the_cache(http):
    def usage(number):
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}
        system = [billing, {"type": "text", "text": "Write as in this book. " * 60}]
        answer = http.post("/v1/messages?beta=true", json=greedy(system=system))
        return answer.json()["usage"]

    first, second = usage(1), usage(2)
    assert second["cache_read_input_tokens"] > 200
    fields = ("input_tokens", "cache_read_input_tokens", "output_tokens")
    assert sum(map(first.get, fields)) == sum(map(second.get, fields))


def test_a_client_that_goes_away_frees_its_place(api_server, http):
    body = greedy(max_tokens=2000, ignore_eos=True)
    names = [{"X-Request-Id": "left-a-message-stream"}, {"X-Request-Id": "left-a-message"}]
    with http.stream(
        "POST", "/v1/messages", json={**body, "stream": True}, headers=names[0]
    ) as answer:
        next(answer.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/messages", json=body, headers=names[1], timeout=0.3)
    for name in names:
        line = api_server.wait_for(f"request {name['X-Request-Id']}: .*", 60)[0]
        assert line.endswith("finish disconnect")


# Errors


def block(**fields):
    return {"messages": [{"role": "user", "content": [fields]}]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"max_tokens": None}, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"temperature": -1}, "temperature is -1.0"),
        ({"temperature": 2.1}, "temperature: .* less than or equal to 2"),
        ({"messages": []}, "messages is empty"),
        ({"messages": "x"}, "messages: Input should be a valid list"),
        ({"messages": [{"role": "user", "content": 7}]}, "it is a number, expected a string or a"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0: .*'tool'.*'user'"),
        ({"messages": [{"content": "x"}]}, "messages.0: .*'role'"),
        ({"messages": [*HELLO, {"role": "assistant", "content": ""}]}, "does not end with text"),
        ({"messages": [{"role": "user", "content": ""}] * 4097}, "messages: it has 4097 messages, at most 4096"),
        ({"messages": [{"role": "user", "content": [{}] * 5000}] * 4}, "it has 20000 content blocks"),
        ({"system": [{}] * 20000}, "system: .*it has 20000 content blocks, at most 2048"),
        (block(type="tool_result", content=[{}] * 20000), "it has 20001 content blocks"),
        (block(type="video"), "'video' .*'text', 'image', 'tool_result'"),
        (block(type="thinking", thinking="x"), "'thinking' .*'text', 'image', 'tool_result'"),
        (block(text="x"), "content.0: .*'type'"),
        (block(type="text"), "content.0.text.text: Field required"),
        (block(type="text", text=[]), "content.0.text.text: Input should be a valid string"),
        (block(type="tool_result", content="x"), "tool_use_id: Field required"),
        (block(type="tool_result", tool_use_id="1", content=[{"type": "document"}]), "'document'"),
        (block(**IMAGE), "this model reads no images"),
        (block(type="tool_result", tool_use_id="1", content=[IMAGE]), "reads no images"),
        (block(type="image", source={"type": "file", "file_id": "1"}), "'file'.*'base64', 'url'"),
        ({"system": 1}, "system: .*it is a number, expected a string or a list of content blocks"),
        ({"system": [IMAGE]}, "system.0.type: Input should be 'text'"),
        ({"tools": [{"name": "x"}]}, "tools.0.input_schema: Field required"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [WEATHER] * 129}, "tools has 129 tools, at most 128 are allowed"),
        ({"tool_choice": {"type": "any"}}, "tools is empty"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "sun"}}, "'sun'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "some"}}, "tool_choice: .*'some'"),
        ({"tools": [{"name": "f", "input_schema": {"enum": [3]}}], "tool_choice": {"type": "tool", "name": "f"}}, "Unsatisfiable schema"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"stop_sequences": [""] * 40}, "40 strings"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs cannot set 'messages'"),
        ({"cache_salt": "\ud800", "messages": [{"role": "user", "content": "\ud800"}]}, "not valid Unicode"),
    ],
)  # fmt: skip
def test_an_invalid_request_gets_an_error_of_anthropics_form(http, changed, part):
    content = json.dumps(greedy(**changed))
    answer = http.post(
        "/v1/messages", content=content, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    found = answer.json()
    assert found.keys() == {"type", "error", "request_id"} and found["type"] == "error"
    assert found["error"].keys() == {"type", "message"}
    assert found["error"]["type"] == "invalid_request_error"
    assert re.search(part, found["error"]["message"]), found["error"]["message"]
    assert found["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert ".py" not in answer.text


def test_the_client_raises_the_error_of_each_status(api_server, client):
    def raised(kind, **more):
        with pytest.raises(kind) as found:
            answer_of(client, **greedy(**more))
        return found.value.type, found.value.api_message

    assert raised(anthropic.BadRequestError, max_tokens=0)[0] == "invalid_request_error"
    found = raised(anthropic.NotFoundError, model="claude")
    assert found[0] == "not_found_error" and "'claude' does not exist" in found[1]
    large = [{"role": "user", "content": "x" * 300_000}]
    found = raised(anthropic.RequestTooLargeError, messages=large)
    assert found == ("request_too_large", "the body exceeds the limit of 200000 bytes")
    stranger = anthropic.Anthropic(base_url=api_server.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError, match="missing or invalid API key") as error:
        answer_of(stranger, **greedy())
    assert error.value.type == "authentication_error" and error.value.request_id


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("POST", "/v1/messages/count_tokens", 400, "invalid_request_error"),
    ],
)
def test_other_paths_of_the_api_have_its_errors(http, method, path, status, kind):
    answer = http.request(method, path)
    assert answer.status_code == status and answer.json()["error"]["type"] == kind


def test_paths_of_openais_api_keep_its_errors(http):
    for path in ("/v1/messages2", "/v1/chat/completions"):
        answer = http.post(path, json={})
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
        assert "request-id" not in answer.headers


BEARER = f"Bearer {KEY}"


@pytest.mark.parametrize(
    ("headers", "opens"),
    [
        ([("x-api-key", KEY)], True),
        ([("x-api-key", "second-key")], True),
        ([("x-api-key", "wrong")], False),
        ([("x-api-key", BEARER)], False),
        ([("x-api-key", KEY), ("x-api-key", KEY)], False),
        ([("x-api-key", KEY), ("authorization", BEARER)], True),
        ([("x-api-key", KEY), ("authorization", "Bearer wrong")], False),
        ([("x-api-key", "wrong"), ("authorization", BEARER)], False),
    ],
)
def test_a_key_may_be_in_the_header_of_anthropics_api(headers, opens):
    encoded = [(name.encode(), value.encode()) for name, value in headers]
    assert (ApiKeys([KEY, "second-key"]).caller(encoded) is not None) == opens
