"""The plan of a load: which stored tensor becomes which parameter. It is made from names and
headers, before any weight is read.

A plan has files, names, shapes and dtypes, and no tensors. atomc.models.loader makes and executes
it.
"""

import re
from collections.abc import Collection, Mapping, Sequence
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
# Dtypes of quantized weights, which are never converted.
CODES = {
    torch.float8_e4m3fn: ("F8_E4M3",),
    torch.int8: ("I8",),
    torch.uint8: ("U8", "F8_E8M0"),
    torch.int32: ("I32",),
    torch.int64: ("I64",),
}
# Rotary frequencies of old Llama checkpoints, heads for multi-token prediction, scales of queries,
# and scales of a cache that the model does not have.
IGNORED = re.compile(r"rotary_emb\.inv_freq$|^(hf_model\.)?(model\.)?mtp\.|\.(q|k|v|kv)_scale$")


class Fill(NamedTuple):
    """A stored tensor, converted to this dtype and shape, as the parameter of these names. A tied
    parameter has several names.
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
    """A stored scale of an fp8 cache, by its name in the model, and the buffers that it sets."""

    name: str
    stored: Stored
    target: CacheScale


@dataclass(frozen=True)
class LoadPlan:
    """The tensors to read from the checkpoint in `path`, and their destinations.

    fills      read by several threads, in any order
    quantized  groups of layers with a common input: each is read and quantized before the next
    skipped    stored names that are not part of the model, and are not read
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
    """The plan for a model on meta and the tensors of the checkpoint in `path`, by their names in
    the model.

    dtype   of the weights that are quantized during loading
    online  the linear layers that are quantized during loading, from unquantized weights

    Raises ValueError that lists missing and unexpected names, and wrong shapes and dtypes.
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
    skipped = _skipped_names(model, weights, sources)
    _check(model, weights, sources, skipped, path)
    quantized = tuple(
        tuple(Quantize(layer, stored[f"{layer}.weight"], dtype) for layer, _ in group)
        for group in apply.groups(online or {})
    )
    read_later = {(f"{layer}.weight",) for group in quantized for layer, _, _ in group}
    return LoadPlan(
        path,
        fills=tuple(
            _fill(model, names, weights[name])
            for names, name in sources.items()
            if names not in read_later
        ),
        quantized=quantized,
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


def _skipped_names(
    model: nn.Module, stored: Mapping[str, Stored], sources: Mapping[tuple[str, ...], str]
) -> tuple[str, ...]:
    """The stored names that are not part of the model, and that are expected in a checkpoint: of
    layers beyond the model's, and those that match IGNORED.
    """
    modules = {name for name, _ in model.named_modules()}

    def skip(name: str) -> bool:
        layer = re.match(r"(.*\blayers\.\d+)\.", name)
        return (layer is not None and layer[1] not in modules) or IGNORED.search(name) is not None

    return tuple(filter(skip, sorted(set(stored).difference(*sources))))


def _check(
    model: nn.Module,
    stored: Mapping[str, Stored],
    sources: Mapping[tuple[str, ...], str],
    skipped: Collection[str],
    path: Path,
) -> None:
    """Raise ValueError that lists missing and unexpected names, and wrong shapes and dtypes."""
    parameters = parameter_names(model)
    mismatches = [
        _mismatch(name, stored[name], model.get_parameter(names[0]))
        for names, name in sources.items()
    ]
    found = {
        "missing ": [names[0] for names in parameters if names not in sources],
        "unexpected ": sorted(set(stored).difference(skipped, *parameters)),
        "": list(filter(None, mismatches)),
    }
    problems = [kind + first_names(names) for kind, names in found.items() if names]
    if problems:
        raise ValueError(
            f"{path} does not match {type(model).__name__}: {'; '.join(problems)}. "
            "Are config.json and the weights of the same checkpoint?"
        )


def first_names(names: Sequence[str]) -> str:
    """The first three names, and the number of others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _mismatch(name: str, stored: Stored, parameter: nn.Parameter) -> str:
    """How a stored tensor differs from its parameter; "" if it can be converted."""
    shape, dtypes = tuple(parameter.shape), CODES.get(parameter.dtype, tuple(FLOATS))
    # Scales come as [], [1], [N] or [N, 1].
    if stored.shape != shape and (*stored.shape, 1) != shape:
        return f"{name} is {list(stored.shape)}, expected {list(shape)}"
    if stored.dtype not in dtypes:
        return f"{name} is {stored.dtype}, expected {' or '.join(dtypes)}"
    return ""
