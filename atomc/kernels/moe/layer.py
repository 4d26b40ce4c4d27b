"""The experts of a layer: what they compute, and their weights."""

from dataclasses import dataclass, field

from torch import Tensor

from atomc.kernels.moe.schemes import ExpertsScheme, Unquantized
from atomc.ops.experts import Gate, gated


@dataclass(frozen=True)
class ExpertsConfig:
    """What the experts of a layer compute; activation, interleaved, alpha and limit as in
    atomc.ops.experts.gated.

    weight_on_input  the router's weight multiplies the input of an expert, not its result; k is 1
    """

    scheme: ExpertsScheme = field(default_factory=Unquantized)
    activation: str = "silu"
    interleaved: bool = False
    alpha: float = 1.702
    limit: float | None = None
    weight_on_input: bool = False

    @property
    def gate(self) -> Gate:
        return {
            "activation": self.activation,
            "interleaved": self.interleaved,
            "alpha": self.alpha,
            "limit": self.limit,
        }

    def gated(self, h: Tensor) -> Tensor:
        """h [..., 2I] -> [..., I]."""
        return gated(h, **self.gate)


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of the experts of a rank, as in atomc.ops.experts and atomc.ops.scaled_experts.

    w13, w2              [L, 2I, H] and [L, H, I]
    w13_scale, w2_scale  of quantized schemes, else None
    b13, b2              [L, 2I] and [L, H], or None
    """

    w13: Tensor
    w2: Tensor
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    b13: Tensor | None = None
    b2: Tensor | None = None

    @property
    def num_experts(self) -> int:
        """L."""
        return len(self.w13)


def local_ids(ids: Tensor, expert_map: Tensor | None, num_experts: int) -> Tensor:
    """Rows of the weights of this rank, -1 for experts of other ranks and ids of no expert.

    ids [M, k] -> [M, k] int64. num_experts: L.
    """
    count = num_experts if expert_map is None else len(expert_map)
    inside = (ids >= 0) & (ids < count)
    local = ids.clamp(0, count - 1).long()
    if expert_map is not None:
        local = expert_map[local].long()
    return local.masked_fill(~inside, -1)


@dataclass(frozen=True)
class RankExperts:
    """The experts of a rank: their weights in the layout that they read, and what they compute.

    expert_map  as in PrepareFinalize; None: ids are those of this rank
    """

    weights: ExpertWeights
    expert_map: Tensor | None
    config: ExpertsConfig

    def local_ids(self, ids: Tensor) -> Tensor:
        """Rows of the weights, [M, k] int64; -1 for other experts. ids [M, k]."""
        return local_ids(ids, self.expert_map, self.weights.num_experts)
