"""Fields of vLLM that limit tokens, cut prompts and score them, over HTTP."""

import json
import math
import re
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

pytest.importorskip("fastapi")
pytest.importorskip("tokenizers")
httpx = pytest.importorskip("httpx")
from serving import KEY  # noqa: E402
from test_server_lifecycle import until  # noqa: E402

from atomc.runtime.requests.request import TokenLogprobs  # noqa: E402
from atomc.runtime.server.anthropic.request import MessagesRequest  # noqa: E402
from atomc.runtime.server.http.responses import APIError  # noqa: E402
from atomc.runtime.server.http.unknown_fields import check_unknown_fields  # noqa: E402
from atomc.runtime.server.responses.request import ResponsesRequest  # noqa: E402
from atomc.runtime.server.service import protocol  # noqa: E402
from atomc.runtime.server.service.logprobs import TextOffsets, prompt_logprobs  # noqa: E402
from atomc.runtime.server.service.model_info import ModelInfo  # noqa: E402

pytestmark = pytest.mark.xdist_group("server")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SAID = "She looked at him and said"
HELLO = {"messages": [{"role": "user", "content": SAID}]}
PROMPT = {TEXT: {"prompt": SAID}, CHAT: HELLO, "/v1/responses": {"input": SAID}}
PROMPT["/v1/messages"] = {**HELLO, "model": "atomc-demo", "max_tokens": 8}


@pytest.fixture(scope="module")
def http(api_server):
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=api_server.url, headers=headers, timeout=60) as found:
        yield found


def answer(http, path, **fields):
    """The text of the answer."""
    fields = {"temperature": 0, "ignore_eos": True, **PROMPT[path], **fields}
    if path in (TEXT, CHAT):
        fields.setdefault("max_tokens", 8)
    if path == "/v1/responses":
        fields |= {"max_output_tokens": fields.pop("max_tokens", 16)}
    response = http.post(path, json=fields)
    assert response.status_code == 200 and "X-Ignored-Fields" not in response.headers, response.text
    found = response.json()
    if path == "/v1/responses":
        return found["output"][0]["content"][0]["text"]
    if path == "/v1/messages":
        return found["content"][0]["text"]
    (choice,) = found["choices"]
    return choice["text"] if path == TEXT else choice["message"]["content"]


def tokens(http, text, **more):
    body = {"prompt": text, "add_special_tokens": False, **more}
    return http.post("/tokenize", json=body).json()["tokens"]


@pytest.mark.parametrize("path", PROMPT)
def test_every_endpoint_keeps_to_allowed_tokens_and_leaves_out_bad_words(http, path):
    allowed = [*tokens(http, " the"), *tokens(http, " of")]
    assert set(answer(http, path, allowed_token_ids=allowed).split()) <= {"the", "of"}
    only = answer(http, path, allowed_token_ids=allowed, bad_words=["of"])
    assert set(only.split()) == {"the"}
    no_pairs = answer(http, path, allowed_token_ids=allowed, bad_words=["the the", "of of"])
    assert set(no_pairs.split()) == {"the", "of"}
    assert "the the" not in no_pairs and "of of" not in no_pairs


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("fields", [{}, {"n": 2, "stop": ["zzz"]}, {"seed": 1, "temperature": 1}])
def test_events_with_text_only_are_those_of_streams_that_ask_for_more(http, path, fields):
    body = {**PROMPT[path], "max_tokens": 12, "ignore_eos": True, "stream": True, "temperature": 0}

    def chunks(**more):
        """The events without what differs between requests, and the text of each choice."""
        raw = http.post(path, json={**body, **fields, **more}).text
        *events, done = [line.removeprefix("data: ") for line in raw.split("\n\n") if line]
        assert done == "[DONE]"
        texts = {}
        for event in events:
            choice = json.loads(event)["choices"][0]
            text = choice["delta"].get("content", "") if path == CHAT else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + text
        differing = re.compile(r'"id":"[^"]*"|"created":\d+|(?<="text":)"(\\.|[^"\\])*"')
        return [
            differing.sub("", event.replace('"content":', '"text":')) for event in events
        ], texts

    plain, text = chunks()
    full, text_of_full = chunks(return_token_ids=True)
    asked = re.compile(r',"(prompt_)?token_ids":\[[\d,]*\]')
    assert any(map(asked.search, full)) and not any(map(asked.search, plain))
    assert text == text_of_full and all(text.values())
    # The order of the fields, too.
    assert {asked.sub("", event) for event in full} == set(plain)


