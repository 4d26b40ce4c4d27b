"""The middleware around all endpoints: ids, keys and errors of requests."""

import logging
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import unquote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atomc.runtime.server.http.api_keys import ApiKeys
from atomc.runtime.server.http.responses import (
    APIError,
    APIErrorResponse,
    ErrorFormat,
    client_error,
)
from atomc.runtime.server.http.web_pages import WebPages
from atomc.torch_compat.exceptions import is_failure

log = logging.getLogger("atomc.server")
REQUEST_ID = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
ABSOLUTE_FORM = re.compile(rb"https?://[^/?#]+(/.*)?", re.IGNORECASE | re.DOTALL)


def _use_origin_form(scope: Scope) -> None:
    """Keep the path of a target that is a whole URL, as clients send it to a proxy (RFC 9112,
    3.2.2); uvicorn takes the URL as the path.
    """
    if match := ABSOLUTE_FORM.fullmatch(scope.get("raw_path") or b""):
        scope["raw_path"] = match[1] or b"/"
        scope["path"] = unquote(scope["raw_path"].decode("ascii"))


@dataclass
class AuthMiddleware:
    """ASGI middleware: assigns request ids, checks the site of web pages and API keys, and turns
    exceptions into error responses.

    open_paths        paths that need no key
    operation_paths   paths that need an admin key, if there are any
    count_error       called with the status of each error response
    """

    app: ASGIApp
    keys: ApiKeys
    pages: WebPages
    open_paths: frozenset[str]
    operation_paths: frozenset[str]
    count_error: Callable[[int], None]
    error_format: ErrorFormat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _use_origin_form(scope)
        headers = Headers(scope=scope)
        client_id = headers.get("x-request-id", "")
        name = client_id if REQUEST_ID.fullmatch(client_id) else uuid.uuid4().hex
        headers_of_response = {"X-Request-Id": name}
        state = scope.setdefault("state", {})
        state.update(request_id=name, headers=headers_of_response)
        if self.error_format.applies(scope["path"]):
            headers_of_response[self.error_format.id_header] = name
            state["error_format"] = self.error_format
        response_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal response_started
            if message["type"] == "http.response.start":
                response_started = True
                MutableHeaders(scope=message).update(headers_of_response)
                if message["status"] >= 400:
                    self.count_error(message["status"])
            await send(message)

        try:
            scope["state"]["caller"] = self._check(scope, headers)
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            pass
        except BaseException as error:  # a request that fails is answered, also if Rust panics
            if not is_failure(error):
                raise
            if not isinstance(error, APIError):
                log.exception("request %s failed", name)
            if not response_started:
                await APIErrorResponse(client_error(error))(scope, receive, send_with_id)

    def _check(self, scope: Scope, headers: Headers) -> int | None:
        """The number of the caller's key; None for an open path without one."""
        self.pages.check(scope, headers)
        path = scope["path"]
        caller = self.keys.caller(headers.raw)
        operates = path in self.operation_paths and not self.keys.is_admin(caller)
        if (path not in self.open_paths and caller is None) or operates:
            kind, flag = ("admin", "--admin-key") if operates else ("API", "--api-key")
            raise APIError(
                401,
                f"missing or invalid {kind} key: send one of {flag} in the header 'Authorization: "
                "Bearer KEY' or 'x-api-key: KEY'",
                code=f"invalid_{kind.lower()}_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return caller
