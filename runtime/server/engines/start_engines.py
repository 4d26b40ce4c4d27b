"""Starts the engines of a server: processes of this host, actors of a Ray cluster, or one engine
whose other ranks torchrun has started.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from atomc.options import TorchrunPlace, let_openmp_sleep, visible_gpus
from atomc.runtime.config import EngineConfig
from atomc.runtime.server.engines.client import EngineHandle, EngineProcess
from atomc.runtime.server.engines.engine_process import EngineStart


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
        return _start_on_ray(_portable(config, folder))
    if torchrun is not None:
        return _start_with_torchrun(_portable(config, folder), torchrun)
    return [
        EngineProcess(
            EngineStart(replace(config, model=str(folder)), environment, progress=number == 0)
        )
        for number, environment in enumerate(engine_environments(config))
    ]


def engine_environments(config: EngineConfig) -> list[Mapping[str, str]]:
    """The environment of each of config.num_engines engines: engine e of R ranks sees the GPUs
    e * R to e * R + R - 1. Empty without GPUs, and for one engine, which chooses by itself.

    Raises ValueError for one device, or too few.
    """
    if config.num_engines == 1:
        return [{}]
    import torch

    device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.index is not None:
        raise ValueError(
            f"device is {device}, but dp is {config.dp}: set device to {device.type} (and "
            "CUDA_VISIBLE_DEVICES to choose GPUs)"
        )
    if device.type != "cuda":
        return [{}] * config.num_engines
    count, ranks = torch.cuda.device_count(), config.num_ranks
    if count < config.dp * ranks:
        raise ValueError(
            f"dp is {config.dp}, and there are {count} GPUs: each engine needs {ranks}, all need "
            f"{config.dp * ranks}"
        )
    variable, names = visible_gpus()
    names = names or [str(number) for number in range(count)]
    return [
        {variable: ",".join(names[engine * ranks : (engine + 1) * ranks])}
        for engine in range(config.dp)
    ]


def _portable(config: EngineConfig, folder: Path) -> EngineConfig:
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
    return [EngineProcess(EngineStart(config, rank_launcher=TorchrunLauncher(place)))]
