"""Reasoning over HTTP, of a model with tokens for its tags whose prompts open it."""

import json

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("tokenizers")
httpx = pytest.importorskip("httpx")
from serving import serving  # noqa: E402
from tagged_demo import CLOSE, tagged_demo  # noqa: E402

pytestmark = pytest.mark.xdist_group("reasoning_server")
CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
HELLO = [{"role": "user", "content": "She looked at him and said"}]
# The model does not end its reasoning by itself.
RANDOM = {"temperature": 1, "ignore_eos": True, "max_tokens": 60}
UNENDED = RANDOM | {"logit_bias": {CLOSE: -100}}


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    folder = tagged_demo(tmp_path_factory.mktemp("models") / "tagged")
    with (
        serving(folder, "--max-num-seqs", 16) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def answer(http, path, **fields):
    response = http.post(path, json=fields)
    assert response.status_code == 200, response.text
    assert "X-Ignored-Fields" not in response.headers
    return response.json()


@pytest.mark.parametrize("seed", range(4))
def test_a_budget_limits_the_reasoning_of_a_chat(http, seed):
    asked = {"messages": HELLO, **UNENDED, "seed": seed, "thinking_token_budget": 40}
    whole = answer(http, CHAT, **asked)
    count = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    message = whole["choices"][0]["message"]
    assert 24 <= count <= 40 and message["reasoning_content"] and message["content"]
    with http.stream(
        "POST", CHAT, json={**asked, "stream": True, "stream_options": {"include_usage": True}}
    ) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    chunks = list(map(json.loads, lines))
    assert chunks[-1]["usage"] == whole["usage"] | {
        "prompt_tokens_details": chunks[-1]["usage"]["prompt_tokens_details"]
    }
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name]


def test_a_budget_of_anthropics_messages_and_of_completions(http):
    thinking = {"type": "enabled", "budget_tokens": 20}
    whole = answer(http, MESSAGES, model="tagged", messages=HELLO, thinking=thinking, **RANDOM)
    assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
    assert 0 < whole["usage"]["output_tokens_details"]["thinking_tokens"] <= 20
    off = {"type": "disabled", "budget_tokens": 1}
    asked = {"messages": HELLO, "thinking": off, **RANDOM, "bad_words": ["</think>"]}
    assert answer(http, MESSAGES, model="tagged", **asked)["content"][0]["type"] == "thinking"
    prompts = ["Said <think>", "Said"]
    fields = UNENDED | {"thinking_token_budget": 5, "return_token_ids": True}
    choices = answer(http, TEXT, prompt=prompts, **fields)["choices"]
    assert [CLOSE in choice["token_ids"][:5] for choice in choices] == [True, False]


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (TEXT, {"prompt": "a", "thinking_token_budget": -1}, "it must be at least 0"),
        (
            CHAT,
            {
                "messages": HELLO,
                "thinking_token_budget": 9,
                "structured_outputs": {"regex": "a</think>b"},
            },
            "None with structured output",
        ),
    ],
)
def test_a_wrong_budget_is_a_400(http, path, fields, message):
    response = http.post(path, json=fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert message in error["message"] and error["param"] == "thinking_token_budget"


def test_a_grammar_of_the_content_leaves_no_reasoning_to_limit(http):
    fields = {"thinking_token_budget": 0, "structured_outputs": {"regex": "[a-z]{9}"}}
    message = answer(http, CHAT, messages=HELLO, **fields)["choices"][0]["message"]
    assert len(message["content"]) == 9 and "reasoning_content" not in message


def test_a_budget_is_no_obstacle_to_a_forced_call_whose_tool_speaks_of_the_tags(http):
    mode = {"type": "string", "enum": ["<b>"], "description": "as in <think>x</think>"}
    parameters = {"type": "object", "properties": {"mode": mode}, "required": ["mode"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    fields = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    asked = {"messages": HELLO, **fields, "thinking_token_budget": 9, "max_tokens": 90}
    message = answer(http, CHAT, **asked)["choices"][0]["message"]
    assert not message.get("reasoning_content")
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"mode": "<b>"}
