"""HTTP for a load generator: one request a connection, and the body as it comes.

A client library takes twice as long for each piece of an answer, and what is measured is to be the server, at tens of
thousands of pieces a second.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

LONGEST_LINE = 2**20


class ConnectionFailed(Exception):
    """The connection cannot be had, or ended in the middle; the message says which."""


@dataclass
class Response:
    """Status, headers with lower-case names, and the body in parts as they come."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader

    async def parts(self) -> AsyncIterator[bytes]:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16):
                yield (await self.reader.readexactly(size + 2))[:-2]
        elif "content-length" in self.headers:
            yield await self.reader.readexactly(int(self.headers["content-length"]))
        else:
            while part := await self.reader.read(2**16):
                yield part

    async def lines(self) -> AsyncIterator[bytes]:
        """The body's lines, without their ends."""
        rest = b""
        async for part in self.parts():
            *whole, rest = (rest + part).split(b"\n")
            for line in whole:
                yield line.rstrip(b"\r")
        if rest:
            yield rest

    async def body(self) -> bytes:
        return b"".join([part async for part in self.parts()])


@asynccontextmanager
async def request(method: str, url: str, headers: Mapping[str, str], body: bytes = b"") -> AsyncIterator[Response]:
    """The response as soon as its head is there. Raises Broken, also while its body is read."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no address of a server, expected one such as http://127.0.0.1:8000")
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if secure else 80)
    writer = None
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure, limit=LONGEST_LINE)
        head = {"Host": parts.netloc, "Content-Length": str(len(body)), "Connection": "close", **headers}
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", ""]
        writer.write("\r\n".join(lines).encode("latin-1") + body)
        await writer.drain()
        yield await _response(reader)
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise ConnectionFailed(f"{type(error).__name__}: {error}") from error
    finally:
        if writer is not None:
            writer.close()


async def _response(reader: asyncio.StreamReader) -> Response:
    first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    version, _, status = first.partition(" ")
    if not version.startswith("HTTP/1.") or not status[:3].isdigit():
        raise ConnectionFailed(f"not an HTTP server: it answered {first[:60]!r}")
    pairs = (line.partition(":") for line in rest if line)
    return Response(int(status[:3]), {name.lower(): value.strip() for name, _, value in pairs}, reader)
