"""The server's API over HTTP on the demo model: with OpenAI's client, and with requests that it
would not send.
"""

import json
import math
import operator
import re
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import pytest

import atomc

pytest.importorskip("fastapi")
pytest.importorskip("tokenizers")
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
from serving import KEY  # noqa: E402

pytestmark = pytest.mark.xdist_group("server")
EMPTY = '""'
HELLO = [{"role": "user", "content": "She looked at him and said"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {
            "$ref": "#/$defs/Zone",
            "$defs": {
                "Zone": {
                    "type": "object",
                    "properties": {"zone": {"enum": ["UTC"]}},
                    "required": ["zone"],
                    "additionalProperties": False,
                }
            },
        },
    },
}


@pytest.fixture(scope="module")
def server(api_server):
    return api_server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(
        base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60
    ) as found:
        yield found


def greedy(**more):
    return {"model": "atomc-demo", "temperature": 0, "max_tokens": 8, **more}


def events(answer):
    """The events of a stream, and whether it ends with [DONE]."""
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    return [json.loads(each) for each in data if each != "[DONE]"], data[-1] == "[DONE]"


# Completions


def test_models_names_the_model_and_its_length(client):
    (model,) = client.models.list().data
    assert model.id == "atomc-demo" and model.max_model_len == 2048
    assert client.models.retrieve("atomc-demo") == model
    assert model.input_modalities == ["text"]
    with pytest.raises(openai.NotFoundError, match="'gpt/4' does not exist"):
        client.models.retrieve("gpt/4")


def test_an_image_is_refused_with_the_reason_by_a_text_model(client):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    reason = "this model reads no images: Qwen3ForCausalLM has no vision encoder"
    with pytest.raises(openai.BadRequestError, match=reason):
        client.chat.completions.create(messages=[{"role": "user", "content": [image]}], **greedy())


def test_a_completion_is_the_text_that_llm_gives(client):
    from atomc import LLM, SamplingParams

    llm = LLM(options={"glue": "eager"}, progress=False)
    (expected,) = llm.generate("She looked at him", SamplingParams(max_tokens=12))
    found = client.completions.create(prompt="She looked at him", **greedy(max_tokens=12))
    assert found.choices[0].text == expected.text and found.choices[0].finish_reason == "length"
    assert (
        found.usage.prompt_tokens == len(expected.prompt_token_ids)
        and found.usage.completion_tokens == 12
    )


