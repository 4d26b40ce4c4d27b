"""An engine as an actor of a Ray cluster, which starts the other ranks as actors beside it."""

import os
import select
import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import zmq
import zmq.asyncio
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from atomc.runtime.config import EngineConfig
from atomc.runtime.ranks.endpoint import bind, use_tcp
from atomc.runtime.server.engines.engine_process import LINGER_MS, EngineStart, run_engine
from atomc.runtime.server.engines.ray_actors.cluster import connect, create_actor, own_address
from atomc.runtime.server.engines.ray_actors.placement import (
    bundles,
    check_resources,
    choose_device,
)
from atomc.runtime.server.engines.ray_actors.rank_actors import ActorLauncher

PLACEMENT_SECONDS = 60.0


def start_engine_actors(config: EngineConfig) -> "list[RayEngine]":
    """config.num_engines engines on the cluster. Raises ValueError without a cluster, or if it has
    too few free resources.
    """
    connect()
    cluster = ray.cluster_resources()
    config = choose_device(config, cluster)
    check_resources(config, cluster, ray.available_resources())
    return [RayEngine(config, progress=number == 0) for number in range(config.num_engines)]


class RayEngine:
    """An engine in an actor, in a placement group with its other ranks; an EngineHandle. All of
    them end with this process.
    """

    exitcode: None = None

    def __init__(self, config: EngineConfig, *, progress: bool = True) -> None:
        self.config = config
        self._progress = progress
        self._group = placement_group(bundles(config), strategy="PACK")
        self._actor = create_actor(EngineActor, self._group, 0, bundles(config)[0])
        self.label = f"actor {self._actor._actor_id.hex()}"
        self.sentinel, self._alive = os.pipe()
        self._closed = False
        self._reason: str | None = None
        self._failures = zmq.Context().socket(zmq.PULL)
        self._folder = Path(tempfile.mkdtemp(prefix="atomc-"))

    def bind(self, socket: zmq.asyncio.Socket) -> None:
        host = own_address()
        failures = bind(self._failures, self._folder / "failure", host)
        address = bind(socket, self._folder / "engine", host)
        run = self._actor.run.remote(self.config, self._group, address, failures, self._progress)
        threading.Thread(target=self._watch, args=(run,), daemon=True).start()

    def _watch(self, run: Any) -> None:
        """The work of a thread: `sentinel` is readable at its end."""
        try:
            if self._group.wait(PLACEMENT_SECONDS):
                ray.get(run)
            else:
                self._reason = (
                    f"the Ray cluster had no place for {len(bundles(self.config))} x "
                    f"{bundles(self.config)[0]} for {PLACEMENT_SECONDS:g} s"
                )
        except RayActorError as error:
            if error.actor_init_failed:  # without atomc on the node, for example
                self._reason = f"Ray could not start {self.label}: {str(error).splitlines()[-1]}"
        except RayError as error:
            self._reason = f"{self.label} failed: {str(error).splitlines()[-1]}"
        finally:
            os.close(self._alive)

    @property
    def failure(self) -> str | None:
        with suppress(zmq.ZMQError):  # there is none, or the socket is closed
            self._reason = self._failures.recv(zmq.NOBLOCK).decode()
        return self._reason

    def kill(self) -> None:
        ray.kill(self._actor)
        remove_placement_group(self._group)

    def close(self, timeout: float = 0.0) -> None:
        if self._closed:
            return
        self._closed = True
        select.select([self.sentinel], [], [], timeout)
        self.kill()
        os.close(self.sentinel)
        self._failures.close(linger=0)
        self._failures.context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def restarted(self) -> "RayEngine":
        return RayEngine(self.config, progress=False)


class EngineActor:
    """What runs in the actor of an engine."""

    def run(
        self,
        config: EngineConfig,
        group: PlacementGroup,
        address: str,
        failures: str,
        progress: bool,
    ) -> None:
        """Serve the frontend at `address` until it stops the engine. failures: gets the reason if a
        rank fails and the engine's thread cannot send it.
        """
        run_engine(
            EngineStart(config, progress=progress, rank_launcher=ActorLauncher(group)),
            address,
            lambda reason: _send(failures, reason),
            own_address(),
        )


def _send(address: str, text: str) -> None:
    """Send one message; returns when it is sent, or after LINGER_MS."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = LINGER_MS
        use_tcp(socket, address)
        socket.connect(address)
        socket.send(text.encode())
