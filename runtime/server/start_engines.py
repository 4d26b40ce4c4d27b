"""Starts the engines of a server: as processes of this host, or as actors of a Ray cluster."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from atomc.runtime.config import EngineConfig
from atomc.runtime.server.client import EngineProcess
from atomc.runtime.server.engine_handle import EngineHandle
from atomc.runtime.server.gpus import engine_environments


def start_engines(
    config: EngineConfig, folder: Path, *, on_ray: bool = False
) -> Sequence[EngineHandle]:
    """config.num_engines engines. folder: of the model.

    Raises ValueError if there are too few devices, ImportError without Ray.
    """
    if on_ray:
        return _start_on_ray(config, folder)
    return [
        EngineProcess(replace(config, model=str(folder)), environment, progress=number == 0)
        for number, environment in enumerate(engine_environments(config))
    ]


def _start_on_ray(config: EngineConfig, folder: Path) -> Sequence[EngineHandle]:
    """A name on the hub stays one, because each host has its own copies."""
    try:
        from atomc.runtime.ray_actors.engine_actor import start_engine_actors
    except ImportError as error:
        raise ImportError(f"--ray needs {error.name}: pip install 'atomc[ray]'") from error
    is_folder = config.model is not None and Path(config.model).expanduser().is_dir()
    return start_engine_actors(
        replace(config, model=str(folder.resolve())) if is_folder else config
    )