def test_a_stream_gives_the_text_of_the_whole_answer(client):
    whole = client.completions.create(prompt="In the beginning", **greedy(max_tokens=20))
    chunks = list(
        client.completions.create(
            prompt="In the beginning",
            stream=True,
            **greedy(max_tokens=20),
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 20


def test_prompts_are_texts_tokens_and_lists_of_either(client, http):
    texts = ["She said", "He said"]
    tokens = [http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in texts]
    alone = [client.completions.create(prompt=text, **greedy()).choices[0].text for text in texts]
    for prompt in (texts, tokens):
        choices = client.completions.create(prompt=prompt, **greedy()).choices
        assert [choice.text for choice in choices] == alone and [
            choice.index for choice in choices
        ] == [0, 1]
    assert client.completions.create(prompt=tokens[1], **greedy()).choices[0].text == alone[1]


def test_n_answers_differ_and_come_again_with_the_same_seed(client):
    def texts():
        found = client.completions.create(
            prompt="Once", n=4, seed=7, temperature=1, max_tokens=12, model="atomc-demo"
        )
        return [choice.text for choice in found.choices]

    assert len(set(texts())) == 4 and texts() == texts()


def test_echo_puts_the_prompt_before_the_answer_with_its_logprobs(client):
    found = client.completions.create(
        prompt="She said", echo=True, logprobs=2, **greedy(max_tokens=3)
    ).choices[0]
    plain = client.completions.create(
        prompt="She said", logprobs=2, **greedy(max_tokens=3)
    ).choices[0]
    assert found.text == "She said" + plain.text
    logprobs = found.logprobs
    assert logprobs.token_logprobs[0] is None and all(
        value <= 0 for value in logprobs.token_logprobs[1:]
    )
    assert logprobs.token_logprobs[-3:] == pytest.approx(plain.logprobs.token_logprobs, abs=1e-3)
    assert "".join(logprobs.tokens) == found.text
    assert [found.text[at] for at in logprobs.text_offset] == [
        token[0] for token in logprobs.tokens
    ]
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs[1:])


def test_echo_without_new_tokens_scores_a_prompt(client):
    found = client.completions.create(
        prompt="She said", echo=True, logprobs=1, **greedy(max_tokens=0)
    ).choices[0]
    assert (
        found.text == "She said"
        and len(found.logprobs.tokens) == len(found.logprobs.token_logprobs) >= 2
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_before_it(client, stream):
    whole = client.completions.create(prompt="She said", **greedy(max_tokens=30)).choices[0].text
    stop = whole[7:11]
    found = client.completions.create(
        prompt="She said", stop=stop, stream=stream, **greedy(max_tokens=30)
    )
    choices = [chunk.choices[0] for chunk in found] if stream else found.choices
    assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
    assert choices[-1].finish_reason == "stop" and choices[-1].stop_reason == stop


def test_fields_beyond_openai_reach_the_sampler(client):
    free = {
        "model": "atomc-demo",
        "prompt": "She said",
        "max_tokens": 6,
        "temperature": 2,
        "seed": 1,
    }
    likeliest = client.completions.create(prompt="She said", **greedy(max_tokens=6)).choices[0].text
    for extra in ({"top_k": 1}, {"min_p": 1.0}):
        assert client.completions.create(**free, extra_body=extra).choices[0].text == likeliest
    (token,) = (
        client.completions.create(prompt="She said", logprobs=0, **greedy(max_tokens=1))
        .choices[0]
        .logprobs.tokens
    )
    banned = client.completions.create(
        prompt="She said", logit_bias={"5": 100}, **greedy(max_tokens=1), logprobs=0
    )
    assert banned.choices[0].logprobs.tokens != [token]
    stopped = client.completions.create(
        prompt="She said", logit_bias={"5": 100}, **greedy(), extra_body={"stop_token_ids": [5]}
    ).choices[0]
    assert stopped.finish_reason == "stop" and stopped.stop_reason == 5


def test_a_second_request_with_the_same_beginning_says_what_was_cached(http):
    prompt = list(range(40, 440))
    used = [
        http.post("/v1/completions", json=greedy(prompt=prompt)).json()["usage"] for _ in range(2)
    ]
    assert used[1]["prompt_tokens_details"]["cached_tokens"] > 300
    salted = http.post("/v1/completions", json=greedy(prompt=prompt, cache_salt="mine")).json()[
        "usage"
    ]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0


def cached_tokens(http, key, path, **body):
    """Of a request with this key, from its usage and from the metrics."""

    def hits():
        text = http.get("/metrics").text
        return int(float(re.search(r"atomc:prefix_cache_hits_total\{.*\} (\S+)", text)[1]))

    before = hits()
    headers = {"Authorization": f"Bearer {key}"}
    response = http.post(path, json={"model": "atomc-demo", **body}, headers=headers)
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    in_usage = usage.get("cache_read_input_tokens", 0)
    for name in ("prompt_tokens_details", "input_tokens_details"):
        in_usage = usage.get(name, {}).get("cached_tokens", in_usage)
    return in_usage, hits() - before


def private_text(name):
    return f"{name}: no other key may learn of this. " * 20


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": private_text("One"), "max_tokens": 1}),
        ("/v1/completions", {"prompt": private_text("Salt"), "max_tokens": 1, "cache_salt": "x"}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": private_text("Chat")}], "max_tokens": 1},
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": private_text("Claude")}], "max_tokens": 1},
        ),
        ("/v1/responses", {"input": private_text("Answer"), "max_output_tokens": 16}),
        ("/v1/embeddings", {"input": private_text("Vector"), "pooling": "last"}),
    ],
)
def test_a_key_does_not_learn_what_another_one_has_sent(http, path, body):
    first, again = (cached_tokens(http, KEY, path, **body) for _ in range(2))
    other = cached_tokens(http, "second-key", path, **body)
    assert first == other == (0, 0)
    assert again[1] > 100 and (again[0] == again[1] or "embeddings" in path)