def test_they_combine_with_grammars_and_biases(http):
    choice = {"structured_outputs": {"choice": ["to the", "to of"]}, "ignore_eos": False}
    # A text may have several tokenizations.
    assert answer(http, CHAT, **choice, bad_words=["t", "th", "the"]) == "to of"
    (the,) = tokens(http, " the")
    bias = {"logit_bias": {str(the): 100}}
    assert set(answer(http, CHAT, **bias).split()) == {"the"}
    assert "the" not in answer(http, CHAT, **bias, bad_words=["the"]).split()


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_long_prompt_is_cut_at_its_start(http, path):
    long = " ".join(["no"] * 3000 + [SAID])
    prompt = {"prompt": long} if path == TEXT else {"messages": [{"role": "user", "content": long}]}
    body = {**prompt, "max_tokens": 4, "return_token_ids": True, "temperature": 0}
    assert http.post(path, json=body).status_code == 400

    def prompt_ids(size):
        found = http.post(path, json={**body, "truncate_prompt_tokens": size}).json()
        return (found["choices"][0] if path == TEXT else found)["prompt_token_ids"]

    few = prompt_ids(9)
    assert len(few) == 9 and len(prompt_ids(-1)) == 2044 and prompt_ids(-1)[-9:] == few
    end = http.post("/detokenize", json={"tokens": few}).json()["prompt"]
    assert end.rstrip().endswith(SAID[-12:])
    echo = {**body, "prompt": long, "truncate_prompt_tokens": 9, "echo": True, "max_tokens": 0}
    if path == TEXT:
        assert http.post(path, json=echo).json()["choices"][0]["text"] == end


def test_the_score_of_an_impossible_prompt_token_is_a_number():
    scores = [None, TokenLogprobs(3, -math.inf, 9, ((4, 0.0),))]
    model = SimpleNamespace(token_text_and_bytes=lambda token: (str(token), []))
    assert json.loads(bytes(prompt_logprobs(model, scores)[1]))["3"]["logprob"] == -9999.0


def test_prompt_logprobs_of_a_chat_are_those_of_its_tokens(http):
    body = {**HELLO, "max_tokens": 1, "prompt_logprobs": 2, "return_token_ids": True, "n": 2}
    chat = http.post(CHAT, json=body).json()
    ids, scores = chat["prompt_token_ids"], chat["prompt_logprobs"]
    assert len(scores) == len(ids) and scores[0] is None
    text = http.post(TEXT, json={"prompt": ids, "max_tokens": 1, "prompt_logprobs": 2}).json()
    assert text["choices"][0]["prompt_logprobs"] == scores
    for token, entry in zip(ids[1:], scores[1:], strict=True):
        spelled = http.post("/detokenize", json={"tokens": [token]}).json()["prompt"]
        assert entry[str(token)].keys() == {"logprob", "rank", "decoded_token"}
        assert entry[str(token)]["decoded_token"] == spelled and len(entry) in (2, 3)
        assert {1, 2} <= {each["rank"] for each in entry.values()}


