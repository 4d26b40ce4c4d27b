"""Which stored tensor goes into which parameter of a model, decided from names and headers before
any weight is read.

A plan is a value: it holds files, names, shapes and dtypes, and no tensor. atomc.models.loader
makes and executes it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from atomc.models.cache_scales import CacheScale, cache_scales
from atomc.models.limits import Stored
from atomc.quantization import apply
from atomc.quantization.linear import LinearMethod

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Of quantized weights; these are never converted.
CODES = {
    torch.float8_e4m3fn: ("F8_E4M3",),
    torch.int8: ("I8",),
    torch.uint8: ("U8", "F8_E8M0"),
    torch.int32: ("I32",),
    torch.int64: ("I64",),
}
# Old Llama checkpoints store the rotary frequencies; heads for multi-token prediction are no part
# of the model. Queries are not kept in fp8, and what keeps no state needs no scales for it.
IGNORED = re.compile(r"rotary_emb\.inv_freq$|^(hf_model\.)?(model\.)?mtp\.|\.(q|k|v|kv)_scale$")


class Fill(NamedTuple):
    """A stored tensor that becomes a parameter in this dtype and shape. A tied parameter has
    several names.
    """

    names: tuple[str, ...]
    stored: Stored
    dtype: torch.dtype
    shape: tuple[int, ...]


class Quantize(NamedTuple):
    """A stored weight, converted to this dtype, from which a linear layer is quantized."""

    layer: str
    stored: Stored
    dtype: torch.dtype


class Scale(NamedTuple):
    """A stored scale of a cache in fp8, under the name that it has in the model, and the buffers
    that it becomes.
    """

    name: str
    stored: Stored
    target: CacheScale


@dataclass(frozen=True)
class LoadPlan:
    """All that is read from the checkpoint in `path`, and what becomes of it.

    fills      read by several threads, in any order
    quantized  groups of layers with a common input: each is read and quantized before the next
    skipped    stored names that are no part of the model, and are not read
    """

    path: Path
    fills: tuple[Fill, ...]
    quantized: tuple[tuple[Quantize, ...], ...]
    scales: tuple[Scale, ...]
    skipped: tuple[str, ...]


def plan_load(
    model: nn.Module,
    stored: Mapping[str, Stored],
    path: Path,
    dtype: torch.dtype,
    online: Mapping[str, LinearMethod] | None = None,
) -> LoadPlan:
    """The plan for a model on meta and the tensors of the checkpoint in `path`, by the names that
    the model has for them.

    dtype   of the weights that are quantized while loading
    online  these linear layers, of which the checkpoint has plain weights

    Raises ValueError that lists all that does not fit.
    """
    scales = cache_scales(model, stored)
    weights = {name: tensor for name, tensor in stored.items() if name not in scales}
    # A tied parameter may be stored under each of its names: the first is read.
    sources = {
        names: name
        for names in parameter_names(model)
        for name in reversed(names)
        if name in weights
    }
    skipped = _checked(model, weights, sources, path)
    groups = apply.groups(online or {})
    streamed = {(f"{layer}.weight",) for group in groups for layer, _ in group}
    return LoadPlan(
        path,
        fills=tuple(
            _fill(model, names, weights[name])
            for names, name in sources.items()
            if names not in streamed
        ),
        quantized=tuple(
            tuple(Quantize(layer, stored[f"{layer}.weight"], dtype) for layer, _ in group)
            for group in groups
        ),
        scales=tuple(Scale(name, stored[name], target) for name, target in scales.items()),
        skipped=skipped,
    )


def parameter_names(model: nn.Module) -> list[tuple[str, ...]]:
    """The names of each parameter; a tied one has several."""
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    return [tuple(group) for group in names.values()]


def _fill(model: nn.Module, names: tuple[str, ...], stored: Stored) -> Fill:
    parameter = model.get_parameter(names[0])
    return Fill(names, stored, parameter.dtype, tuple(parameter.shape))


def _checked(
    model: nn.Module,
    stored: Mapping[str, Stored],
    sources: Mapping[tuple[str, ...], str],
    path: Path,
) -> tuple[str, ...]:
    """The stored names that are no part of the model. Raises ValueError that lists all that does
    not fit.
    """
    parameters = parameter_names(model)
    others = sorted(set(stored).difference(*parameters))
    modules = {name for name, _ in model.named_modules()}
    skipped = tuple(name for name in others if _is_skipped(name, modules))
    misfits = [
        _misfit(name, stored[name], model.get_parameter(names[0]))
        for names, name in sources.items()
    ]
    found = {
        "missing ": [names[0] for names in parameters if names not in sources],
        "unexpected ": [name for name in others if name not in skipped],
        "": [misfit for misfit in misfits if misfit],
    }
    problems = [kind + some(names) for kind, names in found.items() if names]
    if problems:
        raise ValueError(
            f"{path} does not fit {type(model).__name__}: {'; '.join(problems)}. "
            "Are config.json and the weights of the same checkpoint?"
        )
    return skipped


def some(names: Sequence[str]) -> str:
    """The first few names, and how many more."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _is_skipped(name: str, modules: set[str]) -> bool:
    """Whether a stored tensor belongs to a layer beyond the model's, or to what the model does not
    have.
    """
    layer = re.match(r"(.*\blayers\.\d+)\.", name)
    return (layer is not None and layer[1] not in modules) or IGNORED.search(name) is not None


def _misfit(name: str, stored: Stored, parameter: nn.Parameter) -> str | None:
    shape, dtypes = tuple(parameter.shape), CODES.get(parameter.dtype, tuple(FLOATS))
    # Scales come as [], [1], [N] or [N, 1].
    if stored.shape != shape and (*stored.shape, 1) != shape:
        return f"{name} is {list(stored.shape)}, expected {list(shape)}"
    return (
        None
        if stored.dtype in dtypes
        else f"{name} is {stored.dtype}, expected {' or '.join(dtypes)}"
    )
