"""Errors in the format of Anthropic's Messages API, for the paths of that API."""

from typing import Literal

from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from atomc.runtime.server.http.responses import APIError, ErrorFormat

MESSAGES = "/v1/messages"
COUNT_TOKENS = f"{MESSAGES}/count_tokens"
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class ErrorFields(TypedDict):
    type: str
    message: str


class ErrorResponse(TypedDict):
    type: Literal["error"]
    error: ErrorFields
    request_id: str


def anthropic_error(error: APIError, request_id: str) -> ErrorResponse:
    return {
        "type": "error",
        "error": {"type": _kind(error), "message": error.message},
        "request_id": request_id,
    }


def _kind(error: APIError) -> str:
    if error.status >= 500:
        return "overloaded_error" if error.kind == "overloaded" else "api_error"
    return KINDS.get(error.status, "invalid_request_error")


ERROR_FORMAT = ErrorFormat(MESSAGES, anthropic_error, "Request-Id")
