"""Unknown fields of a request under --strict-requests."""

import pytest

pytest.importorskip("fastapi")
from starlette.requests import Request

from atomc.runtime.server.http.responses import APIError
from atomc.runtime.server.http.unknown_fields import check_unknown_fields
from atomc.runtime.server.service.protocol import ChatRequest

HELLO = [{"role": "user", "content": "Hello", "x": 1}]


def check(body):
    request = Request({"type": "http", "state": {"headers": {}, "request_id": "x"}})
    check_unknown_fields(ChatRequest(model="m", messages=HELLO, **body), request, strict=True)


def test_the_first_unknown_field_is_refused_by_name():
    with pytest.raises(APIError, match=r"^tools\.0\.x is not a field of this request$") as caught:
        check({"tools": [{"type": "function", "function": {"name": "f"}, "x": 1}]})
    assert (caught.value.status, caught.value.param) == (400, "tools")
    with pytest.raises(APIError, match=r"^temprature is not"):
        check({"temprature": 1})


def test_known_fields_and_those_of_messages_pass():
    check({"temperature": 1, "tools": [{"type": "function", "function": {"name": "f"}}]})