# Chat


def test_a_chat_answers_and_streams_the_same(client):
    whole = client.chat.completions.create(messages=HELLO, **greedy())
    chunks = list(
        client.chat.completions.create(
            messages=HELLO, stream=True, stream_options={"include_usage": True}, **greedy()
        )
    )
    text = whole.choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text
    assert chunks[0].choices[0].delta.role == whole.choices[0].message.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage


def test_content_may_be_parts_of_text(client):
    parts = [{"role": "user", "content": [{"type": "text", "text": HELLO[0]["content"]}]}]
    found = client.chat.completions.create(messages=parts, **greedy()).choices[0].message
    assert found == client.chat.completions.create(messages=HELLO, **greedy()).choices[0].message


def test_max_completion_tokens_goes_before_max_tokens(client):
    found = client.chat.completions.create(
        messages=HELLO, max_completion_tokens=3, **greedy(max_tokens=9)
    )
    assert found.usage.completion_tokens == 3


def test_chat_logprobs_have_bytes_and_the_most_likely_tokens(client):
    whole = client.chat.completions.create(
        messages=HELLO, logprobs=True, top_logprobs=3, **greedy()
    ).choices[0]
    assert (
        b"".join(bytes(each.bytes) for each in whole.logprobs.content).decode()
        == whole.message.content
    )
    for each in whole.logprobs.content:
        assert (
            each.logprob <= 0
            and len(each.top_logprobs) == 3
            and each.top_logprobs[0].token == each.token
        )
    chunks = list(
        client.chat.completions.create(
            messages=HELLO, logprobs=True, top_logprobs=3, stream=True, **greedy()
        )
    )
    streamed = [
        each
        for chunk in chunks
        if chunk.choices[0].logprobs
        for each in chunk.choices[0].logprobs.content
    ]
    assert [each.token for each in streamed] == [each.token for each in whole.logprobs.content]


def test_a_json_schema_makes_json_of_that_schema(client):
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"enum": [1, 2]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": schema, "strict": True},
    }
    asked = {"messages": HELLO, "response_format": form, **greedy(max_tokens=300)}
    for stream in (False, True):
        found = client.chat.completions.create(**asked, stream=stream)
        text = (
            "".join(chunk.choices[0].delta.content or "" for chunk in found)
            if stream
            else found.choices[0].message.content
        )
        person = json.loads(text)
        assert person["name"] in ("Ann", "Bob") and person["age"] in (1, 2)


def test_the_old_and_the_new_field_of_vllm_may_say_the_same(client):
    fields = {"guided_regex": "[0-9]{3}", "structured_outputs": {"regex": "[0-9]{3}"}}
    found = client.chat.completions.create(messages=HELLO, extra_body=fields, **greedy())
    assert re.fullmatch("[0-9]{3}", found.choices[0].message.content)


