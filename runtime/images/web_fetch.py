"""Fetches images from web addresses, never from private ones.

Addresses are checked after the name is resolved, and the connection goes to a checked address, so
that a name cannot resolve to another one later. Each redirect is checked in the same way. Proxies
of the environment are not used.
"""

import contextlib
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse
from urllib.parse import SplitResult, urljoin, urlsplit

from atomc.runtime.images.image_error import ImageError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
ANY_HOST = "*"
MAX_REDIRECTS = 3
REDIRECTS = (301, 302, 303, 307, 308)
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# IPv4-compatible addresses and the local NAT64 prefix, which `is_global` has for public.
NOT_ROUTED = (ipaddress.IPv6Network("::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))
PORTS = {"http": 80, "https": 443}
HEADERS = {"User-Agent": "atomc", "Accept": "image/*", "Accept-Encoding": "identity"}


def is_public(address: Address) -> bool:
    """Whether the address is that of a host on the internet; an IPv4 address within an IPv6 one
    counts as itself.
    """
    if isinstance(address, ipaddress.IPv6Address):
        if address.is_site_local or any(address in network for network in NOT_ROUTED):
            return False
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
    return address.is_global and not address.is_multicast


@dataclass(frozen=True)
class WebFetch:
    """Settings of fetching.

    hosts     names of allowed hosts; "*": all public ones
    seconds   limit for one image, with redirects
    allows    whether an address may be connected to
    """

    hosts: frozenset[str]
    seconds: float = 10.0
    allows: Callable[[Address], bool] = field(default=is_public)

    def get(self, url: str, max_bytes: int) -> bytes:
        """The body that the URL stands for. Raises ImageError."""
        until = time.monotonic() + self.seconds
        for _ in range(MAX_REDIRECTS + 1):
            parts = self._checked(url)
            try:
                with contextlib.closing(self._connect(parts, until)) as connection:
                    answer = _request(connection, parts, max_bytes, until)
            except (OSError, HTTPException, ValueError) as error:
                if time.monotonic() >= until:
                    message = f"fetching the image exceeded the limit of {self.seconds:g} s"
                    raise ImageError(message) from error
                if isinstance(error, ImageError):
                    raise
                reason = f"{type(error).__name__}, from host {parts.hostname!r:.80}"
                raise ImageError(f"fetching the image failed: {reason}") from error
            if isinstance(answer, bytes):
                return answer
            url = urljoin(url, answer)
        raise ImageError(f"the URL of the image has more than {MAX_REDIRECTS} redirects")

    def _checked(self, url: str) -> SplitResult:
        try:
            parts = urlsplit(url)
            valid = parts.scheme in PORTS and parts.hostname and parts.port != 0
        except ValueError:
            valid = False
        # Control characters and spaces could split the request.
        plain = url.isascii() and url.isprintable() and " " not in url
        if not valid or not plain or "@" in parts.netloc:
            raise ImageError("the URL of an image is not a valid http or https URL")
        if ANY_HOST not in self.hosts and parts.hostname not in self.hosts:
            raise ImageError(
                f"images of host {parts.hostname!r:.80} are not allowed: see "
                "--allowed-media-domains"
            )
        return parts

    def _connect(self, parts: SplitResult, until: float) -> HTTPConnection:
        assert parts.hostname is not None
        port = parts.port or PORTS[parts.scheme]
        resolved = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        addresses = [ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in resolved]
        if not all(map(self.allows, addresses)):
            raise ImageError(
                f"host {parts.hostname!r:.80} has an address that is not public: images are not "
                "fetched from it"
            )
        error: OSError = OSError("no address")
        for address in addresses:
            try:
                plain = socket.create_connection((str(address), port), _left(until))
            except OSError as failed:
                error = failed
                continue
            connection = HTTPConnection(parts.hostname, port)
            connection.sock = _secured(plain, parts.hostname) if parts.scheme == "https" else plain
            return connection
        raise error


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _secured(plain: socket.socket, host: str) -> socket.socket:
    try:
        return ssl.create_default_context().wrap_socket(plain, server_hostname=host)
    except BaseException:
        plain.close()
        raise


def _request(
    connection: HTTPConnection, parts: SplitResult, max_bytes: int, until: float
) -> bytes | str:
    """The image file, or the location of a redirect."""
    # A timeout of the socket counts from its last byte; the timer ends a body that trickles in.
    timer = threading.Timer(_left(until), _shut_down, [connection.sock])
    timer.daemon = True
    timer.start()
    try:
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", path, headers=HEADERS | {"Host": parts.netloc})
        return _body(connection.getresponse(), max_bytes)
    finally:
        timer.cancel()


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # already closed
        sock.shutdown(socket.SHUT_RDWR)


def _body(response: HTTPResponse, max_bytes: int) -> bytes | str:
    if response.status in REDIRECTS and (location := response.getheader("Location")):
        return location
    if response.status != 200:
        raise ImageError(f"the host of the image answered with status {response.status}")
    if (response.length or 0) > max_bytes:
        raise ImageError(f"the image file has more than {max_bytes} bytes")
    data = response.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ImageError(f"the image file has more than {max_bytes} bytes")
    if response.length:
        raise ImageError("the image file ended early")
    return data