@pytest.mark.parametrize(
    "path, fields, part",
    [
        (TEXT, {"allowed_token_ids": []}, "allowed_token_ids is .*, it must be at least one token"),
        (CHAT, {"allowed_token_ids": [3072]}, "token id 3072 is not in the vocabulary of 3072"),
        (CHAT, {"allowed_token_ids": [-1]}, "allowed_token_ids.0: .* greater than or equal to 0"),
        (
            TEXT,
            {"allowed_token_ids": [1] * 2049, "n": 128},
            "has 2049 tokens, at most 2048 are allowed for 128 choices",
        ),
        (TEXT, {"bad_words": ["a", " "]}, "bad_words has an empty or blank string"),
        (CHAT, {"bad_words": ["a"] * 1025}, "bad_words has 1025 strings, at most 1024"),
        (CHAT, {"bad_words": "word"}, "bad_words: .*list"),
        (TEXT, {"bad_words": ["x" * 2049], "n": 128}, "has 2049 characters, at most 2048 are"),
        (TEXT, {"bad_words": ["x\ud800"]}, "not valid Unicode"),
        (TEXT, {"truncate_prompt_tokens": 0}, "is 0, it must be at least 1 and at most .* 2048"),
        (CHAT, {"truncate_prompt_tokens": 2049}, "is 2049, it must be"),
        (CHAT, {"truncate_prompt_tokens": -2}, "is -2, it must be"),
        (CHAT, {"truncate_prompt_tokens": 5, "max_tokens": 2044}, "has 5 in the prompt and asks"),
        (CHAT, {"prompt_logprobs": 6}, "prompt_logprobs is 6, it must be at least 0 and at most 5"),
        (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs is -1, it must be"),
        (CHAT, {"prompt_logprobs": 5, "n": 128}, "5 log-probabilities per token in 128 choices"),
        (CHAT, {"prompt_logprobs": 1, "stream": True}, "not available in a stream"),
        (TEXT, {"prompt_logprobs": 1, "stream": True}, "not available in a stream"),
    ],
)
def test_a_value_out_of_range_is_refused_with_what_to_do(http, path, fields, part):
    response = http.post(
        path,
        content=json.dumps({**PROMPT[path], **fields}),
        headers={"Content-Type": "application/json"},
    )
    assert response.status_code == 400, response.text
    assert re.search(part, response.json()["error"]["message"]), response.text


def test_tokens_that_exclude_each_other_are_an_error_of_this_request_only(http):
    (the,) = tokens(http, " the")
    excluded = {"allowed_token_ids": [the], "bad_words": ["the the"]}
    response = http.post(TEXT, json={**PROMPT[TEXT], **excluded})
    assert response.status_code == 400
    assert "allowed_token_ids, bad_words exclude all tokens" in response.json()["error"]["message"]
    assert answer(http, TEXT)


@pytest.mark.parametrize(
    "path", sorted({*PROMPT, "/v1/messages/count_tokens", "/tokenize", "/v1/embeddings"})
)
@pytest.mark.parametrize("field", [{}, {"model": None}])
def test_the_model_may_be_left_out(api_server, path, field):
    body = PROMPT.get(path, PROMPT[TEXT] | {"input": SAID})
    if path in ("/v1/messages/count_tokens", "/v1/responses"):
        body = HELLO if path.endswith("count_tokens") else {"input": SAID}
    body = {name: value for name, value in body.items() if name != "model"} | field
    if path in PROMPT:
        body |= {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 2}
    headers = {"Authorization": f"Bearer {KEY}"}
    answered = httpx.post(api_server.url + path, json=body, headers=headers, timeout=60)
    assert answered.status_code == 200, answered.text
    assert answered.json().get("model", "atomc-demo") == "atomc-demo"


def test_all_names_of_a_model_are_its_own():
    parts = {"tokenizer": None, "template": None, "defaults": {}, "tools": None, "reasoning": None}
    info = ModelInfo(("m", "other"), **parts)
    info.check_name("other")
    info.check_name(None)
    with pytest.raises(APIError, match="m, other") as found:
        info.check_name("third")
    assert (found.value.status, found.value.param) == (404, "model")


MODELS = (
    protocol.ChatRequest,
    protocol.CompletionRequest,
    protocol.EmbeddingRequest,
    protocol.TokenizeRequest,
    ResponsesRequest,
    MessagesRequest,
)


@pytest.mark.parametrize("model", MODELS)
def test_null_is_the_default_of_each_field_that_has_one(model):
    required = {"messages": HELLO["messages"], "prompt": SAID, "input": SAID, "max_tokens": 3}
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    body = {name: required[name] for name, field in fields.items() if field.is_required()}
    nulls = {name: None for name, field in fields.items() if not field.is_required()}
    assert model.model_validate({**nulls, **body}) == model.model_validate(body)
    assert model.model_validate({**body, "other": None}).model_extra == {"other": None}
    for name in body:
        with pytest.raises(ValidationError):
            model.model_validate({**body, name: None})


def test_null_in_parts_of_a_request_is_the_default_too():
    chat = {**HELLO, "stream_options": {"include_usage": None}, "structured_outputs": {"json": None, "choice": ["a"]}}  # fmt: skip
    read = protocol.ChatRequest.model_validate(chat)
    assert read.stream_options.include_usage is False and read.structured_outputs.choice == ["a"]
    tool_result = {"type": "tool_result", "tool_use_id": "1", "content": None, "is_error": None}
    turn = {"role": "user", "content": [tool_result]}
    message = MessagesRequest.model_validate({"messages": [turn], "max_tokens": 1})
    assert message.messages[0].content[0].content == []


def function(parameters, name="f", **more):
    return [{"type": "function", "function": {"name": name, "parameters": parameters, **more}}]


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "boolean"}}, "required": ["a"]},
        {"type": ["object", "null"], "properties": {}},
        {"type": "object", "properties": {}, "required": None},
        {"type": "object", "properties": None, "$defs": None},
        {"type": None, "description": None},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": ["null", "object"], "properties": {}}}},
        {"anyOf": [{"type": "null"}, {"properties": {"b": {"const": 1}}, "required": ["b"]}]},
        {},
        None,
    ],
)
@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_the_arguments_of_a_forced_call_are_an_object(http, parameters, choice):
    body = {**HELLO, "tools": function(parameters), "tool_choice": choice, "seed": 5}
    body |= {"max_tokens": 60, "logit_bias": {token: 100 for token in tokens(http, "}")}}
    response = http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    (call,) = response.json()["choices"][0]["message"]["tool_calls"]
    assert isinstance(json.loads(call["function"]["arguments"]), dict)


