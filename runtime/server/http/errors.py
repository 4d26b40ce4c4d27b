"""Errors that clients receive, as in OpenAI's API. No message has a path or a stack trace."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from atomc.runtime.requests.request_errors import RequestError, TokenizerError
from atomc.runtime.server.engines.client import (
    EngineDead,
    EngineLost,
    EngineRestarting,
    RequestRefused,
    ShuttingDown,
)

MAX_MESSAGE_CHARACTERS = 1000


class ErrorBody(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """The body of every error response."""

    error: ErrorBody


class APIError(Exception):
    """A response with this status and the body {"error": {"message", "type", "param", "code"}}.
    kind: the type; None: by the status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str | None = None,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # The message may quote the request, which can be long or contain lone surrogates.
        message = message[:MAX_MESSAGE_CHARACTERS].encode(errors="backslashreplace").decode()
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.param = param and param.encode(errors="backslashreplace").decode()
        self.headers = dict(headers or {})

    def body(self) -> ErrorAnswer:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(message: str, param: str | None = None, code: str | None = None) -> APIError:
    return APIError(400, message, param=param, code=code)


@contextmanager
def refusing(param: str | None = None) -> Iterator[None]:
    """A ValueError within is a 400, for this parameter or the one that a ParameterError names."""
    try:
        yield
    except UnicodeError:
        raise
    except ValueError as error:
        raise invalid(str(error), getattr(error, "name", param)) from error


def unavailable(
    message: str,
    code: str,
    retry_after: float | None = None,
    *,
    status: int = 503,
    kind: str = "service_unavailable",
) -> APIError:
    """For a request that may succeed later, after `retry_after` seconds if that is known."""
    seconds = retry_after if retry_after is None else max(1, round(retry_after))
    headers = None if seconds is None else {"Retry-After": str(seconds)}
    return APIError(status, message, kind, code=code, headers=headers)


def invalid_field(location: Sequence[str], message: str) -> APIError:
    """A 400 for a field that pydantic refused with this message. location: "" is the body."""
    # Lone surrogates become ?.
    parts = [part.encode(errors="replace").decode() for part in location]
    text = message.removeprefix("Value error, ")
    return invalid(f"{'.'.join(parts) or 'the body'}: {text}", parts[0] if parts else None)


def request_error(error: RequestError, request_id: str) -> APIError:
    """The response to a request that failed in the engine."""
    if error.by_client:
        return invalid(error.message)
    return APIError(500, f"{error.message} (request {request_id})")


def client_error(error: BaseException) -> APIError:
    """The response to a request that ended with this error."""
    match error:
        case APIError():
            return error
        case ShuttingDown():
            return unavailable(str(error), "shutting_down")
        case EngineRestarting(retry_after=seconds):
            return unavailable(str(error), "engine_restarting", seconds)
        case EngineLost():
            message = f"{error}; another engine takes over: send the request again"
            return unavailable(message, "engine_dead", 0)
        case EngineDead():
            return unavailable(f"{error}; no request can be served", "engine_dead")
        case RequestRefused(asleep=True, retry_after=float() | int() as seconds):
            return unavailable(str(error), "engine_asleep", seconds)
        case RequestRefused(retry_after=float() | int() as seconds):
            return unavailable(str(error), "queue_full", seconds, kind="overloaded")
        case RequestRefused(by_client=False):
            return APIError(500, str(error))
        case RequestRefused():
            return invalid(str(error))
        case TokenizerError():
            return APIError(500, str(error))
    return APIError(500, "internal error; see the server's log")
