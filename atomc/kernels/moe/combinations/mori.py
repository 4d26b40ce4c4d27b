"""Each token travels to the ranks that have its experts by MORI, AMD's library for GPUs of one
host.
"""

import functools
import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, distributed

from atomc.kernels.moe.collectives import Ranks
from atomc.kernels.moe.dispatched import Dispatched, Sent
from atomc.kernels.moe.layer import local_ids
from atomc.kernels.moe.placement import placement
from atomc.kernels.moe.prepare_finalize import PrepareFinalize, Receiver
from atomc.kernels.moe.weight_and_reduce import WeightAndReduce

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@dataclass(frozen=True)
class _Tokens(Sent):
    """The operator, the ids that it was given, and the number of tokens."""

    operator: Any
    ids: Tensor
    tokens: int


class Mori(PrepareFinalize):
    """Rows travel once to each rank, into buffers of ranks * max_tokens_per_rank rows, of which the
    device alone knows how many are used: nothing waits for the host. Each rank rounds its sum for a
    token to the dtype of the results; MORI adds them in fp32.

    MORI finds the rank of an expert by division. Ids are therefore sent as slots, the same number
    for each rank, of which the last is no expert; `expert_map` is about slots.
    """

    name = "mori"
    schemes = ("none", "fp8", "fp8_block")
    topk_indices_dtype = torch.int32

    def __init__(
        self,
        expert_map: Tensor,
        *,
        max_tokens_per_rank: int,
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        """Raises ValueError where MORI is not installed."""
        self.ranks = Ranks(self.name, group)
        self.library = library()
        placed = placement(self.name, expert_map, self.ranks)
        self.slots = max(placed.held) + 1
        self.slot = placed.owner * self.slots + placed.row
        first, held = self.ranks.rank * self.slots, placed.held[self.ranks.rank]
        of_slots = expert_map.new_full((self.ranks.size * self.slots,), -1)
        of_slots[first : first + held] = torch.arange(held, device=expert_map.device)
        super().__init__(of_slots)
        self.no_expert = first + self.slots - 1
        self.max_tokens_per_rank = max_tokens_per_rank
        self.num_dispatchers = self.ranks.size
        self._operators: dict[tuple[object, ...], Any] = {}
        _connect(self.ranks.group_name)

    def send(self, tokens: Dispatched, num_local_experts: int) -> Receiver:
        slots = local_ids(tokens.ids, self.slot, num_local_experts)
        slots = slots.masked_fill(slots < 0, self.no_expert).int()
        operator = self._operator(tokens.x, tokens.x_scale, tokens.ids.shape[1])
        rows, row_weights, row_scale, row_slots, used = operator.dispatch(
            tokens.x.contiguous(),
            tokens.weights.float().contiguous(),
            None if tokens.x_scale is None else tokens.x_scale.contiguous(),
            slots,
        )

        def receive() -> Dispatched:
            unused = torch.arange(len(rows), device=rows.device)[:, None] >= used
            return Dispatched(
                rows,
                row_scale,
                row_slots.masked_fill(unused, -1),
                row_weights,
                sent=_Tokens(operator, slots, tokens.rows),
            )

        return receive

    def finalize(
        self, dispatched: Dispatched, results: Tensor, weight_and_reduce: WeightAndReduce
    ) -> Tensor:
        record = dispatched.sent
        assert isinstance(record, _Tokens)
        sums = super().finalize(dispatched, results, weight_and_reduce).contiguous()
        added, _ = record.operator.combine(sums, None, record.ids)
        out: Tensor = added[: record.tokens].clone()  # of memory that the next call writes
        return out

    def _operator(self, codes: Tensor, scale: Tensor | None, choices: int) -> Any:
        """MORI's buffers for such rows, made once: a collective call."""
        if codes.dtype not in DTYPES:
            raise ValueError(f"mori sends fp32, bf16 and fp8, not {codes.dtype}")
        width, scales = codes.shape[1], 0 if scale is None else scale.shape[1]
        key = (codes.dtype, width, scales, choices)
        if key not in self._operators:
            config = self.library.EpDispatchCombineConfig(
                data_type=codes.dtype,
                rank=self.ranks.rank,
                world_size=self.ranks.size,
                hidden_dim=width,
                scale_dim=scales,
                scale_type_size=torch.float32.itemsize,
                max_token_type_size=torch.float32.itemsize,  # results may be in fp32
                max_num_inp_token_per_rank=self.max_tokens_per_rank,
                num_experts_per_rank=self.slots,
                num_experts_per_token=choices,
            )
            self._operators[key] = self.library.EpDispatchCombineOp(config)
        return self._operators[key]


def library() -> ModuleType:
    """mori.ops. Raises ValueError where it cannot be imported."""
    try:
        return importlib.import_module("mori.ops")
    except Exception as error:  # of many types: it looks for HIP
        raise ValueError(
            f"mori cannot be imported ({type(error).__name__}: {error}): it is for AMD GPUs "
            "(pip install amd-mori); all_to_all sends by torch.distributed"
        ) from error


@functools.cache
def _connect(group_name: str) -> None:
    """Let the ranks of a group write into each other's memory."""
    importlib.import_module("mori.shmem").shmem_torch_process_group_init(group_name)
