"""The plan of a load: which stored tensor becomes which parameter. It is made from names and
headers, before any weight is read.

A plan has files, names, shapes and dtypes, and no tensors. atomc.loading.loader makes it,
atomc.loading.execute_plan executes it.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from atomc.loading.cache_scales import CacheScale, cache_scales
from atomc.loading.expert_names import (
    ExpertPart,
    absent_parts,
    expert_parts,
    wrong_numbers_of_experts,
)
from atomc.loading.limits import Stored
from atomc.parallel.shard_slice import ShardSlice
from atomc.quantization import apply
from atomc.quantization.apply import Methods
from atomc.weights.parameters import tensor_names, tensor_of

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Dtypes of quantized weights, which are never converted.
CODES = {
    torch.float8_e4m3fn: ("F8_E4M3",),
    torch.int8: ("I8",),
    torch.uint8: ("U8", "F8_E8M0"),
    torch.int32: ("I32",),
    torch.int64: ("I64",),
}
# Rotary frequencies of old Llama checkpoints, copies of the embedding and the head for draft
# layers, scales of queries, and scales of a cache that the model does not have.
IGNORED = re.compile(
    r"rotary_emb\.inv_freq$|\.(q|k|v|kv)_scale$|"
    r"\blayers\.\d+\.(embed_tokens|shared_head\.head)\.weight$"
)
# Parts that a model may leave out: the encoder of images, for its text model alone, and a draft
# layer.
PARTS = re.compile(r"^(hf_model\.)?(model\.visual|(model\.)?mtp)(?=\.)")


class Fill(NamedTuple):
    """A stored tensor, converted to this dtype and shape, as the parameter of these names. A tied
    parameter has several names.

    cut  the part of the stored tensor that is read; None: all
    """

    names: tuple[str, ...]
    stored: Stored
    dtype: torch.dtype
    shape: tuple[int, ...]
    cut: ShardSlice | None = None


class Copy(NamedTuple):
    """A stored tensor, copied into the stacked parameter [E, rows, ...] of these names.

    part  (expert, first row, last row + 1); None: all, from a tensor [E, columns, rows]
    cut   the part of the stored tensor that is read; None: all
    """

    names: tuple[str, ...]
    stored: Stored
    part: tuple[int, int, int] | None
    cut: ShardSlice | None = None


PlanEntry = Fill | Copy


class Quantize(NamedTuple):
    """A stored weight, converted to this dtype, from which a linear layer is quantized.

    cut  the part of the stored tensor that is read; None: all
    """

    layer: str
    stored: Stored
    dtype: torch.dtype
    cut: ShardSlice | None = None


class QuantizeExperts(NamedTuple):
    """The stored weights of the experts of a layer, which are quantized when all are read."""

    layer: str
    entries: tuple[PlanEntry, ...]


class Scale(NamedTuple):
    """A stored scale of an fp8 cache, by its name in the model, and the buffers that it sets."""

    name: str
    stored: Stored
    target: CacheScale


@dataclass(frozen=True)
class LoadPlan:
    """The tensors to read from the checkpoint in `path`, and their destinations.

    fills      read by several threads, in any order
    copies     read with them, into parameters that are allocated before
    quantized  groups of layers with a common input: each is read and quantized before the next
    experts    likewise, the experts of a layer at a time
    skipped    stored names that are not part of the model, and are not read
    """

    path: Path
    fills: tuple[Fill, ...]
    copies: tuple[Copy, ...]
    quantized: tuple[tuple[Quantize, ...], ...]
    experts: tuple[QuantizeExperts, ...]
    scales: tuple[Scale, ...]
    skipped: tuple[str, ...]


def plan_load(
    model: nn.Module,
    stored: Mapping[str, Stored],
    path: Path,
    dtype: torch.dtype,
    online: Methods | None = None,
) -> LoadPlan:
    """The plan for a model on meta and the checkpoint's tensors, by their names in the model.

    dtype   of the weights that are quantized during loading
    online  the layers that are quantized during loading, from unquantized weights

    Raises ValueError that lists missing and unexpected names, and wrong shapes and dtypes.
    """
    scales = cache_scales(model, stored)
    parts = expert_parts(model, stored)
    weights = {name: tensor for name, tensor in stored.items() if name not in scales}
    # A tied parameter may be stored under each of its names: the first is read.
    sources = {
        names: name for names in tensor_names(model) for name in reversed(names) if name in weights
    }
    skipped = _skipped_names(model, weights.keys() - parts.keys(), sources)
    _check(model, weights, sources, parts, skipped, path)
    online = online or Methods()
    quantized = _weights_to_quantize(online, stored, dtype)
    for layer in online.linears:
        sources.pop((f"{layer}.weight",), None)
    entries = [_fill_or_copy(model, names, weights[name]) for names, name in sources.items()]
    entries += [_copy_of_expert(model, part, stored[name]) for name, part in parts.items()]
    experts, others = _split_experts(entries, online.experts)
    return LoadPlan(
        path,
        fills=tuple(entry for entry in others if isinstance(entry, Fill)),
        copies=tuple(entry for entry in others if isinstance(entry, Copy)),
        quantized=quantized,
        experts=experts,
        scales=tuple(Scale(name, stored[name], target) for name, target in scales.items()),
        skipped=skipped,
    )


def _weights_to_quantize(
    online: Methods, stored: Mapping[str, Stored], dtype: torch.dtype
) -> tuple[tuple[Quantize, ...], ...]:
    """The weights of linear layers that are quantized during loading, grouped by their input."""
    return tuple(
        tuple(Quantize(layer, stored[f"{layer}.weight"], dtype) for layer, _ in group)
        for group in apply.groups(online.linears)
    )


def _split_experts(
    entries: Iterable[PlanEntry], layers: Iterable[str]
) -> tuple[tuple[QuantizeExperts, ...], list[PlanEntry]]:
    """The entries of each of these layers of experts, and all others."""
    by_layer: dict[str, list[PlanEntry]] = {layer: [] for layer in layers}
    others: list[PlanEntry] = []
    for entry in entries:
        by_layer.get(entry.names[0].rpartition(".")[0], others).append(entry)
    return tuple(QuantizeExperts(layer, tuple(of)) for layer, of in by_layer.items()), others


def _is_transposed(model: nn.Module, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    return leaf in getattr(model.get_submodule(owner), "STORED_TRANSPOSED", ())


def _fill_or_copy(model: nn.Module, names: tuple[str, ...], stored: Stored) -> PlanEntry:
    tensor = tensor_of(model, names[0])
    if _is_transposed(model, names[0]):
        return Copy(names, stored, None)
    return Fill(names, stored, tensor.dtype, tuple(tensor.shape))


def _copy_of_expert(model: nn.Module, part: ExpertPart, stored: Stored) -> Copy:
    rows = model.get_parameter(part.parameter).shape[1] // part.num_parts
    first = part.position * rows
    return Copy((part.parameter,), stored, (part.expert, first, first + rows))


def _skipped_names(
    model: nn.Module, stored: Collection[str], sources: Mapping[tuple[str, ...], str]
) -> tuple[str, ...]:
    """The stored names that are not part of the model, and that are expected in a checkpoint: of
    layers beyond the model's, of PARTS that it does not have, and those that match IGNORED.
    """
    modules = {name for name, _ in model.named_modules()}

    def skip(name: str) -> bool:
        layer, part = re.match(r"(.*\blayers\.\d+)\.", name), PARTS.match(name)
        return (
            (layer is not None and layer[1] not in modules)
            or (part is not None and part[0] not in modules)
            or IGNORED.search(name) is not None
        )

    return tuple(filter(skip, sorted(set(stored).difference(*sources))))


def _check(
    model: nn.Module,
    stored: Mapping[str, Stored],
    sources: Mapping[tuple[str, ...], str],
    parts: Mapping[str, ExpertPart],
    skipped: Collection[str],
    path: Path,
) -> None:
    """Raise ValueError that lists missing and unexpected names, and wrong shapes and dtypes."""
    tensors = tensor_names(model)
    stacked = {(part.parameter,) for part in parts.values()}
    missing = [names[0] for names in tensors if names not in sources and names not in stacked]
    wrong_counts = wrong_numbers_of_experts(model, parts)
    mismatches = [_mismatch(model, names[0], name, stored[name]) for names, name in sources.items()]
    mismatches += [_part_mismatch(model, part, name, stored[name]) for name, part in parts.items()]
    by_kind = {
        "missing ": missing + ([] if wrong_counts else absent_parts(model, parts)),
        "unexpected ": sorted(set(stored).difference(skipped, parts, *tensors)),
        "": wrong_counts + list(filter(None, mismatches)),
    }
    problems = [kind + first_names(names) for kind, names in by_kind.items() if names]
    if problems:
        raise ValueError(
            f"{path} does not match {type(model).__name__}: {'; '.join(problems)}. "
            "Are config.json and the weights of the same checkpoint?"
        )


def first_names(names: Sequence[str]) -> str:
    """The first three names, and the number of others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _mismatch(model: nn.Module, name: str, stored_name: str, stored: Stored) -> str:
    """How a stored tensor differs from the parameter of this name; "" if it can be converted."""
    tensor = tensor_of(model, name)
    shape = tuple(tensor.mT.shape if _is_transposed(model, name) else tensor.shape)
    return _difference(stored_name, stored, shape, tensor.dtype, _is_same(stored.shape, shape))


def _part_mismatch(model: nn.Module, part: ExpertPart, stored_name: str, stored: Stored) -> str:
    """How a stored tensor differs from its part of a stacked parameter."""
    parameter = model.get_parameter(part.parameter)
    shape = (parameter.shape[1] // part.num_parts, *parameter.shape[2:])
    same = _is_same(stored.shape, shape)
    return _difference(stored_name, stored, shape, parameter.dtype, same)


def _is_same(stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether the shapes are equal, but for how scales and blocks are written: scales come as [],
    [1], [N] or [N, 1], blocks of 16 bytes as [E, N, K / 16, 16].
    """
    blocks = len(stored) == 4 and (*stored[:2], stored[2] * stored[3]) == shape
    return blocks or stored == shape or (*stored, 1) == shape


def _difference(
    name: str, stored: Stored, shape: tuple[int, ...], dtype: torch.dtype, same_shape: bool
) -> str:
    dtypes = CODES.get(dtype, tuple(FLOATS))
    if not same_shape:
        return f"{name} is {list(stored.shape)}, expected {list(shape)}"
    if stored.dtype not in dtypes:
        return f"{name} is {stored.dtype}, expected {' or '.join(dtypes)}"
    return ""
