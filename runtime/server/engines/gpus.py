"""Divides the GPUs among the engines of a server."""

from collections.abc import Mapping

from atomc.options import visible_gpus
from atomc.runtime.config import EngineConfig


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
    count, each = torch.cuda.device_count(), config.num_ranks
    if count < config.dp * each:
        raise ValueError(
            f"dp is {config.dp}, and there are {count} GPUs: each engine needs {each}, all need "
            f"{config.dp * each}"
        )
    variable, names = visible_gpus()
    names = names or [str(number) for number in range(count)]
    return [
        {variable: ",".join(names[engine * each : (engine + 1) * each])}
        for engine in range(config.dp)
    ]
