"""Which part of a stacked parameter a stored tensor of one expert is.

Checkpoints of transformers 4 store the projections of each expert, models stack those of a layer:

    experts.3.gate_proj.weight, experts.3.w1.weight    experts.gate_up_proj[3, :I]
    experts.3.up_proj.weight, experts.3.w3.weight      experts.gate_up_proj[3, I:]
    experts.3.down_proj.weight, experts.3.w2.weight    experts.down_proj[3]

Quantized experts are read as they are stored, and stacked afterwards
(atomc.quantization.stored_experts):

    experts.3.gate_proj.qweight, experts.3.w1.qweight    experts.gate_proj.qweight[3]
"""

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch import nn

_NAME = re.compile(r"(?P<owner>.+\.experts)\.(?P<expert>\d+)\.(?P<projection>\w+)\.(?P<leaf>\w+)")
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


# Name of a projection of one expert -> that of quantized experts.
_PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


class ExpertPart(NamedTuple):
    """The rows of one projection, in `parameter` [E, rows, ...] of the model: the part with this
    position among num_parts equal ones.
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
        part = _part(modules, **match.groupdict())
        if part is not None and part.parameter not in names:
            parts[name] = part
    return parts


def _part(
    modules: Mapping[str, nn.Module], owner: str, expert: str, projection: str, leaf: str
) -> ExpertPart | None:
    stored = modules.get(f"{owner}.{_PROJECTIONS.get(projection, projection)}")
    if stored is not None and stored._parameters.get(leaf) is not None:
        parameter = f"{owner}.{_PROJECTIONS.get(projection, projection)}.{leaf}"
        return ExpertPart(parameter, int(expert), 0, 1)
    stacked, kind = _PARAMETERS[projection]
    if leaf == "weight" and _is_stacked(modules.get(owner), stacked):
        position = kind.index(projection)
        return ExpertPart(f"{owner}.{stacked}", int(expert), position, len(kind))
    return None


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
    expected: dict[str, None] = {}
    parameters = set()
    for name, part in parts.items():
        match = _NAME.fullmatch(name)
        assert match is not None
        projection = match["projection"]
        kind = _PARAMETERS[projection][1] if part.num_parts > 1 else (projection,)
        if part.parameter not in parameters:
            parameters.add(part.parameter)
            expected |= {
                f"{match['owner']}.{expert}.{other}.{match['leaf']}": None
                for expert in range(len(model.get_parameter(part.parameter)))
                for other in kind
            }
    return [name for name in expected if name not in parts]
