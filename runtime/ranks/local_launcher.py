"""Starts the other ranks as processes of this host."""

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from atomc.runtime.config import EngineConfig
from atomc.runtime.ranks.rank_settings import RankSettings


def device_type(config: EngineConfig) -> str:
    """cpu or cuda. Raises ValueError for a config with one GPU: each rank has its own."""
    device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.index is not None:
        raise ValueError(
            f"device is {device}, but {config.several_ranks}: set device to {device.type} (and "
            "CUDA_VISIBLE_DEVICES to choose GPUs)"
        )
    return device.type


@dataclass(frozen=True)
class LocalLauncher:
    """Ranks on the GPUs of this host in order, or on its CPU."""

    host: None = None

    def device_kind(self, config: EngineConfig) -> str:
        kind = device_type(config)
        if kind == "cuda" and torch.cuda.device_count() < config.num_ranks:
            raise ValueError(
                f"{config.several_ranks}, and there are {torch.cuda.device_count()} GPUs: each "
                "rank needs one"
            )
        return kind

    def device(self, kind: str, rank: int) -> str:
        return f"cuda:{rank}" if kind == "cuda" else kind

    def start(self, settings: Sequence[RankSettings]) -> "dict[int, ChildRank]":
        return {each.rank: ChildRank(each) for each in settings}


class ChildRank:
    """A process that ends when its standard input is closed: at the latest with this one."""

    host: None = None

    def __init__(self, settings: RankSettings) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "atomc.runtime.ranks.rank_process"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdin=subprocess.PIPE,
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        pickle.dump(settings, self._process.stdin)
        self._process.stdin.flush()

    def how_it_ended(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
