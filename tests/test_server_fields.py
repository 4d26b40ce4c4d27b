"""Fields of vLLM that limit tokens, cut prompts and score them, over HTTP."""

import json
import math
import re
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("tokenizers")
plain_httpx = pytest.importorskip("httpx")
import named_httpx as httpx  # noqa: E402
from named_httpx import NEED_MODEL  # noqa: E402
from serving import KEY  # noqa: E402
from test_server_lifecycle import until  # noqa: E402

from atomc.runtime.sampling.logprobs import TokenLogprobs  # noqa: E402
from atomc.runtime.server.errors import APIError  # noqa: E402
from atomc.runtime.server.logprobs import prompt_logprobs  # noqa: E402
from atomc.runtime.server.model_info import ModelInfo  # noqa: E402

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


@pytest.mark.parametrize("path", sorted(NEED_MODEL))
def test_a_request_without_a_model_is_told_the_names(api_server, path):
    body = PROMPT.get(path, PROMPT[TEXT] | HELLO | {"input": SAID})
    body = {name: value for name, value in body.items() if name != "model"}
    headers = {"Authorization": f"Bearer {KEY}"}
    answered = plain_httpx.post(api_server.url + path, json=body, headers=headers, timeout=60)
    message = 'model is required; served models: atomc-demo: send "model": "atomc-demo"'
    assert (answered.status_code, answered.json()["error"]["message"]) == (400, message)
    assert path.startswith("/v1/messages") or answered.json()["error"]["param"] == "model"


def test_all_names_of_a_model_are_its_own():
    parts = {"tokenizer": None, "template": None, "defaults": {}, "tools": None, "reasoning": None}
    info = ModelInfo(("m", "other"), **parts)
    info.check_name("other")
    for name, status in (("third", 404), (None, 400)):
        with pytest.raises(APIError, match="m, other") as found:
            info.check_name(name)
        assert (found.value.status, found.value.param) == (status, "model")


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
    theirs = {name: value for name, value in after.items() if name.startswith("vllm:")}
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
