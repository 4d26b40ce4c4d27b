"""Refuses what a web page of another site sends through the browser of a user.

A browser sends a page's request wherever the page wants; CORS only hides the response. It names the
page's site in `Origin`. To a page whose own host name has come to resolve to this server (DNS
rebinding) all is one site, but `Host` is that name.
"""

from collections.abc import Collection
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from atomc.runtime.server.http.responses import APIError

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
DEFAULT_PORTS = {"http": ":80", "https": ":443"}
ANY = "*"


class WebPages:
    """allow_origins: whose pages may call, "*" for all. allow_hosts: names that a request to a
    loopback address may have in `Host`, besides localhost and addresses; None for any.
    """

    def __init__(self, allow_origins: Collection[str], allow_hosts: Collection[str] | None) -> None:
        self._origins = frozenset(allow_origins)
        if allow_hosts is None or ANY in allow_hosts:
            self._hosts = None
        else:
            self._hosts = frozenset(map(str.lower, allow_hosts))

    def check(self, scope: Scope, headers: Headers) -> None:
        """Raises a 403 for a request of a page of another site."""
        host = headers.get("host", "")
        for origin in headers.getlist("origin"):
            if scope["method"] not in SAFE_METHODS and not self._is_allowed(origin, host):
                raise APIError(
                    403,
                    f"Origin is {origin!r:.100}, but Host is {host!r:.100}: pages of another site "
                    "may only call a server that was started with --allow-origin and this origin",
                    code="foreign_origin",
                )
        if self._hosts is None or not host or not _is_loopback(scope):
            return
        name = _host_name(host)
        if not (_is_local(name) or name in self._hosts):
            raise APIError(
                403,
                f"Host is {host!r:.100}, but this is a loopback address: expected localhost, an IP "
                "address, or a name that the server was started with as --allow-host",
                code="foreign_host",
            )

    def _is_allowed(self, origin: str, host: str) -> bool:
        if ANY in self._origins or origin in self._origins:
            return True
        scheme, _, site = origin.lower().partition("://")
        default = DEFAULT_PORTS.get(scheme, "")
        return bool(site) and site.removesuffix(default) == host.lower().removesuffix(default)


def _is_loopback(scope: Scope) -> bool:
    """Whether the connection was made to a loopback address."""
    try:
        address = ip_address((scope.get("server") or ("",))[0])
    except ValueError:  # no address: not from a socket
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def _host_name(host: str) -> str:
    """The host of a `Host` header, in lower case, without the port; "" if it is not valid."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_local(name: str) -> bool:
    """Whether no name server can say what the name stands for."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
