"""What the frontend needs of whatever runs an engine: a process of its own, or an actor of Ray."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import zmq.asyncio

    from atomc.runtime.config import EngineConfig


class EngineHandle(Protocol):
    """An engine that starts at once, before the frontend's slow imports; `close` ends it."""

    config: "EngineConfig"

    @property
    def label(self) -> str:
        """Its process, or its actor, for the log."""

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the engine has ended."""

    @property
    def exitcode(self) -> int | None:
        """Of its process, negative for a signal; None while it runs, and if it is not known."""

    @property
    def failure(self) -> str | None:
        """Why the engine has ended, if it could not send the reason to the socket."""

    def bind(self, socket: "zmq.asyncio.Socket") -> None:
        """Bind the frontend's socket, which the engine connects to."""

    def kill(self) -> None:
        """End the engine if it still runs; does not wait."""

    def close(self, timeout: float = 0.0) -> None:
        """Wait up to `timeout` seconds for the engine to end, then kill it."""

    def restarted(self) -> "EngineHandle":
        """A new engine like this one, which has ended."""