def test_objects_are_closed_unless_a_request_opens_them(http):
    # After {"a":1 nothing but } may follow, or also another property, which the bias prefers.
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    tokens = http.post("/tokenize", json={"prompt": '{"a":1,"'}).json()["tokens"]
    bias = {"logit_bias": {tokens[-1]: 100}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    opened = {"structured_outputs": {"disable_additional_properties": False}}
    for more in ({"response_format": form}, {"tools": [tool], "tool_choice": "required"}):
        body = greedy(messages=HELLO, max_tokens=40, **bias, **more)
        closed, other = (
            http.post("/v1/chat/completions", json=each).text for each in (body, body | opened)
        )
        assert r"{\"a\":1}" in closed and r"{\"a\":1,\"" in other


@pytest.mark.parametrize("name", ["reasoning_split", "a\r\nSet-Cookie: x", "\u00fc" * 200, ""])
def test_unknown_fields_are_ignored_and_named(http, server, name):
    tools = [{"type": "function", "function": {"name": "f", "x_kind": 1}}]
    known = greedy(messages=HELLO, max_tokens=2)
    answer = http.post(
        "/v1/chat/completions",
        json=known | {"tools": tools, name: 1},
        headers={"X-Request-Id": "odd"},
    )
    expected = http.post(
        "/v1/chat/completions",
        json=known | {"tools": [{"type": "function", "function": {"name": "f"}}]},
    )
    assert answer.json()["choices"] == expected.json()["choices"]
    names = f"{quote(name[:64]) or EMPTY}, tools.0.function.x_kind"
    assert answer.headers["X-Ignored-Fields"] == names
    assert "X-Ignored-Fields" not in expected.headers
    server.wait_for(re.escape(f"request odd: ignored unknown fields {names}"), 5)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_tokens_are_returned_on_request(http, path):
    text = {"prompt": "She said"} if path == "completions" else {"messages": HELLO}
    body = greedy(**text, n=2, seed=1, temperature=1, return_token_ids=True)
    expected = http.post("/tokenize", json=text).json()["tokens"]
    whole = http.post(f"/v1/{path}", json=body).json()
    streamed, _ = events(http.post(f"/v1/{path}", json=body | {"stream": True}))
    prompts = [whole, *streamed] + [each for one in (whole, *streamed) for each in one["choices"]]
    prompts = [each["prompt_token_ids"] for each in prompts if "prompt_token_ids" in each]
    assert prompts == [expected] * (2 if path == "chat/completions" else 4)
    for choice in whole["choices"]:
        parts = [
            c.get("token_ids", [])
            for e in streamed
            for c in e["choices"]
            if c["index"] == choice["index"]
        ]
        assert [token for part in parts for token in part] == choice["token_ids"] and len(
            choice["token_ids"]
        ) == 8
        found = http.post("/detokenize", json={"tokens": choice["token_ids"]}).json()["prompt"]
        assert found.strip() == (choice.get("text") or choice["message"]["content"]).strip()


def test_an_answer_continues_the_final_message(http):
    begun = [*HELLO, {"role": "assistant", "content": "I am"}]
    body = greedy(messages=begun, continue_final_message=True, return_token_ids=True)
    found = http.post("/v1/chat/completions", json=body).json()
    prompt = http.post("/detokenize", json={"tokens": found["prompt_token_ids"]}).json()["prompt"]
    assert prompt.endswith("I am")
    asked = {"messages": begun, "continue_final_message": True}
    assert http.post("/tokenize", json=asked).json()["tokens"] == found["prompt_token_ids"]


def test_version_load_and_ping(http):
    assert http.get("/version").json() == {"version": atomc.__version__}
    assert http.get("/load").json() == {"server_load": 0}
    with http.stream(
        "POST", "/v1/completions", json=greedy(prompt="x", max_tokens=500, n=2, stream=True)
    ):
        assert http.get("/load").json() == {"server_load": 2}
    assert http.get("/ping").json() == http.post("/ping").json() == {"status": "ok"}


@pytest.mark.parametrize(
    "extra, pattern",
    [
        ({"structured_outputs": {"regex": "[a-c]{5}"}}, "[a-c]{5}"),
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"guided_choice": ["up", "down"]}, "up|down"),
        ({"guided_grammar": 'start: "x" "y"+ "z"'}, "xy+z"),
        ({"guided_json": {"enum": ["Ann"]}}, '"Ann"'),
    ],
)
def test_vllms_names_for_structured_output(client, extra, pattern):
    found = client.chat.completions.create(
        messages=HELLO, extra_body=extra, **greedy(max_tokens=40)
    )
    text, ended = found.choices[0].message.content, found.choices[0].finish_reason == "stop"
    assert re.fullmatch(pattern, text) if ended else text.startswith("xy")


