"""Client errors get a 400 with the reason; limits of one request."""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")
pytest.importorskip("tokenizers")
httpx = pytest.importorskip("httpx")
from serving import serving  # noqa: E402

from atomc import demo  # noqa: E402
from atomc.runtime.server.config import ServerConfig  # noqa: E402
from atomc.runtime.server.http.responses import APIError  # noqa: E402
from atomc.runtime.server.service import model_info  # noqa: E402

pytestmark = pytest.mark.xdist_group("mistakes")
USER = {"role": "user", "content": "Once"}
CHAT = {"messages": [USER], "max_tokens": 2}
TEXT = {"prompt": "Once", "max_tokens": 2}
F = {"type": "function", "function": {"name": "f"}}
# Loops as long as the client requests, without calling anything.
TEMPLATE = """{%- for i in range(rounds or 0) -%}{%- for j in range(99999) -%}{%- endfor -%}{%- endfor -%}
{{- self_name or '' -}}{%- for message in messages -%}{{ message.content }}{%- endfor -%}"""


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    with (
        serving(
            "--grammar-seconds", 1, "--chat-template", template, "--max-bodies-bytes", 17 * 2**20
        ) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        yield client
        assert "Traceback" not in server.log


def tools(parameters):
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def deep(depth):
    return '{"a":' * depth + "1" + "}" * depth


def schema(depth):
    found = {"type": "string"}
    for _ in range(depth):
        found = {"type": "array", "items": found}
    return found


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        # Grammars that match nothing, or that are invalid.
        ("completions", {**TEXT, "guided_regex": r"[^\s\S]"}, "regex: no text matches it"),
        ("completions", {**TEXT, "guided_json": {"$ref": "#"}}, "json_schema: no text matches it"),
        ("completions", {**TEXT, "guided_json": {"enum": []}}, "json_schema: "),
        ("completions", {**TEXT, "guided_json": "[" * 10**5}, "json_schema: it is nested too deep"),
        (
            "completions",
            {**TEXT, "guided_json": deep(500)},
            "json_schema: recursion limit exceeded",
        ),
        ("completions", {**TEXT, "guided_json": schema(55)}, None),
        ("completions", {**TEXT, "guided_json": {"const": "\ud800"}}, "a surrogate is alone"),
        ("completions", {**TEXT, "guided_regex": "\ud800"}, "not valid Unicode"),
        ("completions", {**TEXT, "guided_regex": "(a{1000}){1000}"}, None),
        ("completions", {**TEXT, "guided_grammar": "start: <[99999999]>"}, "grammar: "),
        ("completions", {**TEXT, "guided_grammar": "\0"}, "grammar: "),
        (
            "chat/completions",
            {**CHAT, "tools": tools({"$defs": 1}), "tool_choice": "required"},
            "$defs",
        ),
        (
            "chat/completions",
            {**CHAT, "tools": tools({"enum": [3]}), "tool_choice": F},
            "Unsatisfiable schema",
        ),
        # Variables of the chat template.
        *[
            (
                "chat/completions",
                {**CHAT, "chat_template_kwargs": {name: 1}},
                f"chat_template_kwargs cannot set '{name}'",
            )
            for name in ("messages", "tools", "bos_token")
        ],
        *[
            ("chat/completions", {**CHAT, "chat_template_kwargs": {name: 1}}, None)
            for name in (
                "self",
                "add_generation_prompt",
                "args",
                "kwargs",
                "environment",
                "\0",
                "a b",
            )
        ],
        (
            "chat/completions",
            {**CHAT, "chat_template_kwargs": {"self_name": "\ud800"}},
            "not valid Unicode",
        ),
        (
            "chat/completions",
            {**CHAT, "chat_template_kwargs": {"rounds": "x"}},
            "the chat template failed on the messages",
        ),
        (
            "chat/completions",
            {
                **CHAT,
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}],
                    },
                    USER,
                ],
            },
            None,
        ),
        # JSON itself.
        ("completions", deep(129), "more than 128 levels of nested lists and objects"),
        ("completions", "[" * 200_000, "more than 128 levels of nested lists and objects"),
        (
            "completions",
            '{"prompt":"a","stop":' + deep(100) + "}",
            "stop: it is an object, expected a string or a list of strings",
        ),
        (
            "completions",
            '{"prompt":' + "1" * 5000 + "}",
            "the body is refused: it has a number of 400 digits or more",
        ),
        ("completions", b'{"prompt":"\xff"}', "the body is not JSON: it is not UTF-8"),
        (
            "completions",
            '{"prompt":"a","temperature":NaN}',
            "the body is not JSON: JSON is malformed",
        ),
        (
            "completions",
            '{"prompt":"a","temperature":1e999}',
            "the body is not JSON: Number out of range",
        ),
        ("completions", {**TEXT, "seed": 10**30}, "seed"),
        ("completions", {**TEXT, "prompt": "\ud800"}, "not valid Unicode"),
        # Types.
        ("completions", {**TEXT, "prompt": {"a": 1}}, "prompt: it is an object, expected a string"),
        ("completions", {**TEXT, "prompt": [1.5]}, "prompt: it is a list with 1.5, expected a str"),
        ("completions", {**TEXT, "stop": 3}, "stop: it is a number, expected a string or a list"),
        ("completions", {**TEXT, "logit_bias": {"a": 1}}, "logit_bias: it is an object, expected"),
        ("completions", {**TEXT, "logit_bias": {"7": 1}, "temperature": 1}, None),
        ("completions", {**TEXT, "max_tokens": "5"}, "max_tokens: Input should be a valid integer"),
        ("completions", {**TEXT, "max_tokens": True}, "max_tokens: Input should be a valid int"),
        ("completions", {**TEXT, "logprobs": True}, "logprobs: Input should be a valid integer"),
        ("completions", {**TEXT, "stream": "yes"}, "stream: Input should be a valid boolean"),
        ("chat/completions", {**CHAT, "tool_choice": 3}, "tool_choice: it is a number, expected"),
        (
            "chat/completions",
            {**CHAT, "messages": [{"role": "dog", "content": "a"}]},
            "a message has the role 'dog', expected system, developer, user, assistant, tool",
        ),
        (
            "chat/completions",
            {**CHAT, "messages": [{"role": "user"}]},
            "a message of role 'user' has no content, expected a string or a list of parts",
        ),
        ("completions", {**TEXT, "max_tokens": -3}, "max_tokens is -3, it must be at least 1"),
        (
            "completions",
            {**TEXT, "structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs: it has json and regex, expected exactly one of json, json_object",
        ),
        (
            "completions",
            {**TEXT, "structured_outputs": {"json_schema": {}}},
            "structured_outputs: it has the unknown field 'json_schema', expected exactly one of",
        ),
        # Limits.
        (
            "completions",
            {**TEXT, **{f"f{i}": 1 for i in range(200)}},
            "the object has 202 fields, at most 128 are",
        ),
        (
            "completions",
            {**TEXT, "prompt": [[]] * 300_000},
            "the body is refused: it has more than 65536 lists, objects and fields",
        ),
        (
            "completions",
            {**TEXT, "prompt": [-1] * 200_000},
            "prompt: it is a list with -1, expected a string, a list of strings, a list of token",
        ),
        (
            "completions",
            {**TEXT, "prompt": "She said. " * 100_000},
            "maximum context length is 2048",
        ),
        ("completions", {**TEXT, "prompt": ["Once"] * 1025}, "asks for 1025 choices"),
        (
            "completions",
            {**TEXT, "prompt": ["She said. " * 200] * 64, "n": 128},
            "asks for 8192 choices",
        ),
        (
            "completions",
            {**TEXT, "stop": ["a"] * 33},
            "stop has 33 strings, at most 32 are allowed",
        ),
        (
            "completions",
            {**TEXT, "stop": "a" * 257},
            "stop has a string of 257 characters, at most 256 are allowed",
        ),
        (
            "completions",
            {**TEXT, "stop_token_ids": [1] * 1025},
            "stop_token_ids has 1025 tokens, at most 1024",
        ),
        (
            "completions",
            {**TEXT, "logit_bias": {str(i): 1 for i in range(1025)}},
            "it has 1025 tokens, at most 1024",
        ),
        ("completions", {**TEXT, "n": 128, "logprobs": 20}, "exceed the limit of 512"),
        (
            "completions",
            {**TEXT, "prompt": ["a"] * 60, "prompt_logprobs": 20},
            "exceed the limit of 512",
        ),
        (
            "chat/completions",
            {**CHAT, "n": 128, "logprobs": True, "top_logprobs": 20},
            "exceed the limit of 512",
        ),
        (
            "chat/completions",
            {**CHAT, "messages": [USER] * 4097},
            "messages has 4097 messages, at most 4096",
        ),
        (
            "chat/completions",
            {**CHAT, "tools": [F] * 129},
            "tools has 129 tools, at most 128 are allowed",
        ),
        (
            "completions",
            {**TEXT, "guided_choice": ["a"] * 1025},
            "choice has 1025 strings, at most 1024",
        ),
        (
            "completions",
            {**TEXT, "guided_regex": "a" * 300_000},
            "regex has 300000 characters, at most 262144",
        ),
        (
            "completions",
            {**TEXT, "guided_choice": ["a" * 100_000] * 3},
            "choice has 300000 characters",
        ),
        (
            "completions",
            {**TEXT, "guided_json": {"title": "a" * 300_000}},
            "json_schema has 300013 characters",
        ),
        ("embeddings", {"input": ["Once"] * 1025}, "asks for 1025 choices"),
        ("embeddings", {"input": "She said. " * 1000}, "maximum context length is 2048"),
        ("../tokenize", {"prompt": "She said. " * 300_000}, "maximum context length is 131072"),
        (
            "../detokenize",
            {"tokens": [1] * 131_073},
            "tokens has 131073 tokens, at most 131072 are allowed",
        ),
    ],
)
def test_a_mistake_is_answered_with_what_is_wrong(http, path, body, said):
    content = (
        body
        if isinstance(body, bytes)
        else (body if isinstance(body, str) else json.dumps(body)).encode()
    )
    answer = http.post(f"/v1/{path}", content=content, headers={"Content-Type": "application/json"})
    if said is None:
        assert answer.status_code == 200, answer.text
    else:
        assert (answer.status_code, said in answer.json()["error"]["message"]) == (400, True), (
            answer.text
        )


