"""No expert parallelism: tokens stay where they are."""

from torch import Tensor

from atomc.kernels.moe.dispatched import ActivationFormat, Dispatched
from atomc.kernels.moe.prepare_finalize import PrepareFinalize, Receiver, quantized
from atomc.kernels.moe.schemes import ExpertsScheme
from atomc.kernels.moe.weight_and_reduce import Contiguous, Delegate, WeightAndReduce


class NoEP(PrepareFinalize):
    """Quantizes only. With an expert map, the results are what the experts of this rank add."""

    name = "no_ep"
    activation_format = ActivationFormat.STANDARD

    def prepare_no_receive(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        ids: Tensor,
        weights: Tensor,
        num_local_experts: int,
        scheme: ExpertsScheme,
    ) -> Receiver:
        dispatched = Dispatched(*quantized(x, x_scale, scheme), ids, weights)
        return lambda: dispatched

    def finalize(
        self, dispatched: Dispatched, results: Tensor, weight_and_reduce: WeightAndReduce
    ) -> Tensor:
        reduction = Delegate.resolve(weight_and_reduce, Contiguous())
        return reduction.apply(results, dispatched.weights)