def test_a_function_by_name_is_called(client):
    choice = {"type": "function", "function": {"name": "weather"}}
    found = client.chat.completions.create(
        messages=HELLO, tools=[CLOCK, WEATHER], tool_choice=choice, **greedy(max_tokens=300)
    ).choices[0]
    (call,) = found.message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in (
        "Paris",
        "Rome",
    )
    assert found.message.content is None and call.id.startswith("call_")


@pytest.mark.parametrize("tools", [[WEATHER], [CLOCK], [WEATHER, CLOCK]])
def test_required_tools_are_called_whole_and_streamed(client, tools):
    asked = {
        "messages": HELLO,
        "tools": tools,
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    whole = client.chat.completions.create(**asked, **greedy(max_tokens=400)).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls"
    assert call.function.name in [tool["function"]["name"] for tool in tools]
    arguments = json.loads(call.function.arguments)
    assert arguments.get("zone") == "UTC" or arguments.get("city") in ("Paris", "Rome")
    chunks = [
        chunk.choices[0]
        for chunk in client.chat.completions.create(**asked, stream=True, **greedy(max_tokens=400))
    ]
    calls = [each for chunk in chunks for each in chunk.delta.tool_calls or []]
    assert calls[0].function.name == call.function.name and calls[0].id
    assert "".join(each.function.arguments for each in calls) == call.function.arguments
    assert chunks[-1].finish_reason == "tool_calls"


WRITTEN = """<think>
Paris it is.
</think>

One moment.
<tool_call>
{"name": "weather", "arguments": {"city": "Paris"}}
</tool_call>"""


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_content_and_tool_calls_are_separated(client, stream):
    asked = {"messages": HELLO, "tools": [WEATHER], "extra_body": {"guided_choice": [WRITTEN]}}
    found = client.chat.completions.create(**asked, stream=stream, **greedy(max_tokens=300))
    parts = [chunk.choices[0].delta for chunk in found] if stream else [found.choices[0].message]
    thought = "".join(getattr(part, "reasoning_content", None) or "" for part in parts)
    assert (thought, "".join(part.content or "" for part in parts)) == (
        "Paris it is.",
        "One moment.",
    )
    calls = [call.function for part in parts for call in part.tool_calls or []]
    assert (
        calls[0].name == "weather"
        and "".join(call.arguments for call in calls) == '{"city": "Paris"}'
    )
    if not stream:
        assert found.choices[0].finish_reason == "tool_calls"
        counted = found.usage.completion_tokens_details.reasoning_tokens
        answered = client.chat.completions.create(
            messages=HELLO,
            extra_body={"guided_choice": [WRITTEN.partition("\n\n")[2]]},
            **greedy(max_tokens=300),
        )
        assert answered.usage.completion_tokens_details.reasoning_tokens == 0
        assert counted + answered.usage.completion_tokens <= found.usage.completion_tokens
        assert counted > found.usage.completion_tokens - answered.usage.completion_tokens - 3


def test_without_a_choice_of_tools_none_is_called(client):
    asked = {
        "messages": HELLO,
        "tools": [WEATHER],
        "tool_choice": "none",
        "extra_body": {"guided_choice": [WRITTEN]},
    }
    message = client.chat.completions.create(**asked, **greedy(max_tokens=300)).choices[0].message
    assert message.tool_calls is None and "<tool_call>" in message.content


# Other endpoints


def test_tokens_there_and_back(http):
    found = http.post("/tokenize", json={"prompt": "She said", "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 2048
    assert "".join(found["token_strs"]) == "She said"
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {
        "prompt": "She said"
    }
    chat = http.post("/tokenize", json={"messages": HELLO}).json()
    assert (
        http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
        == HELLO[0]["content"] + "\n\n"
    )


def test_health_ready_and_metrics_need_no_key(server, http):
    for path in ("/health", "/ready", "/metrics"):
        assert httpx.get(server.url + path, timeout=60).status_code == 200
    text = http.get("/metrics").text
    model = r'model_name="atomc-demo"\}'
    for label, name in [
        *(
            (r'\{engine="0",', name)
            for name in (
                "up",
                "num_requests_running",
                "num_requests_waiting",
                "kv_cache_usage_perc",
                "prefix_cache_hits_total",
                "state_snapshot_hits_total",
                "state_snapshots",
                "num_preemptions_total",
                "generation_tokens_total",
            )
        ),
        (r'\{engine="0",kind="eager[^"]*",', "steps_total"),
        (r"\{", "time_to_first_token_seconds_count"),
        (r"\{", "e2e_request_latency_seconds_count"),
        (r"\{", "request_time_per_output_token_seconds_count"),
    ]:
        assert re.search(rf"^atomc:{name}{label}{model} \d", text, re.MULTILINE), name
    finished = (
        r'^atomc:request_success_total\{finished_reason="length",model_name="atomc-demo"\} \d'
    )
    assert re.search(finished, text, re.MULTILINE)


def test_the_compilers_report_is_there(http):
    http.post("/v1/completions", json=greedy(prompt="She said", max_tokens=1))
    report = http.get("/compiler").json()
    assert report["steps"]["eager: on a CPU"] > 0
    assert report["model"] == "Qwen3ForCausalLM" and report["matches"]["add_rms_norm"] == 6


def test_a_profile_is_written_into_the_folder_of_the_flag(server, http):
    assert http.post("/stop_profile").status_code == 400
    assert http.post("/start_profile").json() == {"status": "started"}
    http.post("/v1/completions", json=greedy(prompt="She said", max_tokens=1))
    file = http.post("/stop_profile").json()["file"]
    assert (server.profiles / file).stat().st_size > 1000 and "/" not in file


def test_embeddings_are_of_length_one_alike_for_alike_texts_and_the_same_in_base64(client, http):
    texts = ["She said nothing.", "She said nothing at all.", "1 2 3 4 5 6"]
    found = client.embeddings.create(model="atomc-demo", input=texts)  # the client asks for base64
    vectors = [each.embedding for each in found.data]
    assert [len(vector) for vector in vectors] == [256] * 3 and found.usage.prompt_tokens > 10
    assert all(math.isclose(math.hypot(*vector), 1, rel_tol=1e-3) for vector in vectors)
    alike, other = (sum(map(operator.mul, vectors[0], vector)) for vector in vectors[1:])
    assert alike > other
    plain = http.post(
        "/v1/embeddings", json={"input": texts[0], "encoding_format": "float"}
    ).json()["data"]
    assert plain[0]["embedding"] == pytest.approx(vectors[0], abs=1e-2)
    last = http.post("/v1/embeddings", json={"input": texts[0], "pooling": "last"}).json()["data"]
    assert last[0]["embedding"] != plain[0]["embedding"]


# Client errors


@pytest.mark.parametrize(
    "path, body, status, part",
    [
        ("/v1/completions", {"prompt": ""}, 400, "the prompt is empty|prompt is empty"),
        ("/v1/completions", {"prompt": []}, 400, "prompt is empty"),
        ("/v1/completions", {}, 400, "prompt: Field required"),
        (
            "/v1/completions",
            {"prompt": [99999]},
            400,
            "token id 99999 is not in the vocabulary of 3072 tokens",
        ),
        (
            "/v1/completions",
            {"prompt": [5] * 2048},
            400,
            "maximum context length is 2048 tokens, .* 2048 in the prompt",
        ),
        (
            "/v1/completions",
            {"prompt": [5] * 2000, "max_tokens": 49},
            400,
            "has 2000 in the prompt and asks for 49 more",
        ),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens is 0"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 10**30}, 400, "max_tokens"),
        (
            "/v1/completions",
            {"prompt": "x", "temperature": -1},
            400,
            "temperature is -1.0, it must be",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "temperature": 2.1},
            400,
            "temperature: .* less than or equal to 2",
        ),
        ("/v1/completions", {"prompt": "x", "best_of": 3}, 400, "best_of=3 is not supported"),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "suffix is not supported"),
        (
            "/v1/completions",
            {"prompt": "x", "logprobs": 6},
            400,
            "logprobs is 6, it must be at least 0 and at most 5",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "model": "gpt-4"},
            404,
            "'gpt-4' does not exist, expected atomc-demo",
        ),
        ("/v1/completions", {"prompt": "x", "seed": 2**70}, 400, "seed"),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [4000]}, 400, "token id 4000"),
        ("/v1/completions", {"prompt": "x", "guided_regex": "["}, 400, "regex"),
        (
            "/v1/completions",
            {"prompt": "x", "guided_regex": "a", "guided_choice": ["b"]},
            400,
            "several kinds of",
        ),
        (
            "/v1/completions",
            {"prompt": ["x"] * 100, "n": 20},
            400,
            "asks for 2000 choices, the queue holds at most 1024",
        ),
        ("/v1/chat/completions", {"messages": []}, 400, "messages is empty"),
        (
            "/v1/chat/completions",
            {"messages": [{"content": "x"}]},
            400,
            "expected an object with a role",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "this model reads no images",
        ),
        (
            "/v1/chat/completions",
            {"messages": HELLO, "top_logprobs": 2},
            400,
            "top_logprobs needs logprobs",
        ),
        (
            "/v1/chat/completions",
            {"messages": HELLO, "tool_choice": "required"},
            400,
            "tools is empty",
        ),
        (
            "/v1/chat/completions",
            {"messages": HELLO, "response_format": {"type": "json_schema"}},
            400,
            "needs a field",
        ),
        (
            "/v1/chat/completions",
            {
                "messages": HELLO,
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "sun"}},
            },
            400,
            "'sun'",
        ),
        ("/v1/embeddings", {"input": "x", "dimensions": 7}, 400, "dimensions is 7, expected 256"),
        (
            "/v1/embeddings",
            {"input": [5] * 2049},
            400,
            "maximum context length is 2048 tokens, an input has 2049",
        ),
        ("/detokenize", {"tokens": [4000]}, 400, "token id 4000"),
        ("/tokenize", {}, 400, "expected one of them"),
        ("/v1/nothing", {}, 404, "no endpoint POST /v1/nothing"),
        ("/v1/models", {}, 405, "no endpoint POST /v1/models"),
    ],
)
def test_an_invalid_request_gets_an_error_with_the_reason(http, path, body, status, part):
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (
        set(error) == {"message", "type", "param", "code"}
        and error["type"] == "invalid_request_error"
    )
    assert re.search(part, error["message"]), error["message"]
    assert (
        "/work" not in answer.text and "Traceback" not in answer.text and ".py" not in answer.text
    )


