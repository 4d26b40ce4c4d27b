"""Tokens of one rank as a batch per expert, without communication: the reference of the format."""

from dataclasses import dataclass

from torch import Tensor

from atomc.kernels.moe.combinations.batching import batch_rows, slots_of
from atomc.kernels.moe.dispatched import ActivationFormat, Dispatched, Sent
from atomc.kernels.moe.layer import local_ids
from atomc.kernels.moe.prepare_finalize import PrepareFinalize, Receiver
from atomc.kernels.moe.weight_and_reduce import NaiveBatched, WeightAndReduce


@dataclass(frozen=True)
class _Slots(Sent):
    slots: Tensor


class BatchedReference(PrepareFinalize):
    """[L, C, H], where C is the number of tokens, or max_tokens_per_rank if given. With an expert
    map, the results are what the experts of this rank add.
    """

    name = "batched_reference"
    activation_format = ActivationFormat.BATCHED

    def __init__(
        self, expert_map: Tensor | None = None, *, max_tokens_per_rank: int | None = None
    ) -> None:
        super().__init__(expert_map)
        self.max_tokens_per_rank = max_tokens_per_rank

    def send(self, tokens: Dispatched, num_local_experts: int) -> Receiver:
        capacity = tokens.rows if self.max_tokens_per_rank is None else self.max_tokens_per_rank
        local = local_ids(tokens.ids, self.expert_map, num_local_experts)
        slots, counts = slots_of(local, num_local_experts, capacity)
        batch = batch_rows(tokens.x, slots, num_local_experts, capacity)
        scales = tokens.x_scale
        if scales is not None:
            scales = batch_rows(scales, slots, num_local_experts, capacity)
        dispatched = Dispatched(batch, scales, tokens.ids, tokens.weights, counts, _Slots(slots))
        return lambda: dispatched

    def finalize(
        self, dispatched: Dispatched, results: Tensor, weight_and_reduce: WeightAndReduce
    ) -> Tensor:
        assert isinstance(dispatched.sent, _Slots)
        reduction = weight_and_reduce.resolved(NaiveBatched(dispatched.sent.slots))
        return reduction.apply(results, dispatched.weights)
