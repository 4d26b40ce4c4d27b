"""The plan of a divided model's load: the part of each stored tensor that this rank reads."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import nn

from atomc.loading.load_plan import Copy, Fill, LoadPlan, PlanEntry, QuantizeExperts
from atomc.parallel.shard_slice import ShardSlice
from atomc.weights.parameters import tensor_of


def part_of_plan(plan: LoadPlan, model: nn.Module, cuts: Mapping[str, ShardSlice]) -> LoadPlan:
    """The plan for a rank.

    plan   for the whole model
    model  on meta, whose parameters are cut
    cuts   name of a parameter -> how it is cut
    """

    def parts(entries: Iterable[PlanEntry]) -> list[PlanEntry]:
        entries_of_rank = (_part(entry, model, cuts.get(entry.names[0])) for entry in entries)
        return [entry for entry in entries_of_rank if entry is not None]

    entries = parts((*plan.fills, *plan.copies))
    return replace(
        plan,
        fills=tuple(entry for entry in entries if isinstance(entry, Fill)),
        copies=tuple(entry for entry in entries if isinstance(entry, Copy)),
        quantized=tuple(
            tuple(entry._replace(cut=cuts.get(f"{entry.layer}.weight")) for entry in group)
            for group in plan.quantized
        ),
        experts=tuple(
            QuantizeExperts(layer, tuple(parts(of_layer))) for layer, of_layer in plan.experts
        ),
    )


def _part(entry: PlanEntry, model: nn.Module, cut: ShardSlice | None) -> PlanEntry | None:
    """The part of an entry; None if another rank has it, or if it describes a full tensor."""
    owner, _, leaf = entry.names[0].rpartition(".")
    if not hasattr(model.get_submodule(owner), leaf):
        return None
    if cut is None:
        return entry
    local = tensor_of(model, entry.names[0])
    if isinstance(entry, Fill):
        return entry._replace(shape=tuple(local.shape), cut=cut)
    if entry.part is None:
        other_way_round = {0: 0, 1: 2, 2: 1}
        return entry._replace(cut=replace(cut, dim=other_way_round[cut.dim]))
    expert, first, end = entry.part
    if cut.dim == 0:
        row = cut.position(expert, len(local))
        return None if row is None else entry._replace(part=(row, first, end))
    if cut.dim > 1:
        return entry._replace(cut=replace(cut, dim=cut.dim - 1))
    # Each stored projection is a segment of the stacked rows.
    part = (expert, first // cut.parts, end // cut.parts)
    return entry._replace(part=part, cut=ShardSlice(0, cut.parts, cut.index))
