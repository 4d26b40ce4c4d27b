"""The last step of a mixture of experts: results of k experts, times the router's weights, summed.

An Experts part says with its `finalize_weight_and_reduce` which of these `finalize` has to apply.
Products are in the promoted dtype, the sum is in fp32 and in the order of k, so that it does not
depend on the other tokens.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class WeightAndReduce(ABC):
    @abstractmethod
    def apply(self, results: Tensor, weights: Tensor) -> Tensor:
        """results of a part, weights [M, k] -> [M, H] in the dtype of results."""

    def resolved(self, choice: "WeightAndReduce") -> "WeightAndReduce":
        """What finalize applies: this, or its own choice if this delegates."""
        return self


@dataclass(frozen=True)
class NoOp(WeightAndReduce):
    """The experts part did it. results [M, H]."""

    def apply(self, results: Tensor, weights: Tensor) -> Tensor:
        return results


@dataclass(frozen=True)
class Contiguous(WeightAndReduce):
    """results [M, k, H], zeros where a choice has no expert here."""

    def apply(self, results: Tensor, weights: Tensor) -> Tensor:
        weighted = results * weights.unsqueeze(-1)
        return weighted.sum(1, dtype=torch.float32).to(results.dtype)


@dataclass(frozen=True)
class NaiveBatched(WeightAndReduce):
    """results [E, C, H]. slots [M, k] int64: the row of results.flatten(0, 1) for each choice, -1
    where there is none.
    """

    slots: Tensor

    def apply(self, results: Tensor, weights: Tensor) -> Tensor:
        return Contiguous().apply(rows_at(results.flatten(0, 1), self.slots), weights)


@dataclass(frozen=True)
class Delegate(WeightAndReduce):
    """finalize chooses, because only it knows where the results of a token are."""

    def apply(self, results: Tensor, weights: Tensor) -> Tensor:
        raise RuntimeError("Delegate computes nothing: finalize replaces it by another one")

    def resolved(self, choice: WeightAndReduce) -> WeightAndReduce:
        return choice


def rows_at(x: Tensor, index: Tensor) -> Tensor:
    """x[index], zeros where index is -1. x [N, H], index [...] int64 -> [..., H]."""
    if not len(x):
        return x.new_zeros(*index.shape, x.shape[-1])
    return x[index.clamp(min=0)].masked_fill((index < 0).unsqueeze(-1), 0)
