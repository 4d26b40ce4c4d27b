"""Starts the other ranks of an engine as actors of its placement group."""

import os
import pickle
from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup

from atomc.options import let_openmp_sleep
from atomc.runtime.config import EngineConfig
from atomc.runtime.processes.stderr_log import log_to_stderr
from atomc.runtime.server.engines.ray_actors.cluster import create_actor, own_address
from atomc.runtime.server.engines.ray_actors.placement import bundles

if TYPE_CHECKING:
    from atomc.runtime.ranks.rank_settings import RankSettings


class ActorLauncher:
    """Rank r is an actor in bundle r of the group. Ray shows each actor only its own GPU."""

    def __init__(self, group: PlacementGroup) -> None:
        self._group = group
        self.host = own_address()

    def device_kind(self, config: EngineConfig) -> str:
        assert config.device in ("cpu", "cuda"), "placement.choose_device chooses it"
        return config.device

    def device(self, kind: str, rank: int) -> str:
        return "cuda:0" if kind == "cuda" else kind

    def start(self, settings: "Sequence[RankSettings]") -> "dict[int, ActorRank]":
        actors = [
            create_actor(
                RankActor, self._group, setting.rank, bundles(setting.config)[setting.rank]
            )
            for setting in settings
        ]
        places = ray.get([actor.place.remote() for actor in actors])
        return {
            setting.rank: ActorRank(actor, setting, *place)
            for setting, actor, place in zip(settings, actors, places, strict=True)
        }


class RankActor:
    """What runs in the actor of a rank."""

    def place(self) -> tuple[int, str]:
        """Its process, and its host."""
        return os.getpid(), own_address()

    def run(self, pickled_settings: bytes) -> None:
        """Execute the commands of rank 0 until it stops."""
        let_openmp_sleep()  # before torch is imported
        from atomc.runtime.ranks.rank import Rank
        from atomc.runtime.ranks.rank_settings import RankSettings

        settings = RankSettings.read(BytesIO(pickled_settings))
        log_to_stderr(f"%(asctime)s %(levelname)s rank {settings.rank}: %(message)s")
        Rank(settings).run()


class ActorRank:
    """Another rank, as rank 0 sees it; a RankHandle."""

    def __init__(self, actor: Any, settings: "RankSettings", pid: int, host: str) -> None:
        self.pid, self.host = pid, host
        self._actor = actor
        self._run = actor.run.remote(pickle.dumps(settings))

    def how_it_ended(self) -> str | None:
        ended, _ = ray.wait([self._run], timeout=0)
        return "has ended" if ended else None

    def kill(self) -> None:
        ray.kill(self._actor)
