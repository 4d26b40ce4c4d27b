"""No expert parallelism: tokens stay where they are."""

from atomc.kernels.moe.dispatched import Dispatched
from atomc.kernels.moe.prepare_finalize import PrepareFinalize, Receiver


class NoEP(PrepareFinalize):
    """Quantizes only. With an expert map, the results are what the experts of this rank add."""

    name = "no_ep"

    def send(self, tokens: Dispatched, num_local_experts: int) -> Receiver:
        return lambda: tokens
