"""The op moe_experts_ep computed by parts: tokens travel to the ranks of their experts."""

from typing import Unpack

from torch import Tensor

from atomc.kernels.moe.all_to_all import AllToAll
from atomc.kernels.moe.experts import ExpertsKernel
from atomc.kernels.moe.layer import ExpertsConfig, ExpertWeights
from atomc.kernels.moe.modular_experts import ModularExperts
from atomc.ops.experts import ExpertOperands, Gate
from atomc.torch_compat.process_groups import process_group as group_of


class PlacedExperts(ExpertOperands):
    """The arguments of moe_experts_ep; `ranks` is known to the group."""

    places: Tensor
    nowhere: int
    process_group: str


def sent_to_experts(
    experts: ExpertsKernel,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    places: Tensor,
    nowhere: int,
    process_group: str,
    **gate: Unpack[Gate],
) -> Tensor:
    """The op, with such experts."""
    rows, owner = places
    prepare = AllToAll(
        rows.masked_fill(rows == nowhere, -1), group=group_of(process_group), owner=owner
    )
    moe = ModularExperts(prepare, experts, ExpertsConfig(**gate))
    return moe(x, ids.int(), weights, ExpertWeights(w13, w2, b13=b13, b2=b2))
