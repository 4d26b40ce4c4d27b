"""The part of a mixture of experts in the middle: permute, product with w13, gate, quantize,
product with w2, unpermute.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from atomc.kernels.moe.dispatched import ActivationFormat, Dispatched
from atomc.kernels.moe.layer import ExpertsConfig, ExpertWeights, RankExperts
from atomc.kernels.moe.schemes import ALL_SCHEMES
from atomc.kernels.moe.weight_and_reduce import Delegate, NoOp, WeightAndReduce

Spaces = tuple[Tensor, Tensor]  # workspace13 and workspace2


class Sizes(NamedTuple):
    """rows: M of a chunk in the standard format, C in the batched one."""

    rows: int
    choices: int
    experts: int
    hidden: int
    inner: int


class WorkspaceShapes(NamedTuple):
    """Shapes of the two workspaces, of which the first holds what is computed with w13, and of the
    output. All three are in the dtype of the results.
    """

    workspace13: tuple[int, ...]
    workspace2: tuple[int, ...]
    output: tuple[int, ...]


class ExpertsKernel(ABC):
    """Letters as in atomc.kernels.moe.dispatched.

    activation_formats   of input and output; here the standard format
    schemes              names of the quantization schemes that it computes
    supports_chunking    whether rows may come in several calls of apply
    supports_expert_map  whether ids may be those of all ranks' experts; the batched format has none
    """

    name: ClassVar[str]
    activation_formats = (ActivationFormat.STANDARD, ActivationFormat.STANDARD)
    schemes: ClassVar[tuple[str, ...]] = ALL_SCHEMES
    supports_chunking = True
    supports_expert_map = True

    @staticmethod
    def missing(device: torch.device) -> str | None:
        """Why this machine cannot run it on such a device, as a sentence; or None."""
        return None

    def refuse_config(self, config: ExpertsConfig) -> str | None:
        """Why it cannot compute this, beside the name of the scheme, as a sentence; or None."""
        return None

    def prepare_weights(self, weights: ExpertWeights, config: ExpertsConfig) -> ExpertWeights:
        """The weights in the layout that apply reads: made once, and held instead of the others."""
        return weights

    def workspace_shapes(self, sizes: Sizes) -> WorkspaceShapes:
        """What apply needs for so many rows; here for results of tokens, without workspaces."""
        return WorkspaceShapes((0,), (0,), (sizes.rows, sizes.hidden))

    @abstractmethod
    def apply(
        self, output: Tensor, spaces: Spaces, dispatched: Dispatched, experts: RankExperts
    ) -> None:
        """Writes the results to output. The contents of the workspaces are undefined before and
        after.
        """

    def finalize_weight_and_reduce(self) -> WeightAndReduce:
        """What finalize has to do with the output: nothing for results of tokens."""
        return NoOp()


class BatchedExperts(ExpertsKernel):
    """Experts of the batched format, whose results finalize weights and sums."""

    activation_formats = (ActivationFormat.BATCHED, ActivationFormat.BATCHED)
    supports_chunking = False
    supports_expert_map = False

    def workspace_shapes(self, sizes: Sizes) -> WorkspaceShapes:
        return WorkspaceShapes((0,), (0,), (sizes.experts, sizes.rows, sizes.hidden))

    def finalize_weight_and_reduce(self) -> WeightAndReduce:
        return Delegate()
