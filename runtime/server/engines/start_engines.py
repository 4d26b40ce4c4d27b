"""Starts the engines of a server: processes of this host, actors of a Ray cluster, or one engine
whose other ranks torchrun has started.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from atomc.options import TorchrunPlace, let_openmp_sleep
from atomc.runtime.config import EngineConfig
from atomc.runtime.server.engines.client import EngineProcess
from atomc.runtime.server.engines.engine_handle import EngineHandle
from atomc.runtime.server.engines.gpus import engine_environments


def start_engines(
    config: EngineConfig,
    folder: Path,
    *,
    on_ray: bool = False,
    torchrun: TorchrunPlace | None = None,
) -> Sequence[EngineHandle]:
    """config.num_engines engines. folder: of the model. torchrun: the place of this process, if it
    is one of several; other ranks than 0 run here and end the process.

    Raises ValueError if there are too few devices, ImportError without Ray.
    """
    if on_ray:
        return _start_on_ray(_for_other_hosts(config, folder))
    if torchrun is not None:
        return _start_with_torchrun(_for_other_hosts(config, folder), torchrun)
    return [
        EngineProcess(replace(config, model=str(folder)), environment, progress=number == 0)
        for number, environment in enumerate(engine_environments(config))
    ]


def _for_other_hosts(config: EngineConfig, folder: Path) -> EngineConfig:
    """Folders by their whole paths, because other hosts start in other folders. A name on the hub
    stays one, because each host has its own copies.
    """
    lora = {name: str(Path(path).expanduser().resolve()) for name, path in config.lora.items()}
    config = replace(config, lora=lora)
    if config.model is None or not Path(config.model).expanduser().is_dir():
        return config
    return replace(config, model=str(folder.resolve()))


def _start_on_ray(config: EngineConfig) -> Sequence[EngineHandle]:
    try:
        from atomc.runtime.server.engines.ray_actors.engine_actor import start_engine_actors
    except ImportError as error:
        raise ImportError(f"--ray needs {error.name}: pip install 'atomc[ray]'") from error
    return start_engine_actors(config)


def _start_with_torchrun(config: EngineConfig, place: TorchrunPlace) -> Sequence[EngineHandle]:
    let_openmp_sleep()  # before torch is imported
    # With the setting of torchrun, torch ends the process when a collective fails.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    from atomc.runtime.ranks.torchrun import TorchrunLauncher, check_place, run_rank

    check_place(config, place)
    if place.rank > 0:
        run_rank(config, place)
    return [EngineProcess(config, {}, rank_launcher=TorchrunLauncher(place))]
