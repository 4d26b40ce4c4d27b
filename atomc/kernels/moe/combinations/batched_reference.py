"""Tokens of one rank as a batch per expert, without communication: the reference of the format."""

from dataclasses import dataclass

from torch import Tensor

from atomc.kernels.moe.combinations.batching import batch_rows, slots_of
from atomc.kernels.moe.dispatched import ActivationFormat, Dispatched, Sent
from atomc.kernels.moe.experts import local_ids
from atomc.kernels.moe.prepare_finalize import PrepareFinalize, Receiver, quantized
from atomc.kernels.moe.schemes import ExpertsScheme
from atomc.kernels.moe.weight_and_reduce import Delegate, NaiveBatched, WeightAndReduce


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

    def prepare_no_receive(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        ids: Tensor,
        weights: Tensor,
        num_local_experts: int,
        scheme: ExpertsScheme,
    ) -> Receiver:
        codes, scale = quantized(x, x_scale, scheme)
        capacity = len(x) if self.max_tokens_per_rank is None else self.max_tokens_per_rank
        local = local_ids(ids, self.expert_map, num_local_experts)
        slots, counts = slots_of(local, num_local_experts, capacity)
        batch = batch_rows(codes, slots, num_local_experts, capacity)
        scales = None if scale is None else batch_rows(scale, slots, num_local_experts, capacity)
        dispatched = Dispatched(batch, scales, ids, weights, counts, _Slots(slots))
        return lambda: dispatched

    def finalize(
        self, dispatched: Dispatched, results: Tensor, weight_and_reduce: WeightAndReduce
    ) -> Tensor:
        assert isinstance(dispatched.sent, _Slots)
        reduction = Delegate.resolve(weight_and_reduce, NaiveBatched(dispatched.sent.slots))
        return reduction.apply(results, dispatched.weights)
