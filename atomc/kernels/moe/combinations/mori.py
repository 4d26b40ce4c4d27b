"""Each token travels to the ranks that have its experts by MORI, AMD's library for GPUs of one
host.
"""

import torch
from torch import Tensor, distributed

from atomc.kernels.moe.collectives import Ranks
from atomc.kernels.moe.dispatched import Dispatched
from atomc.kernels.moe.layer import local_ids
from atomc.kernels.moe.placement import placement
from atomc.kernels.moe.prepare_finalize import PrepareFinalize, Receiver
from atomc.kernels.moe.weight_and_reduce import WeightAndReduce
from atomc.kernels.mori.exchange import connect, exchange_of
from atomc.torch_compat.process_groups import process_group

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz)


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
    max_tokens_per_rank: int

    def __init__(
        self,
        expert_map: Tensor,
        *,
        max_tokens_per_rank: int,
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        """Raises ValueError where MORI is not installed."""
        self.ranks = Ranks(self.name, group)
        connect(process_group(self.ranks.group_name))
        self.exchange = exchange_of(self.ranks.group_name)
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

    def send(self, tokens: Dispatched, num_local_experts: int) -> Receiver:
        if tokens.x.dtype not in DTYPES:
            raise ValueError(f"mori sends fp32, bf16 and fp8, not {tokens.x.dtype}")
        slots = local_ids(tokens.ids, self.slot, num_local_experts)
        received = self.exchange.dispatch(
            tokens.x,
            tokens.x_scale,
            tokens.weights,
            slots.masked_fill(slots < 0, self.no_expert),
            self.slots,
            most_tokens=self.max_tokens_per_rank,
            bytes_of_results=torch.float32.itemsize,
        )

        def receive() -> Dispatched:
            rows = torch.arange(len(received.x), device=received.x.device)
            ids = received.slots.masked_fill(rows[:, None] >= received.used, -1)
            return Dispatched(received.x, received.scales, ids, received.weights)

        return receive

    def finalize(
        self, dispatched: Dispatched, results: Tensor, weight_and_reduce: WeightAndReduce
    ) -> Tensor:
        return self.exchange.combine(super().finalize(dispatched, results, weight_and_reduce))
