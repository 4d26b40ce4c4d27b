"""A stand-in for mori.ops and mori.shmem with the documented meaning of its kernels for one host
(amd-mori 1.0), over collectives of torch.distributed. Rows that it does not write hold NaN.
"""

import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from atomc.kernels.mori import exchange

CONNECTED: set[tuple[int, int]] = set()
UNIQUE_ID = 1


@dataclass
class EpDispatchCombineConfig:
    data_type: torch.dtype
    rank: int
    world_size: int
    hidden_dim: int
    scale_dim: int
    scale_type_size: int
    max_token_type_size: int
    max_num_inp_token_per_rank: int
    num_experts_per_rank: int
    num_experts_per_token: int
    gpu_per_node: int


def gathered(item: Any) -> list[Any]:
    """The item of each rank."""
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, item)
    return found


def filled(rows: Tensor, size: int) -> Tensor:
    """The rows, and behind them what no kernel has written: NaN, or 0 of integers."""
    nothing = float("nan") if rows.dtype.is_floating_point else 0
    out = torch.full((size, *rows.shape[1:]), nothing, dtype=rows.dtype)
    out[: len(rows)] = rows
    return out


class EpDispatchCombineOp:
    def __init__(self, config: EpDispatchCombineConfig):
        assert {(config.rank, config.world_size)} == CONNECTED, "shmem is not initialized so"
        assert config.world_size == distributed.get_world_size()
        assert config.rank == distributed.get_rank()
        self.config = config
        self.used = torch.zeros(1, dtype=torch.int32)

    def dispatch(
        self, input: Tensor, weights: Tensor, scales: Tensor | None, indices: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        """Each row goes once to each rank of its experts, expert // experts of a rank."""
        c = self.config
        tokens = len(input)
        assert tokens <= c.max_num_inp_token_per_rank and input.is_contiguous()
        assert (tuple(input.shape), input.dtype) == ((tokens, c.hidden_dim), c.data_type)
        for given, dtype in ((weights, torch.float32), (indices, torch.int32)):
            assert tuple(given.shape) == (tokens, c.num_experts_per_token) and given.dtype == dtype
            assert given.is_contiguous()
        if scales is not None:
            assert tuple(scales.shape) == (tokens, c.scale_dim) and scales.is_contiguous()
            assert scales.dtype.itemsize == c.scale_type_size
        assert ((indices >= 0) & (indices < c.world_size * c.num_experts_per_rank)).all()
        self.indices = indices.clone()
        bits = input.view(torch.uint8) if input.dtype.itemsize == 1 else input
        sent = gathered((bits, weights, scales, indices))
        # Rows arrive in any order: here those of the last rank and token first.
        self.places = [
            (rank, token)
            for rank in reversed(range(c.world_size))
            for token in reversed(range(len(sent[rank][3])))
            if (sent[rank][3][token] // c.num_experts_per_rank == c.rank).any()
        ]
        most = c.world_size * c.max_num_inp_token_per_rank

        def received(part: int, like: Tensor) -> Tensor:
            rows = [sent[rank][part][token] for rank, token in self.places]
            stacked = torch.stack(rows) if rows else like.new_zeros(0, *like.shape[1:])
            return filled(stacked, most)

        self.used.fill_(len(self.places))
        row_scales = None if scales is None else received(2, scales)
        rows = received(0, bits).view(input.dtype)
        return rows, received(1, weights), row_scales, received(3, indices), self.used

    def combine(
        self, input: Tensor, weights: Tensor | None, indices: Tensor
    ) -> tuple[Tensor, None]:
        """The sum of what the ranks made of each token, in fp32. The number of rows is reset."""
        c = self.config
        assert weights is None and torch.equal(indices, self.indices)
        assert input.is_contiguous() and input.dtype.itemsize <= c.max_token_type_size
        results = gathered((self.places, input[: len(self.places)]))
        self.used.zero_()
        sums = torch.zeros(len(indices), c.hidden_dim)
        for places, rows in results:
            for (rank, token), row in zip(places, rows, strict=True):
                if rank == c.rank:
                    sums[token] += row.float()
        return filled(sums.to(input.dtype), c.max_num_inp_token_per_rank), None


def shmem_get_unique_id() -> bytes:
    return b"of the first rank"


def shmem_init_attr(flags: int, rank: int, nranks: int, unique_id: bytes) -> int:
    assert flags == UNIQUE_ID and 0 <= rank < nranks and unique_id == b"of the first rank"
    CONNECTED.add((rank, nranks))
    return 0


def shmem_finalize() -> int:
    CONNECTED.clear()
    return 0


def modules() -> dict[str, ModuleType]:
    """What imports are to find, by name."""
    made: dict[str, Any] = {name: ModuleType(name) for name in ("mori", "mori.ops", "mori.shmem")}
    made["mori"].__spec__ = ModuleSpec("mori", None)
    made["mori.ops"].EpDispatchCombineConfig = EpDispatchCombineConfig
    made["mori.ops"].EpDispatchCombineOp = EpDispatchCombineOp
    made["mori.shmem"].shmem_finalize = shmem_finalize
    made["mori.shmem"].MORI_SHMEM_INIT_WITH_UNIQUEID = UNIQUE_ID
    made["mori.shmem"].shmem_get_unique_id = shmem_get_unique_id
    made["mori.shmem"].shmem_init_attr = shmem_init_attr
    return made


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports find the stand-in, and no group is connected."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(exchange, "missing", lambda: None)
    monkeypatch.setattr(exchange, "_exchanges", {})