def test_operations_have_names_of_their_own(http):
    paths = http.get("/openapi.json").json()["paths"].values()
    names = [operation["operationId"] for path in paths for operation in path.values()]
    assert sorted(names) == sorted(set(names))


def test_a_template_that_loops_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(model_info, "RENDER_SECONDS", 1.0)
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    config = ServerConfig(chat_template=str(file))
    model = model_info.load_model_info(demo.PATH, "demo", config)
    with pytest.raises(APIError) as error:
        asyncio.run(model.render_chat(model_info.ChatInput([USER], None, True, {"rounds": 90_000})))
    said = "rendering the chat template exceeded the limit of 1 s"
    assert (error.value.status, str(error.value)) == (400, said)


@pytest.mark.rotating
def test_bodies_that_are_too_large_together_are_refused_for_a_while(http):
    refused = threading.Event()

    def body():
        yield b'{"model":"atomc-demo","max_tokens":2,"prompt":"Once' + b" " * (15 * 2**20)
        while not refused.is_set():
            yield b" "
            time.sleep(0.01)
        yield b'"}'

    def post(_):
        try:
            return http.post(
                "/v1/completions", content=body(), headers={"Content-Type": "application/json"}
            )
        finally:
            refused.set()

    with ThreadPoolExecutor(2) as clients:
        taken, late = sorted(clients.map(post, range(2)), key=lambda answer: answer.status_code)
    assert taken.status_code == 400 and "maximum context length" in taken.json()["error"]["message"]
    assert late.status_code == 429 and late.headers["retry-after"] == "1"
    assert late.json()["error"]["code"] == "too_many_bytes"
    assert http.post("/v1/completions", json=TEXT).status_code == 200