@pytest.mark.parametrize(
    "content, part",
    [
        (b"{", "not JSON"),
        (b'{"prompt": "\\ud800"}', "unicode|Unicode"),
        (b'{"prompt": "x", "temperature": NaN}', "not JSON"),
        (b"[" * 100_000, "more than 128 levels of nested"),
        (b'"text"', "the body"),
    ],
)
def test_a_body_that_is_no_request_is_a_400(http, content, part):
    answer = http.post(
        "/v1/completions", content=content, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400 and re.search(part, answer.json()["error"]["message"])


def test_json_with_another_content_type_is_rejected(http):
    answer = http.post(
        "/v1/completions",
        content=b'{"prompt": "x"}',
        headers={"Content-Type": "application/x-www-form-urlencoded"},
    )
    assert answer.status_code == 400
    assert (
        "Content-Type is 'application/x-www-form-urlencoded': send JSON"
        in answer.json()["error"]["message"]
    )


@pytest.mark.parametrize(
    "header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}]
)
def test_without_a_key_there_is_a_401(server, header):
    for path in ("/v1/models", "/compiler", "/status", "/docs/x", "/nowhere"):
        answer = httpx.get(server.url + path, headers=header)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"


def test_each_of_several_keys_opens(server):
    assert (
        httpx.get(
            f"{server.url}/v1/models", headers={"Authorization": "Bearer second-key"}
        ).status_code
        == 200
    )


def test_a_large_body_is_a_413_whether_or_not_it_says_its_size(http):
    large = b'{"prompt": "' + b"x" * 300_000 + b'"}'
    assert http.post("/v1/completions", content=large).status_code == 413
    answer = http.post("/v1/completions", content=iter([large[:100_000], large[100_000:]]))
    assert answer.status_code == 413 and "200000 bytes" in answer.json()["error"]["message"]


def test_the_clients_request_id_is_returned_and_logged(server, http):
    answer = http.post(
        "/v1/completions", json=greedy(prompt="x"), headers={"X-Request-Id": "my-request-7"}
    )
    assert (
        answer.headers["x-request-id"] == "my-request-7"
        and answer.json()["id"] == "cmpl-my-request-7"
    )
    line = server.wait_for("request my-request-7: .*", 60)[0]
    assert re.search(
        r"prompt \d+, cached \d+, new 8, ttft \d\.\d+, seconds \d\.\d+, finish length$", line
    )
    answer = http.get("/health", headers={"X-Request-Id": "two words"})
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])


