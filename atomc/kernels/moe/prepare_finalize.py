"""The part of a mixture of experts before and after the experts: quantize and dispatch, combine."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, distributed

from atomc.kernels.moe.collectives import Ranks
from atomc.kernels.moe.dispatched import ActivationFormat, Dispatched
from atomc.kernels.moe.schemes import ALL_SCHEMES, ExpertsScheme
from atomc.kernels.moe.weight_and_reduce import Contiguous, WeightAndReduce

Receiver = Callable[[], Dispatched]


class PrepareFinalize(ABC):
    """Letters as in atomc.kernels.moe.dispatched.

    activation_format    what prepare returns; here the standard format
    schemes              names of the quantization schemes that it can dispatch
    topk_indices_dtype   the dtype that ids must have, or None: int32 and int64
    max_tokens_per_rank  the most tokens of one call on any rank, or None: any number
    num_dispatchers      how many ranks send to this one; a batch has C = num_dispatchers *
                         max_tokens_per_rank rows per expert
    expert_map           [E] int32 or int64: id of an expert -> its row in the weights of this rank,
                         -1 if another rank has it; None: this rank has all
    """

    name: ClassVar[str]
    activation_format = ActivationFormat.STANDARD
    schemes: ClassVar[tuple[str, ...]] = ALL_SCHEMES
    topk_indices_dtype: ClassVar[torch.dtype | None] = None
    max_tokens_per_rank: int | None = None
    num_dispatchers: int = 1

    def __init__(self, expert_map: Tensor | None = None) -> None:
        self.expert_map = expert_map
        self.num_local_experts = None if expert_map is None else int((expert_map >= 0).sum())

    def prepare_no_receive(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        ids: Tensor,
        weights: Tensor,
        num_local_experts: int,
        scheme: ExpertsScheme,
    ) -> Receiver:
        """Quantizes and sends. The caller may compute something else before it calls the receiver,
        which waits for the rows of other ranks.

        x, x_scale    [T, H] and None; or codes that are quantized already and [T, S]
        ids, weights  [T, k]
        """
        codes, scale = scheme.quantize(x) if x_scale is None else (x, x_scale)
        return self.send(Dispatched(codes, scale, ids, weights), num_local_experts)

    @abstractmethod
    def send(self, tokens: Dispatched, num_local_experts: int) -> Receiver:
        """prepare_no_receive of the tokens of this rank as the scheme made them: codes [T, H] and
        scales [T, S], or x and None.
        """

    def prepare(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        ids: Tensor,
        weights: Tensor,
        num_local_experts: int,
        scheme: ExpertsScheme,
    ) -> Dispatched:
        """prepare_no_receive, and waits."""
        return self.prepare_no_receive(x, x_scale, ids, weights, num_local_experts, scheme)()

    def finalize(
        self, dispatched: Dispatched, results: Tensor, weight_and_reduce: WeightAndReduce
    ) -> Tensor:
        """Results of the experts -> [T, H] of the tokens of this rank, in the dtype of results.
        Here the sums of the rows that the experts received; parts that sent tokens bring them back.
        """
        return weight_and_reduce.resolved(Contiguous()).apply(results, dispatched.weights)


class ExchangeOfRanks(PrepareFinalize):
    """A part that sends tokens to other ranks of a group; None: all processes."""

    def __init__(
        self,
        expert_map: Tensor,
        *,
        max_tokens_per_rank: int | None = None,
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        super().__init__(expert_map)
        self.max_tokens_per_rank = max_tokens_per_rank
        self.ranks = Ranks(self.name, group)
        self.num_dispatchers = self.ranks.size
