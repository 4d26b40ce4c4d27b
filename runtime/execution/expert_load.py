"""How many tokens each expert of a mixture got, by the path of the layer's experts, where a rank
counts those of its own experts.
"""

from collections.abc import Mapping, Sequence

from torch import nn

from atomc.parallel.collectives import EXPERT_MAP

ExpertLoad = Mapping[str, Sequence[int]]


def rows_of_experts(model: nn.Module) -> ExpertLoad:
    """Where a rank has some of the experts of a layer: the row of each expert in its weights, and a
    number that is no row for those of other ranks.
    """
    suffix = f".{EXPERT_MAP}"
    return {
        name.removesuffix(suffix): rows.tolist()
        for name, rows in model.named_buffers()
        if name.endswith(suffix)
    }


def expert_counts(load: ExpertLoad, rows: ExpertLoad) -> dict[str, list[int]]:
    """What a program counted, by the ids of all experts of each layer. rows: rows_of_experts."""
    counts_by_id = {}
    for path, counts in load.items():
        # With hidden states, the model is a submodule of the program's module.
        name = path.removeprefix("module.")
        held = range(len(counts))
        counts_by_id[name] = [counts[row] if row in held else 0 for row in rows.get(name, held)]
    return counts_by_id
