"""Each token travels to the ranks that have its experts, once to each, and their sums travel back.

x, ids, weights > all-to-all of sizes, then of rows > experts of this rank > all-to-all > sum
"""

from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from atomc.kernels.moe.collectives import Pending
from atomc.kernels.moe.dispatched import Dispatched, Sent
from atomc.kernels.moe.placement import placement
from atomc.kernels.moe.prepare_finalize import ExchangeOfRanks, Receiver
from atomc.kernels.moe.weight_and_reduce import WeightAndReduce, rows_at


@dataclass(frozen=True)
class _Rows(Sent):
    """slots           [T, ranks] int64: which of the rows sent is token t to rank r; -1: none
    sent, received  numbers of rows to and from each rank
    """

    slots: Tensor
    sent: list[int]
    received: list[int]


class AllToAll(ExchangeOfRanks):
    """The sizes are read on the host: it cannot be captured in a CUDA graph. A token that no rank
    has experts for is not sent, and its result is zero. Each rank rounds its sum for a token to the
    dtype of the results; the sums are added in fp32, in the order of ranks.
    """

    name = "all_to_all"
    topk_indices_dtype = torch.int32  # all ranks send the same

    def __init__(
        self, expert_map: Tensor, *, group: distributed.ProcessGroup | None = None
    ) -> None:
        super().__init__(expert_map, group=group)
        self.owner = placement(self.name, expert_map, self.ranks).owner  # [E] int64

    def send(self, tokens: Dispatched, num_local_experts: int) -> Receiver:
        wanted = self._wanted(tokens.ids)
        counts = wanted.sum(0)
        sizes = torch.stack((counts, self.ranks.all_to_all(counts)())).tolist()
        sent, received = sizes
        token = wanted.t().nonzero()[:, 1]  # by rank, then by token
        # The numbers of True before each, by rank; cumsum counts the one itself.
        order = wanted.t().flatten().cumsum(0).view(self.ranks.size, -1).t() - 1
        record = _Rows(order.masked_fill(~wanted, -1), sent, received)

        def exchange(rows: Tensor) -> Pending:
            return self.ranks.all_to_all(rows[token], received, sent)

        pending = [exchange(rows) for rows in (tokens.x, tokens.ids, tokens.weights)]
        scales = None if tokens.x_scale is None else exchange(tokens.x_scale)

        def receive() -> Dispatched:
            x, ids, weights = (wait() for wait in pending)
            return Dispatched(x, None if scales is None else scales(), ids, weights, sent=record)

        return receive

    def finalize(
        self, dispatched: Dispatched, results: Tensor, weight_and_reduce: WeightAndReduce
    ) -> Tensor:
        record = dispatched.sent
        assert isinstance(record, _Rows)
        sums = super().finalize(dispatched, results, weight_and_reduce)
        back = self.ranks.all_to_all(sums, record.sent, record.received)()
        return rows_at(back, record.slots).sum(1, dtype=torch.float32).to(results.dtype)

    def _wanted(self, ids: Tensor) -> Tensor:
        """Whether a token has an expert of a rank. [T, k] -> [T, ranks] bool."""
        valid = (ids >= 0) & (ids < len(self.owner))
        owner = self.owner[ids.clamp(0, len(self.owner) - 1).long()]
        ranks = self.ranks.size  # also the column of what has no owner
        wanted = ids.new_zeros(len(ids), ranks + 1, dtype=torch.bool)
        return wanted.scatter_(1, owner.masked_fill(~valid, ranks), True)[:, :ranks]