def test_a_function_whose_parameters_are_no_object_is_refused_where_it_is_forced(http):
    body = {**HELLO, "tools": function({"type": "array"}), "tool_choice": "required"}
    error = http.post(CHAT, json=body).json()["error"]
    assert "'f' have the type 'array', expected 'object'" in error["message"]


WEB = {"type": "web_search", "external_web_access": True}
FLAT = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CLIENTS = {"name": "f", "input_schema": {"type": "object"}}
TOOLS_OF = {
    CHAT: (function({}), [{"type": "custom", "custom": {"name": "x"}}]),
    "/v1/responses": ([FLAT], [WEB, {"type": "local_shell"}]),
    "/v1/messages": ([CLIENTS], [{"type": "web_search_20250305", "name": "web_search"}]),
}


@pytest.mark.parametrize("path", TOOLS_OF)
def test_tools_that_the_server_cannot_run_are_left_out_and_named(http, path):
    functions, others = TOOLS_OF[path]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {**PROMPT[path], limit: 2, "tools": [*functions, *others]}
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    names = ", ".join(f"tools.{index}" for index in range(1, 1 + len(others)))
    assert response.headers["X-Ignored-Fields"] == names
    if path == "/v1/responses":
        assert [tool["name"] for tool in response.json()["tools"]] == ["f"]
    none_left = http.post(path, json={**body, "tools": others})
    assert none_left.status_code == 200 and none_left.headers["X-Ignored-Fields"]
    forced = {"type": "any"} if path == "/v1/messages" else "required"
    refused = http.post(path, json={**body, "tools": others, "tool_choice": forced})
    assert refused.status_code == 400 and "tools is empty" in refused.text
    request = SimpleNamespace(scope={"state": {"headers": {}, "request_id": "1"}})
    models = dict(zip(TOOLS_OF, (MODELS[0], *MODELS[-2:]), strict=True))
    read = models[path].model_validate({"model": "atomc-demo", **body})
    with pytest.raises(APIError, match=r"tools\.1 is of a type that this server cannot run"):
        check_unknown_fields(read, request, strict=True)


def allowed_tools(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools, WEB]}}


