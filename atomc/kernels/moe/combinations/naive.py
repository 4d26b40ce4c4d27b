"""Every rank receives all tokens, and adds what its own experts give for them.

x, ids, weights of each rank > all-gather > experts of this rank > reduce-scatter
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc.kernels.moe.collectives import Pending
from atomc.kernels.moe.dispatched import Dispatched, Sent
from atomc.kernels.moe.prepare_finalize import ExchangeOfRanks, Receiver
from atomc.kernels.moe.weight_and_reduce import WeightAndReduce


@dataclass(frozen=True)
class _Tokens(Sent):
    of_this_rank: int


class Naive(ExchangeOfRanks):
    """Collectives need equal shapes: each rank sends max_tokens_per_rank rows, or, if that is None,
    as many as the rank with the most tokens, which the ranks tell each other first. Rows without a
    token have the ids -1. Sums of ranks are added in the dtype of the results.
    """

    name = "naive"
    topk_indices_dtype = torch.int32  # all ranks send the same

    def send(self, tokens: Dispatched, num_local_experts: int) -> Receiver:
        missing = self._most(tokens.ids) - tokens.rows

        def gather(rows: Tensor, fill: int = 0) -> Pending:
            raw = rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows
            padded = F.pad(raw, (0, 0, 0, missing), value=fill)
            return self.ranks.all_gather(padded.view(rows.dtype))

        sent = gather(tokens.x), gather(tokens.ids, -1), gather(tokens.weights)
        scales = None if tokens.x_scale is None else gather(tokens.x_scale)

        def receive() -> Dispatched:
            x, ids, weights = (pending() for pending in sent)
            x_scale = None if scales is None else scales()
            return Dispatched(x, x_scale, ids, weights, sent=_Tokens(tokens.rows))

        return receive

    def finalize(
        self, dispatched: Dispatched, results: Tensor, weight_and_reduce: WeightAndReduce
    ) -> Tensor:
        assert isinstance(dispatched.sent, _Tokens)
        added = super().finalize(dispatched, results, weight_and_reduce)
        return self.ranks.reduce_scatter(added)[: dispatched.sent.of_this_rank]

    def _most(self, ids: Tensor) -> int:
        if self.max_tokens_per_rank is not None:
            return self.max_tokens_per_rank
        own = torch.tensor([len(ids)], device=ids.device)
        return int(self.ranks.all_gather(own)().max())
