"""Fields of a request that the server does not know: ignored, or refused with --strict-requests."""

import logging
import re
from collections.abc import Iterator
from urllib.parse import quote

from pydantic import BaseModel
from starlette.requests import Request

from atomc.runtime.server.http.responses import invalid, request_id, response_headers

log = logging.getLogger("atomc.requests")
IGNORED_FIELDS = "X-Ignored-Fields"
# In the header and the log.
MAX_NAMES, MAX_CHARACTERS = 16, 64


def check_unknown_fields(body: BaseModel, request: Request, *, strict: bool) -> None:
    """Name the unknown fields, and the tools that are left out, in a response header and a log
    line. Raises a 400 for the first one under --strict-requests.
    """
    names = list(_take_unknown_fields(body))
    if not names:
        return
    if strict:
        tool = re.fullmatch(r"tools\.\d+", names[0])
        what = "of a type that this server cannot run" if tool else "not a field of this request"
        raise invalid(f"{names[0]} is {what}", names[0].split(".")[0])
    # Percent-encoded: names can have line breaks and any other character.
    shown = [quote(name[:MAX_CHARACTERS], safe="") or '""' for name in names[:MAX_NAMES]]
    text = ", ".join(shown + ["..."] * (len(names) > MAX_NAMES))
    response_headers(request)[IGNORED_FIELDS] = text
    log.info("request %s: ignored unknown fields %s", request_id(request), text)


def _take_unknown_fields(body: BaseModel, prefix: str = "") -> Iterator[str]:
    """Removes the fields and yields their names, such as tools.0.function.name."""
    if unknown := body.model_extra:
        yield from (prefix + name for name in unknown)
        unknown.clear()
    for name, value in vars(body).items():
        if isinstance(value, BaseModel):
            yield from _take_unknown_fields(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield from _take_unknown_fields(item, f"{prefix}{name}.{index}.")