def test_a_chat_may_allow_some_of_its_tools(http):
    tools = [*function({"type": "object"}, "other"), *function({"type": "object"})]
    body = {**HELLO, "tools": tools, "seed": 1, "max_tokens": 60}
    body |= {"logit_bias": {token: 100 for token in tokens(http, "}")}}
    for choice in (allowed_tools("required", "f"), allowed_tools("required", "f", "f")):
        message = http.post(CHAT, json=body | {"tool_choice": choice}).json()["choices"][0]
        assert {call["function"]["name"] for call in message["message"]["tool_calls"]} == {"f"}
    auto = http.post(CHAT, json=body | {"tool_choice": allowed_tools("auto", "f")})
    assert auto.status_code == 200
    for choice, part in (
        (allowed_tools("required", "sun"), "allows 'sun', expected one of the tools: other, f"),
        ({"type": "allowed_tools"}, "expected none, auto, required, an object with type function"),
    ):
        refused = http.post(CHAT, json=body | {"tool_choice": choice})
        assert refused.status_code == 400 and part in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "said",
    [{"content": [{"type": "refusal", "refusal": "no"}]}, {"content": None, "refusal": "no"}],
)
def test_a_refusal_is_text_of_the_prompt(http, said):
    def prompt_ids(message):
        turns = [*HELLO["messages"], {"role": "assistant", **message}, *HELLO["messages"]]
        return http.post("/tokenize", json={"messages": turns}).json()["tokens"]

    assert prompt_ids(said) == prompt_ids({"content": "no"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "text", ["Z\u00fcrich is nice", "\u65e5\u672c \U0001f600 x", "<|endoftext|>\u00e9"]
)
def test_offsets_are_positions_in_the_text(http, text, stream):
    body = {"prompt": text, "echo": True, "logprobs": 1, "max_tokens": 3, "temperature": 0}
    body |= {"skip_special_tokens": False, "stream": stream}
    answered = http.post(TEXT, json=body)
    if stream:
        lines = [line[6:] for line in answered.text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(line)["choices"][0] for line in lines]
    else:
        choices = answered.json()["choices"]
    written = "".join(choice["text"] for choice in choices)
    logprobs = [choice["logprobs"] for choice in choices]
    pieces = [
        (piece, offset)
        for part in logprobs
        for piece, offset in zip(part["tokens"], part["text_offset"], strict=True)
    ]
    for piece, offset in pieces:
        assert "\ufffd" in piece or written[offset : offset + len(piece)] == piece
    assert [offset for _, offset in pieces] == sorted(offset for _, offset in pieces)


def test_special_tokens_that_the_text_leaves_out_take_no_place():
    special, held = 1, {0: b"a", 1: b"<s>", 2: "\u00e9".encode()[:1], 3: "\u00e9".encode()[1:]}
    model = SimpleNamespace(
        is_special=lambda token: token == special,
        token_text_and_bytes=lambda token: ("", list(held[token])),
    )
    for skips, positions in ((True, [0, 0, 1, 1, 2]), (False, [0, 3, 4, 4, 5])):
        offsets = TextOffsets(model, skips)
        assert [offsets.next(token) for token in (1, 0, 2, 3, 0)] == positions


@pytest.mark.parametrize("stream", [False, True])
def test_a_scored_prompt_has_no_new_tokens(http, stream):
    body = {"prompt": SAID, "echo": True, "logprobs": 1, "max_tokens": 0, "stream": stream}
    body |= {"stream_options": {"include_usage": True}}
    answered = http.post(TEXT, json=body)
    last = answered.text.split("data: ")[-2] if stream else answered.text
    usage = json.loads(last)["usage"]
    num_prompt = len(tokens(http, SAID, add_special_tokens=True))
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, num_prompt)


