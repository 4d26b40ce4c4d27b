"""Which part of a stacked parameter a stored tensor of one expert is.

Checkpoints of transformers 4 store the projections of each expert, models stack those of a layer:

    experts.3.gate_proj.weight, experts.3.w1.weight    experts.gate_up_proj[3, :I]
    experts.3.up_proj.weight, experts.3.w3.weight      experts.gate_up_proj[3, I:]
    experts.3.down_proj.weight, experts.3.w2.weight    experts.down_proj[3]
"""

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch import nn

_NAME = re.compile(r"(?P<owner>.+\.experts)\.(?P<expert>\d+)\.(?P<projection>\w+)\.weight")
# Stacked parameter -> the projections whose rows it has, by their names in each kind of checkpoint.
STACKED = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
_PARAMETERS = {
    projection: (parameter, kind)
    for parameter, kinds in STACKED.items()
    for kind in kinds
    for projection in kind
}


class ExpertPart(NamedTuple):
    """The rows of one projection, in `parameter` [E, rows, columns] of the model: the part with
    this position among num_parts equal ones.
    """

    parameter: str
    expert: int
    position: int
    num_parts: int


def expert_parts(model: nn.Module, names: Collection[str]) -> dict[str, ExpertPart]:
    """Stored name -> part, for the names that are projections of an expert of this model."""
    modules = dict(model.named_modules())
    parts = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None or match["projection"] not in _PARAMETERS:
            continue
        leaf, kind = _PARAMETERS[match["projection"]]
        parameter = f"{match['owner']}.{leaf}"
        if _is_stacked(modules.get(match["owner"]), leaf) and parameter not in names:
            position = kind.index(match["projection"])
            parts[name] = ExpertPart(parameter, int(match["expert"]), position, len(kind))
    return parts


def _is_stacked(module: nn.Module | None, leaf: str) -> bool:
    """Whether the parameter has the rows of gate over those of up, each as a stored expert has it.
    transformers marks other layouts.
    """
    parameter = None if module is None else module._parameters.get(leaf)
    return (
        parameter is not None
        and parameter.dim() == 3
        and leaf not in getattr(module, "STORED_TRANSPOSED", ())
        and not getattr(module, "is_transposed", False)
        and getattr(module, "is_concatenated", True)
    )


def wrong_numbers_of_experts(model: nn.Module, parts: Mapping[str, ExpertPart]) -> list[str]:
    """A sentence for each parameter that has more or fewer experts than the checkpoint."""
    last: dict[str, int] = {}
    for part in parts.values():
        last[part.parameter] = max(part.expert, last.get(part.parameter, 0))
    return [
        f"{name} has {expert + 1} experts, expected {len(model.get_parameter(name))}"
        for name, expert in last.items()
        if len(model.get_parameter(name)) != expert + 1
    ]


def absent_parts(model: nn.Module, parts: Mapping[str, ExpertPart]) -> list[str]:
    """The stored names that are missing beside these for parameters to be complete."""
    kinds = {}
    for name, part in parts.items():
        match = _NAME.fullmatch(name)
        assert match is not None
        kinds[part.parameter] = (match["owner"], _PARAMETERS[match["projection"]][1])
    expected = [
        f"{owner}.{expert}.{projection}.weight"
        for parameter, (owner, kind) in kinds.items()
        for expert in range(len(model.get_parameter(parameter)))
        for projection in kind
    ]
    return [name for name in expected if name not in parts]
