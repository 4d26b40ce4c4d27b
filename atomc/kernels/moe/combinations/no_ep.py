"""No expert parallelism: tokens stay where they are."""

from torch import Tensor

from atomc.kernels.moe.dispatched import ActivationFormat, Dispatched
from atomc.kernels.moe.prepare_finalize import PrepareFinalize, Receiver
from atomc.kernels.moe.weight_and_reduce import Contiguous, WeightAndReduce


class NoEP(PrepareFinalize):
    """Quantizes only. With an expert map, the results are what the experts of this rank add."""

    name = "no_ep"
    activation_format = ActivationFormat.STANDARD

    def send(
        self,
        codes: Tensor,
        scale: Tensor | None,
        ids: Tensor,
        weights: Tensor,
        num_local_experts: int,
    ) -> Receiver:
        dispatched = Dispatched(codes, scale, ids, weights)
        return lambda: dispatched

    def finalize(
        self, dispatched: Dispatched, results: Tensor, weight_and_reduce: WeightAndReduce
    ) -> Tensor:
        reduction = weight_and_reduce.resolved(Contiguous())
        return reduction.apply(results, dispatched.weights)
