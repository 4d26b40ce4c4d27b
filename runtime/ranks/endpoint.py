"""Addresses of ZeroMQ sockets: a file that only this user can open, or a port for other hosts."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import zmq

# A host that vanished without closing its connections is noticed after HEARTBEAT_TIMEOUT_MS.
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2_000, 10_000


def bind(socket: "zmq.Socket[Any]", file: Path, host: str | None) -> str:
    """Bind a socket; returns its address. host: of this machine, as others reach it; None: only
    processes of this machine connect, to a socket in this file.
    """
    if host is None:
        address = f"ipc://{file}"
        socket.bind(address)
        return address
    address = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
    use_tcp(socket, address)
    return f"{address}:{socket.bind_to_random_port(address)}"


def use_tcp(socket: "zmq.Socket[Any]", address: str) -> None:
    """Prepare a socket for other hosts, before it is bound or connected to this address."""
    socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
    socket.ipv6 = "[" in address
