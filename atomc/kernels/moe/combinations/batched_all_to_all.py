"""Tokens travel to the ranks of their experts in batches of fixed size, so that no rank has to know
sizes before it sends, and nothing waits for the host.

    [E, m, H] > all-to-all > [ranks, L, m, H] > rows of an expert to the front > [L, ranks * m, H]
    [L, ranks * m, H] > rows back to their places > all-to-all > [E, m, H] > weights, sum

m is max_tokens_per_rank. Unused rows travel, too: it is for few tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from atomc.kernels.moe.collectives import Pending
from atomc.kernels.moe.combinations.batching import batch_rows, slots_of
from atomc.kernels.moe.dispatched import ActivationFormat, Dispatched, Sent
from atomc.kernels.moe.layer import local_ids
from atomc.kernels.moe.placement import placement
from atomc.kernels.moe.prepare_finalize import ExchangeOfRanks, Receiver
from atomc.kernels.moe.weight_and_reduce import NaiveBatched, WeightAndReduce


@dataclass(frozen=True)
class _Batch(Sent):
    """slots  [T, k] int64: rows of the batch that was sent, flat
    order  [L, ranks * m] int64: which row that was received became which one
    """

    slots: Tensor
    order: Tensor


class BatchedAllToAll(ExchangeOfRanks):
    """All ranks have the same number of experts, and the same max_tokens_per_rank. The router's
    weights stay with their tokens: the result of each expert travels back.
    """

    name = "batched_all_to_all"
    activation_format = ActivationFormat.BATCHED
    max_tokens_per_rank: int

    def __init__(
        self,
        expert_map: Tensor,
        *,
        max_tokens_per_rank: int,
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        super().__init__(expert_map, max_tokens_per_rank=max_tokens_per_rank, group=group)
        placed = placement(self.name, expert_map, self.ranks)
        if len(set(placed.held)) > 1:
            raise ValueError(
                f"{self.name} sends the same number of rows to each rank, which have "
                f"{list(placed.held)} experts: use all_to_all"
            )
        # Where an expert is if experts are sorted by rank, as the batch that is sent has them.
        self.position = placed.owner * placed.held[0] + placed.row

    def send(self, tokens: Dispatched, num_local_experts: int) -> Receiver:
        experts, capacity = len(self.position), self.max_tokens_per_rank
        slots, counts = slots_of(local_ids(tokens.ids, self.position, experts), experts, capacity)

        def exchange(rows: Tensor) -> Pending:
            return self.ranks.all_to_all(batch_rows(rows, slots, experts, capacity))

        received_counts = self.ranks.all_to_all(counts)
        received = exchange(tokens.x)
        received_scales = None if tokens.x_scale is None else exchange(tokens.x_scale)

        def receive() -> Dispatched:
            by_rank = received_counts().view(self.ranks.size, -1)  # [ranks, L]
            row = torch.arange(capacity, device=by_rank.device)
            used = (row < by_rank.unsqueeze(-1)).transpose(0, 1).flatten(1)  # [L, ranks * m]
            order = (~used).to(torch.uint8).argsort(dim=1, stable=True)
            return Dispatched(
                _reordered(self._by_expert(received()), order),
                None
                if received_scales is None
                else _reordered(self._by_expert(received_scales()), order),
                tokens.ids,
                tokens.weights,
                by_rank.sum(0, dtype=torch.int32),
                _Batch(slots, order),
            )

        return receive

    def finalize(
        self, dispatched: Dispatched, results: Tensor, weight_and_reduce: WeightAndReduce
    ) -> Tensor:
        record = dispatched.sent
        assert isinstance(record, _Batch)
        in_places = _reordered(results, record.order.argsort(1))
        experts, _, width = results.shape
        by_rank = in_places.view(experts, self.ranks.size, -1, width).transpose(0, 1)
        back = self.ranks.all_to_all(by_rank.flatten(0, 1))()  # [E, m, H]
        reduction = weight_and_reduce.resolved(NaiveBatched(record.slots))
        return reduction.apply(back, dispatched.weights)

    def _by_expert(self, received: Tensor) -> Tensor:
        """[ranks * L, m, W] -> [L, ranks * m, W]."""
        by_rank = received.view(self.ranks.size, -1, *received.shape[1:])
        return by_rank.transpose(0, 1).flatten(1, 2)


def _reordered(x: Tensor, order: Tensor) -> Tensor:
    """x[e, order[e, c]] for each expert and row. x [L, C, W], order [L, C]."""
    expert = torch.arange(len(x), device=x.device).unsqueeze(1)
    return x[expert, order]