def test_only_pages_of_the_origins_that_are_allowed_may_call(server):
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    found = [
        httpx.options(f"{server.url}/v1/completions", headers={"Origin": origin, **asked})
        for origin in ("https://page.example", "https://other.example")
    ]
    assert found[0].headers["access-control-allow-origin"] == "https://page.example"
    assert "access-control-allow-origin" not in found[1].headers


def test_a_client_that_goes_away_frees_its_place_and_is_logged(server, http):
    def running():
        return int(
            float(
                re.search(
                    r"^atomc:num_requests_running\{.*\} (\S+)",
                    http.get("/metrics").text,
                    re.MULTILINE,
                )[1]
            )
        )

    body = greedy(prompt="Once", max_tokens=2000, ignore_eos=True)
    names = [{"X-Request-Id": "left-a-stream"}, {"X-Request-Id": "left-an-answer"}]
    with http.stream(
        "POST", "/v1/completions", json={**body, "stream": True}, headers=names[0]
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert running() == 1
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=body, headers=names[1], timeout=0.3)
    until = time.monotonic() + 60
    while running() and time.monotonic() < until:
        time.sleep(0.05)
    assert running() == 0
    for name in names:
        line = server.wait_for(f"request {name['X-Request-Id']}: .*", 60)[0]
        assert line.endswith("finish disconnect")


