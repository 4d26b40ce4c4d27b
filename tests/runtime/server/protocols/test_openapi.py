"""The OpenAPI schema, answers that are as it says, and its page."""

import json
from copy import deepcopy

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
jsonschema_rs = pytest.importorskip("jsonschema_rs")
from fastapi import FastAPI  # noqa: E402
from fastapi.testclient import TestClient  # noqa: E402
from serving import KEY  # noqa: E402

from atomc.runtime.server.app import ENDPOINTS, OPEN_PATHS  # noqa: E402
from atomc.runtime.server.http.responses import APIError  # noqa: E402
from atomc.runtime.server.openapi import docs_page  # noqa: E402

pytestmark = pytest.mark.xdist_group("server")
HI = {"messages": [{"role": "user", "content": "Hi"}]}
NAMED = {"type": "function", "function": {"name": "f"}}
CALL = {"tools": [NAMED], "tool_choice": NAMED, "max_tokens": 30}
FLAT = {"type": "function", "name": "f"}
PLAIN = {"name": "f", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def http(api_server):
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=api_server.url, headers=headers, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def schema(api_server):
    response = httpx.get(f"{api_server.url}/openapi.json")  # without a key
    assert response.status_code == 200
    return response.json()


def operations(schema):
    return [
        (path, operation)
        for path, by_method in schema["paths"].items()
        for operation in by_method.values()
    ]


def test_the_schema_is_valid(schema):
    pytest.importorskip("schemathesis").openapi.from_dict(schema).validate()
    assert "HTTPValidationError" not in json.dumps(schema)


def test_each_operation_has_a_name_a_text_and_an_answer(schema):
    by_name = {operation["operationId"]: operation for _, operation in operations(schema)}
    names = {endpoint.run.__name__ for endpoint in ENDPOINTS if not endpoint.hidden}
    assert by_name.keys() == names and len(by_name) == len(operations(schema))
    for path, operation in operations(schema):
        assert operation["summary"] and operation["description"], path
        assert "422" not in operation["responses"]
        for content in operation["responses"]["200"]["content"].values():
            assert content["schema"], path
        for parameter in operation.get("parameters", ()):
            assert parameter["description"]
        assert (operation.get("security") == []) == (path in OPEN_PATHS)
    assert schema["security"] == [{name: []} for name in schema["components"]["securitySchemes"]]


def test_each_field_is_described(schema):
    missing = [
        f"{name}.{field}"
        for name, component in schema["components"]["schemas"].items()
        for field, value in component.get("properties", {}).items()
        if not value.get("description")
    ]
    assert missing == []


REQUESTS = {
    "chat": ("/v1/chat/completions", HI | {"logprobs": True, "top_logprobs": 2, "max_tokens": 2}),
    "chat with ids": ("/v1/chat/completions", HI | {"prompt_logprobs": 1, "return_token_ids": True, "max_tokens": 2}),
    "chat with a call": ("/v1/chat/completions", HI | CALL),
    "completion": ("/v1/completions", {"prompt": "Hi", "echo": True, "logprobs": 2, "max_tokens": 2, "prompt_logprobs": 1, "return_token_ids": True}),
    "message": ("/v1/messages", HI | {"max_tokens": 2}),
    "message with a call": ("/v1/messages", HI | {"max_tokens": 30, "tools": [PLAIN], "tool_choice": {"type": "any"}}),
    "count": ("/v1/messages/count_tokens", HI),
    "response": ("/v1/responses", {"input": "Hi", "max_output_tokens": 2, "include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    "response with a call": ("/v1/responses", {"input": "Hi", "max_output_tokens": 30, "tools": [FLAT], "tool_choice": "required"}),
    "embeddings": ("/v1/embeddings", {"input": ["a", "b"]}),
    "base64": ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
    "tokenize": ("/tokenize", {"prompt": "Hi", "return_token_strs": True}),
    "tokenize a chat": ("/tokenize", HI),
    "detokenize": ("/detokenize", {"tokens": [5, 6]}),
}  # fmt: skip
PAGES = ("/v1/models", "/v1/models/atomc-demo", "/version", "/load", "/health", "/ready", "/compiler", "/is_sleeping")  # fmt: skip


@pytest.fixture(scope="module")
def exact(schema):
    """The schema without fields that it does not name."""
    strict = deepcopy(schema)
    for component in strict["components"]["schemas"].values():
        if "properties" in component:
            component.setdefault("additionalProperties", False)
    return strict


def check(exact, method, path, answer):
    content = exact["paths"][path][method]["responses"][str(answer.status_code)]["content"]
    of_answer = {**content["application/json"]["schema"], "components": exact["components"]}
    jsonschema_rs.validate(of_answer, answer.json())


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_are_as_the_schema_says(http, exact, name):
    path, body = REQUESTS[name]
    answer = http.post(path, json=body | {"seed": 1} if "v1" in path else body)
    assert answer.status_code == 200, answer.text
    check(exact, "post", path, answer)
    wrong = http.post(path, json={})
    assert wrong.status_code == 400
    check(exact, "post", path, wrong)


@pytest.mark.parametrize("path", PAGES)
def test_pages_are_as_the_schema_says(http, exact, path):
    answer = http.get(path)
    template = "/v1/models/{name}" if path.endswith("demo") else path
    check(exact, "get", template, answer)


def test_stored_responses_are_as_the_schema_says(http, exact):
    path = "/v1/responses/{response_id}"
    name = http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 2}).json()["id"]
    check(exact, "get", path, http.get(f"/v1/responses/{name}"))
    items = http.get(f"/v1/responses/{name}/input_items")
    check(exact, "get", f"{path}/input_items", items)
    check(exact, "delete", path, http.delete(f"/v1/responses/{name}"))
    check(exact, "get", path, http.get(f"/v1/responses/{name}"))  # a 404


def page_client():
    app = FastAPI(docs_url=None)
    app.include_router(docs_page.router())
    app.add_exception_handler(
        APIError, lambda request, error: docs_page.HTMLResponse(error.message, error.status)
    )
    return TestClient(app)


def test_the_page_loads_nothing_from_elsewhere(monkeypatch, tmp_path):
    package = tmp_path / "swagger_files"
    (package / "static").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('it is not imported')")
    for name in docs_page.FILES:
        (package / "static" / name).write_text(name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(docs_page, "PACKAGE", "swagger_files")
    client = page_client()
    page = client.get("/docs")
    assert page.status_code == 200 and "/openapi.json" in page.text
    assert "http://" not in page.text and "https://" not in page.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self' 'sha256-" in policy
    for path in docs_page.PATHS[1:]:
        assert path in page.text
        assert client.get(path).text == path.removeprefix("/docs/")
    assert client.get("/docs/__init__.py").status_code == 404


def test_without_the_package_the_page_names_it(monkeypatch):
    monkeypatch.setattr(docs_page, "PACKAGE", "no_such_package")
    for path in docs_page.PATHS:
        answer = page_client().get(path)
        assert answer.status_code == 404 and "pip install 'atomc[serve]'" in answer.text
