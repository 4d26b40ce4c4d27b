"""Web pages of other sites, names that are rebound to the server, and keys of its operators."""

import asyncio
from functools import cache

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("tokenizers")
httpx = pytest.importorskip("httpx")
from fastapi import FastAPI, Request  # noqa: E402
from fastapi.routing import APIRoute  # noqa: E402

from atomc.runtime.server.app import OPEN_PATHS, OPERATION_PATHS, create_app  # noqa: E402
from atomc.runtime.server.config import ServerConfig  # noqa: E402
from atomc.runtime.server.http.api_keys import ApiKeys  # noqa: E402
from atomc.runtime.server.metrics import Metrics  # noqa: E402
from atomc.runtime.server.serve import read_key_files  # noqa: E402
from atomc.runtime.server.service.image_budget import ImageBudget  # noqa: E402
from atomc.runtime.server.service.service import Service  # noqa: E402

# Paths of the model's users.
USE_PATHS = {
    "/v1/models",
    "/v1/models/{name:path}",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/responses/compact",
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/input_items",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
}


@cache
def app_of(config):
    """The application, without engines."""
    return create_app(Service(None, None, config, Metrics(None, "m"), 1, ImageBudget(1)))


def answer(config, method, path, server="127.0.0.1", **headers):
    """The response to a request that came to this address of the server."""

    async def run():
        transport = httpx.ASGITransport(app_of(config))
        url = f"http://[{server}]:8000" if ":" in server else f"http://{server}:8000"
        async with httpx.AsyncClient(transport=transport, base_url=url) as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(run())


def routes(app):
    while not isinstance(app, FastAPI):
        app = app.app
    found = [route for route in app.routes if isinstance(route, APIRoute)]
    # include_router may keep the routes of a router together.
    for router in (
        route.original_router for route in app.routes if hasattr(route, "original_router")
    ):
        found += router.routes
    return {route.path for route in found}


def test_each_route_is_for_all_for_users_or_for_operators():
    for_all = {path for path in OPEN_PATHS if not path.startswith("/docs/")} - {"/openapi.json"}
    classes = (for_all | {"/docs/{name}"}, OPERATION_PATHS, USE_PATHS)
    paths = routes(app_of(ServerConfig()))
    assert paths == set().union(*classes) and len(paths) == sum(map(len, classes))


# A level of /sleep that there is not: what is let through is a 400.
SLEEP = "/sleep?level=9"


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        (None, "127.0.0.1:8000", 400),
        ("http://127.0.0.1:8000", "127.0.0.1:8000", 400),
        ("http://localhost:8000", "LOCALHOST:8000", 400),
        ("https://localhost", "localhost:443", 400),
        ("http://localhost:80", "localhost", 400),
        ("https://page.example", "localhost:8000", 403),
        ("http://localhost:8001", "localhost:8000", 403),
        ("http://127.0.0.1:8000", "localhost:8000", 403),
        ("http://localhost", "localhost:8000", 403),
        ("https://localhost:80", "localhost", 403),
        ("http://127.0.0.1:8000.page.example", "127.0.0.1:8000", 403),
        ("null", "localhost:8000", 403),
        ("", "localhost:8000", 403),
        ("http://", "localhost:8000", 403),
        ("localhost:8000", "localhost:8000", 403),
        ("null", "", 403),
    ],
)
def test_a_page_of_another_origin_changes_nothing(origin, host, status):
    headers = {"Host": host} | ({} if origin is None else {"Origin": origin})
    for config in (ServerConfig(), ServerConfig(api_key=("k",))):
        found = answer(config, "POST", SLEEP, Authorization="Bearer k", **headers)
        assert found.status_code == status
        if status == 403:
            assert found.json()["error"]["code"] == "foreign_origin"
            assert "--allow-origin" in found.json()["error"]["message"]
        # Without CORS, a browser lets no page of another origin read the response.
        read = answer(config, "GET", "/v1/nothing", Authorization="Bearer k", **headers)
        assert read.status_code == 404


def test_any_method_that_changes_something_is_refused():
    for method, path in (
        ("POST", "/ping"),
        ("DELETE", "/v1/responses/x"),
        ("PUT", "/x"),
        ("PATCH", "/x"),
    ):
        assert answer(ServerConfig(), method, path, Origin="https://a.example").status_code == 403
    assert answer(ServerConfig(), "GET", "/ping", Origin="https://a.example").status_code != 403


@pytest.mark.parametrize("allowed", ["https://page.example", "null", "*"])
def test_pages_of_allowed_origins_may_call(allowed):
    config = ServerConfig(allow_origin=(allowed,))
    for origin in ("https://page.example", "null", "https://other.example"):
        found = answer(config, "POST", SLEEP, Origin=origin)
        assert (found.status_code == 400) == (allowed in ("*", origin))


