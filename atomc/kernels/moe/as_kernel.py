"""The op moe_experts_ep computed by parts: tokens travel to the ranks of their experts."""

from torch import Tensor

from atomc.kernels.moe.all_to_all import AllToAll
from atomc.kernels.moe.experts import ExpertsKernel
from atomc.kernels.moe.layer import ExpertsConfig, ExpertWeights
from atomc.kernels.moe.modular_experts import ModularExperts
from atomc.ops.experts import Gate
from atomc.torch_compat.process_groups import process_group as group_of


def sent_to_experts(
    experts: ExpertsKernel,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    places: Tensor,
    of_experts: ExpertWeights,
    nowhere: int,
    process_group: str,
    gate: Gate,
) -> Tensor:
    """Arguments as in the op. x [T, H] -> [T, H]."""
    rows, owner = places
    prepare = AllToAll(
        rows.masked_fill(rows == nowhere, -1), group=group_of(process_group), owner=owner
    )
    moe = ModularExperts(prepare, experts, ExpertsConfig(**gate))
    return moe(x, ids.int(), weights, of_experts)
