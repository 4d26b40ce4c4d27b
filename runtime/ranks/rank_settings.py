"""What a rank is started with."""

import pickle
from dataclasses import dataclass
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
    """config: with the rank's device. store_host, store_port: of the process group's store.
    commands, reports: addresses of the sockets of rank 0.
    """

    rank: int
    config: EngineConfig
    store_host: str
    store_port: int
    commands: str
    reports: str
    torch: TorchSettings

    @classmethod
    def read(cls, file: IO[bytes]) -> "RankSettings":
        settings = pickle.load(file)
        assert isinstance(settings, cls)
        return settings
