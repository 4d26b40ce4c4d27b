"""Where the ranks other than 0 run, and how rank 0 starts and ends them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from atomc.runtime.config import EngineConfig

if TYPE_CHECKING:
    from atomc.runtime.ranks.rank_settings import RankSettings


class RankHandle(Protocol):
    """Another rank, as rank 0 sees it. pid: of its process; host: None if it is this one."""

    @property
    def pid(self) -> int: ...

    @property
    def host(self) -> str | None: ...

    def how_it_ended(self) -> str | None:
        """Such as "was killed by signal 9"; None while it runs, or if only its silence can tell."""

    def kill(self) -> None:
        """End it; does nothing if it has ended."""


class RankLauncher(Protocol):
    """Starts the other ranks of a group.

    host  the address by which they reach rank 0; None: they are on the same host
    """

    @property
    def host(self) -> str | None: ...

    def device_kind(self, config: EngineConfig) -> str:
        """cpu or cuda. Raises ValueError if there are too few devices for the config."""

    def device(self, kind: str, rank: int) -> str:
        """The device of this rank, such as cuda:1."""

    def start(self, settings: "Sequence[RankSettings]") -> Mapping[int, RankHandle]:
        """Start a process for each, by rank. Raises RuntimeError if one cannot start."""


def place_of(pid: int, host: str | None) -> str:
    """Where a rank runs, for messages."""
    return f"process {pid}" + (f" on {host}" if host else "")