def test_answers_do_not_depend_on_what_runs_beside_them(client):
    prompts = [f"Chapter {number}" for number in range(24)]

    def text(prompt):
        return client.completions.create(prompt=prompt, **greedy(max_tokens=10)).choices[0].text

    alone = [text(prompt) for prompt in prompts[:4]]
    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(text, prompts))[:4] == alone


@pytest.mark.rotating
def test_no_request_that_fits_the_openapi_schema_breaks_the_server(server, http):
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings

    schema = schemathesis.openapi.from_dict(http.get("/openapi.json").json())
    paths = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        if "profile" in operation.path:
            continue
        paths += 1
        examples = (
            15 if operation.method.upper() == "POST" or "{" in operation.path else 1
        )  # nothing differs

        @given(case=operation.as_strategy())
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def answers(case):
            if isinstance(case.body, dict):
                if "input" in case.body and "responses" in case.path:
                    case.body.setdefault("max_output_tokens", 8)
                for limit in ("max_tokens", "max_output_tokens"):
                    if isinstance(case.body.get(limit), int):
                        case.body[limit] = min(case.body[limit], 8)
            answer = case.call(
                base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60
            )
            assert answer.status_code < 500, (case.body, answer.text)
            if answer.status_code >= 400:
                is_anthropic = case.operation.path.startswith("/v1/messages")
                fields = {"message", "type"} | (set() if is_anthropic else {"param", "code"})
                assert set(answer.json()["error"]) == fields

        answers()
    assert paths >= 10


def test_nothing_was_logged_or_counted_as_an_error_of_the_server(server, http):
    assert 'status="5' not in http.get("/metrics").text
    assert [line for line in server.lines if " ERROR " in line or "Traceback" in line] == []
