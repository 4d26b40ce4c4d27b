"""One line of an OpenAI batch file: a request, and the line with its response."""

from dataclasses import dataclass
from typing import Any

import msgspec

from atomc.files.json_types import json_kind
from atomc.runtime.server.http.json_body import parse_json

REQUIRED = ("custom_id", "method", "url", "body")


class LineError(ValueError):
    """A line that is not a request. custom_id: if the line has one."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


@dataclass(frozen=True)
class BatchRequest:
    """body: the JSON object of the endpoint `url`."""

    custom_id: str
    url: str
    body: dict[str, Any]


def read_request(line: bytes) -> BatchRequest:
    """The request of a line. Raises LineError."""
    try:
        fields = parse_json(line)
    except ValueError as error:
        raise LineError(f"it is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise LineError(f"it is {json_kind(fields)}, expected an object")
    custom_id = fields.get("custom_id", "")
    if not isinstance(custom_id, str):
        raise LineError(f"custom_id is {custom_id!r:.40}, expected a string")
    for name in REQUIRED:
        if name not in fields:
            raise LineError(f"it has no {name}, expected {', '.join(REQUIRED)}", custom_id or None)
    if fields["method"] != "POST":
        raise LineError(f"method is {fields['method']!r:.40}, expected 'POST'", custom_id)
    if not isinstance(fields["url"], str):
        raise LineError(f"url is {fields['url']!r:.40}, expected a string", custom_id)
    if not isinstance(fields["body"], dict):
        raise LineError(f"body is {json_kind(fields['body'])}, expected an object", custom_id)
    return BatchRequest(custom_id, fields["url"], fields["body"])


def result_line(
    name: str,
    custom_id: str | None,
    *,
    response: dict[str, Any] | None = None,
    error: dict[str, str] | None = None,
) -> bytes:
    """The line of a request's response, or of an error without one. name: the id of the request."""
    line = {
        "id": f"batch_req_{name}",
        "custom_id": custom_id and custom_id.encode(errors="replace").decode(),
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(line) + b"\n"
