"""No expert parallelism: tokens stay where they are."""

from torch import Tensor

from atomc.kernels.moe.dispatched import Dispatched
from atomc.kernels.moe.prepare_finalize import PrepareFinalize, Receiver


class NoEP(PrepareFinalize):
    """Quantizes only. With an expert map, the results are what the experts of this rank add."""

    name = "no_ep"

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
