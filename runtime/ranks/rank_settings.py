"""What a rank is started with, and its process."""

import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from atomc.runtime.config import EngineConfig


@dataclass(frozen=True)
class TorchSettings:
    """Settings of torch that change results and belong to a process."""

    matmul_precision: str
    deterministic: bool
    dtype: torch.dtype

    @classmethod
    def current(cls) -> "TorchSettings":
        return cls(
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_default_dtype(),
        )

    def apply(self) -> None:
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.use_deterministic_algorithms(self.deterministic)
        torch.set_default_dtype(self.dtype)


@dataclass(frozen=True)
class RankSettings:
    """config: with the rank's device. port: of the store. folder: has the sockets of rank 0."""

    rank: int
    config: EngineConfig
    port: int
    folder: Path
    torch: TorchSettings

    @classmethod
    def read(cls, file: IO[bytes]) -> "RankSettings":
        found = pickle.load(file)
        assert isinstance(found, cls)
        return found

    def start_process(self) -> "subprocess.Popen[bytes]":
        """A process that ends when its standard input is closed: at the latest with this one."""
        process = subprocess.Popen(
            [sys.executable, "-m", "atomc.runtime.ranks.rank_process"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdin=subprocess.PIPE,
        )
        assert process.stdin is not None
        pickle.dump(self, process.stdin)
        process.stdin.flush()
        return process


def commands_address(folder: Path, rank: int) -> str:
    return f"ipc://{folder / f'rank{rank}'}"


def reports_address(folder: Path) -> str:
    return f"ipc://{folder / 'reports'}"
