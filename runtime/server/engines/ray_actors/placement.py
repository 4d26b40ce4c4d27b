"""What an engine asks of a Ray cluster: an address that answers, and a placement group with a
bundle for each rank.
"""

import socket
from collections.abc import Mapping
from dataclasses import replace

from atomc.runtime.config import EngineConfig

Resources = dict[str, float]
CONNECT_SECONDS = 5.0


def check_address(address: str | None) -> None:
    """Raises ValueError if RAY_ADDRESS has this value and no cluster, which Ray would look for
    during many minutes.
    """
    if address is None or address in ("auto", "local"):
        return
    if "://" in address:
        raise ValueError(
            f"--ray: RAY_ADDRESS is {address!r}, expected HOST:PORT: this command joins the "
            "cluster from one of its hosts, not through Ray Client"
        )
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--ray: RAY_ADDRESS is {address!r}, and no Ray cluster answers there ({error}): "
            "expected HOST:PORT of its head, such as 10.0.0.1:6379"
        ) from error


def choose_device(config: EngineConfig, cluster: Mapping[str, float]) -> EngineConfig:
    """The config with a device, by the resources of the cluster: this host may be another machine
    than those that compute. On CPUs also with the number of threads. Raises ValueError for one
    device.
    """
    device = config.device or ("cuda" if cluster.get("GPU") else "cpu")
    if device == "cuda":
        return replace(config, device=device)
    if device == "cpu":
        return replace(config, device=device, threads=config.threads or 1)
    raise ValueError(f"device is {device}, but Ray chooses the GPU of each rank: set cuda or cpu")


def bundles(config: EngineConfig) -> list[Resources]:
    """A bundle for each rank of one engine, in order. The config has a device."""
    gpu = config.device == "cuda"
    bundle = {"GPU": 1.0, "CPU": 1.0} if gpu else {"CPU": float(config.threads or 1)}
    return [dict(bundle) for _ in range(config.num_ranks)]


def check_resources(
    config: EngineConfig, cluster: Mapping[str, float], free: Mapping[str, float]
) -> None:
    """Raises ValueError if the cluster has too few resources for config.num_engines engines."""
    engines = f" and dp is {config.dp}" if config.num_engines > 1 else ""
    for name, share in bundles(config)[0].items():
        needed = share * config.num_processes
        if free.get(name, 0.0) < needed:
            raise ValueError(
                f"{config.several_ranks}{engines}: the ranks need {needed:g} {name}s, "
                f"{share:g} each, and of {cluster.get(name, 0.0):g} {name}s of the Ray cluster "
                f"{free.get(name, 0.0):g} are free"
            )