def test_anthropics_paths_have_its_errors():
    error = answer(ServerConfig(), "POST", "/v1/messages", Origin="https://a.example").json()
    assert (error["type"], error["error"]["type"]) == ("error", "permission_error")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("Model.Localhost:8000", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("192.168.1.7", 200),
        ("", 200),
        ("page.example", 403),
        ("page.example:8000", 403),
        ("127.0.0.1.page.example", 403),
        ("localhost.page.example", 403),
        ("notlocalhost", 403),
        ("[::1", 403),
        ("user@page.example", 403),
    ],
)
def test_a_name_that_was_rebound_to_a_loopback_address_reads_nothing(host, status):
    for server in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"):
        found = answer(ServerConfig(), "GET", "/version", server, Host=host)
        assert found.status_code == status
    # Keys protect, and other addresses have names.
    assert answer(ServerConfig(api_key=("k",)), "GET", "/version", Host=host).status_code == 200
    for server in ("192.168.1.7", "fd00::7", "unix"):
        assert answer(ServerConfig(), "GET", "/version", server, Host=host).status_code == 200


def test_the_names_of_proxies_are_allowed():
    config = ServerConfig(allow_host=("Chat.example",))
    assert answer(config, "GET", "/version", Host="chat.EXAMPLE:443").status_code == 200
    found = answer(config, "GET", "/version", Host="sub.chat.example").json()["error"]
    assert found["code"] == "foreign_host" and "--allow-host" in found["message"]
    any_host = ServerConfig(allow_host=("*",))
    assert answer(any_host, "GET", "/version", Host="page.example").status_code == 200
    for wrong in ("", "http://chat.example", "chat.example:80"):
        with pytest.raises(ValueError, match="expected a host name without"):
            ServerConfig(allow_host=(wrong,))


def statuses(config, path):
    """Without a key, with a user's, and with an operator's."""
    sent = ({}, {"x-api-key": "user"}, {"Authorization": "Bearer operator"})
    return [answer(config, "POST", path, **headers).status_code for headers in sent]


def test_an_admin_key_separates_operation_from_use():
    users, operators = {"api_key": ("user",)}, {"admin_key": ("operator",)}
    for path, settings, expected in (
        (SLEEP, {}, [400, 400, 400]),
        (SLEEP, users, [401, 400, 401]),
        (SLEEP, operators, [401, 401, 400]),
        (SLEEP, users | operators, [401, 401, 400]),
        ("/tokenize", operators, [400, 400, 400]),
        ("/tokenize", users | operators, [401, 400, 400]),
    ):
        assert statuses(ServerConfig(**settings), path) == expected, (path, settings)
    config = ServerConfig(**users, **operators)
    for path in OPERATION_PATHS:
        for method in ("GET", "POST"):
            error = answer(config, method, path, Authorization="Bearer user").json()["error"]
            assert error["code"] == "invalid_admin_key" and "--admin-key" in error["message"]


def test_each_key_has_a_number_of_its_own():
    def caller(keys, value):
        return keys.caller([(b"authorization", f"Bearer {value}".encode())])

    keys = ApiKeys(["a", "b"], ["c"])
    assert [caller(keys, key) for key in "abcd"] == [0, 1, 2, None]
    without = ApiKeys([], ["c", "d"])
    assert [caller(without, key) for key in "cdx"] == [1, 2, 0] and without.caller([]) == 0


def test_each_key_has_a_salt_which_can_be_shared():
    def salts(config, **state):
        service = Service(None, None, config, Metrics(None, "m"), 1, ImageBudget(1))
        request = Request({"type": "http", "state": state})
        return [service.prefix_salt(request, salt) for salt in (None, "", "1")]

    config = ServerConfig()
    every = [salt for n in (0, 1, 11) for salt in salts(config, caller=n)]
    assert None not in every and len(set(every)) == 9
    # A batch file has no key.
    assert salts(config) == salts(ServerConfig(share_prefixes=True), caller=1) == [None, "", "1"]


def test_admin_keys_are_read_from_a_file_and_are_no_api_keys(tmp_path):
    (tmp_path / "keys").write_text("one\ntwo\n")
    config = read_key_files(ServerConfig(admin_key=("three",), admin_key_file=f"{tmp_path}/keys"))
    assert (config.admin_key, config.admin_key_file) == (("three", "one", "two"), None)
    with pytest.raises(ValueError, match="1 of the admin keys are API keys"):
        ServerConfig(api_key=("a", "b"), admin_key=("b",))
    (tmp_path / "keys").write_text("")
    with pytest.raises(ValueError, match=r"--admin-key-file .* has no key"):
        read_key_files(ServerConfig(admin_key_file=f"{tmp_path}/keys"))