def metrics(http):
    """Samples without labels of engines and models -> value."""
    lines = [line for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_metrics_of_vllm_are_ours(http):
    long = {"prompt": "She looked at him and said " * 20, "max_tokens": 5, "ignore_eos": True}
    before = metrics(http)
    for _ in range(2):
        assert http.post(TEXT, json=long).status_code == 200
    after = metrics(http)
    grew = {name: value - before.get(name, 0) for name, value in after.items()}
    model, engine = '{model_name="atomc-demo"}', '{engine="0",model_name="atomc-demo"}'
    ended = '{finished_reason="length",model_name="atomc-demo"}'
    assert grew[f"vllm:request_success_total{ended}"] == 2
    assert grew[f"vllm:generation_tokens_total{engine}"] == 10
    assert grew[f"vllm:prefix_cache_hits_total{engine}"] > 0
    for name in ("prompt_tokens", "prefix_cache_queries"):
        assert grew[f"vllm:{name}_total{engine}"] == 2 * len(tokens(http, long["prompt"]))
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after[f"vllm:{name}{engine}"] == 0
    for name, count in (
        ("time_to_first_token_seconds", 2),
        ("request_queue_time_seconds", 2),
        ("inter_token_latency_seconds", 8),
        ("time_per_output_token_seconds", 8),
        ("request_prefill_time_seconds", 2),
        ("request_decode_time_seconds", 2),
        ("e2e_request_latency_seconds", 2),
    ):
        assert 0 < grew[f"vllm:{name}_count{model}"] <= count
        assert 0 < grew[f"vllm:{name}_sum{model}"] < 60
    # The gaps between a choice's outputs add up to its time after the first token.
    between = grew[f"vllm:e2e_request_latency_seconds_sum{model}"]
    between -= grew[f"vllm:time_to_first_token_seconds_sum{model}"]
    assert grew[f"vllm:inter_token_latency_seconds_sum{model}"] == pytest.approx(between)
    queue = grew[f"vllm:request_queue_time_seconds_sum{model}"]
    assert queue < grew[f"vllm:time_to_first_token_seconds_sum{model}"]
    phases = ("request_queue_time", "request_prefill_time", "request_decode_time")
    total = sum(grew[f"vllm:{phase}_seconds_sum{model}"] for phase in phases)
    assert total == pytest.approx(grew[f"vllm:e2e_request_latency_seconds_sum{model}"], abs=0.01)
    older, name = "vllm:time_per_output_token_seconds", "vllm:inter_token_latency_seconds"
    assert after[f"{older}_sum{model}"] == after[f"{name}_sum{model}"]
    theirs = {
        name: value
        for name, value in after.items()
        if name.startswith("vllm:") and not name.startswith(older)
    }
    assert (
        theirs.items()
        <= {name.replace("atomc:", "vllm:"): value for name, value in after.items()}.items()
    )


def test_a_reset_forgets_cached_prompts_and_no_running_request(http):
    body = {"prompt": "the sons of the king of " * 30, "max_tokens": 1, "temperature": 0}

    def num_cached(**more):
        found = http.post(TEXT, json={**body, **more}).json()
        return found["usage"]["prompt_tokens_details"]["cached_tokens"]

    num_cached()
    assert num_cached() > 0
    assert http.post("/reset_prefix_cache").json() == {"status": "ok"}
    assert num_cached() == 0 and num_cached() > 0
    whole = http.post(TEXT, json={**body, "max_tokens": 300, "ignore_eos": True}).json()
    with http.stream(
        "POST", TEXT, json={**body, "max_tokens": 300, "ignore_eos": True, "stream": True}
    ) as stream:
        lines = stream.iter_lines()
        first = next(lines)
        assert http.post("/reset_prefix_cache").status_code == 200
        events = [json.loads(line[6:]) for line in [first, *lines] if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    assert http.get("/reset_prefix_cache").status_code == 405


def test_a_server_sleeps_and_wakes_up(http):
    body = {"prompt": "the sons of the king of", "max_tokens": 8, "temperature": 0}
    expected = http.post(TEXT, json=body).json()["choices"]
    for query, param in (("/sleep?level=2", "level"), ("/wake_up?tags=scheduler", "tags")):
        error = http.post(query).json()["error"]
        assert error["param"] == param and "expected" in error["message"]
    running = {"max_tokens": 1900, "n": 8, "ignore_eos": True, "stream": True}
    with http.stream("POST", TEXT, json=body | running) as stream:
        lines = stream.iter_lines()  # whose end would end the request
        next(lines)
        refused = http.post("/sleep")
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "requests_running"
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    until(lambda: http.post("/sleep?level=1").status_code == 200)  # the stream was aborted
    try:
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        for path in (TEXT, CHAT, "/v1/messages", "/v1/embeddings"):
            asked = {"input": "x"} if path == "/v1/embeddings" else PROMPT[path]
            answered = http.post(path, json=asked)
            assert answered.status_code == 503 and int(answered.headers["Retry-After"]) > 0
            assert "POST /wake_up" in answered.json()["error"]["message"]
        assert http.post(TEXT, json=body).json()["error"]["code"] == "engine_asleep"
        assert http.get("/ready").status_code == 503 and http.get("/health").status_code == 200
        assert http.post("/wake_up?tags=weights").json() == {"status": "ok"}
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    finally:
        assert http.post("/wake_up").json() == {"status": "ok"}
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert http.post(TEXT, json=body).json()["choices"] == expected
