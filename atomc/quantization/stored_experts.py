"""Experts of checkpoints with tensors of each expert: read as they are stored, then stacked.

    experts.3.gate_proj.weight_scale    a parameter [E, ...] of experts.gate_proj, expert 3

The projections are stored like linear layers, in the method's format. GPT-OSS and transformers 5
store stacked experts; of these only scales of fp8 are converted, if gate and up have one each.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from atomc.quantization.experts import ExpertsMethod, QuantizedExperts, put, sizes
from atomc.quantization.layer_weights import Tensors
from atomc.quantization.linear import Format
from atomc.quantization.scheme import Fp8, Fp8Block, Scheme
from atomc.weights.registry import parameter_of

# Stacked projection -> the stored ones whose rows it has, in order.
PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class StoredProjection(nn.Module):
    """A projection of all experts, as stored: the tensors of a linear layer, each [E, ...]."""


def create_stored(layer: QuantizedExperts, dtype: torch.dtype) -> None:
    """Give quantized experts parameters on meta, as a checkpoint stores them.

    Raises ValueError if such experts cannot be stacked.
    """
    spec, method = layer.spec, layer.method
    block = Fp8Block.block
    if isinstance(method.scheme, Fp8Block) and spec.intermediate_size % block:
        raise ValueError(
            f"experts of width {spec.intermediate_size} cannot be stacked: blocks of {block} rows "
            "have rows of gate and of up"
        )
    for projection, (rows, columns) in sizes(spec).items():
        parts = PROJECTIONS[projection]
        for part in parts:
            child = StoredProjection()
            shapes = method.stored(rows // len(parts), columns, dtype)
            if spec.has_bias:
                shapes = shapes | {"bias": ((rows // len(parts),), dtype)}
            for name, (shape, kind) in shapes.items():
                empty = torch.empty((spec.num_experts, *shape), dtype=kind, device="meta")
                child.register_parameter(name, parameter_of(empty))
            layer.add_module(part, child)
    # Stored apart, gate and up come one after the other, also in a model where they alternate.
    layer.spec = replace(spec, gate={**spec.gate, "interleaved": False})


def expect_scales(layer: QuantizedExperts, stored: Mapping[str, tuple[int, ...]]) -> None:
    """Give stacked fp8 experts on meta the scales of these shapes, by parameter, if they may be
    stored so: [E, 2, 1] of gate and up, [E] of inputs.
    """
    if not isinstance(layer.method.scheme, Fp8):
        return
    num_experts = layer.spec.num_experts
    may_be: dict[str, tuple[int, ...]] = {"gate_up_proj_scale": (num_experts, 2, 1)}
    may_be |= {f"{projection}_input_scale": (num_experts,) for projection in PROJECTIONS}
    for name, shape in may_be.items():
        if stored.get(name) in (shape, shape[:2]):
            layer.set(name, torch.empty(shape, dtype=torch.float32, device="meta"))


def merge_scales(layer: QuantizedExperts) -> None:
    """Give stacked fp8 experts the scales that the op takes: one per row where gate and up have one
    each, which keeps all values, and the largest one for the inputs of all experts.
    """
    scheme, interleaved = layer.method.scheme, layer.spec.gate["interleaved"]
    if not isinstance(scheme, Fp8):
        return
    for projection in PROJECTIONS:
        name = f"{projection}_input_scale"
        if name in layer._parameters:
            layer.set(name, layer.get_parameter(name).data.max().reshape(1))
    scale, rows = layer.gate_up_proj_scale.data, layer.gate_up_proj.shape[1]
    if scheme.weight == "channel" or scale.shape[1] == 1:
        return
    of_rows = (
        scale.repeat(1, rows // 2, 1) if interleaved else scale.repeat_interleave(rows // 2, 1)
    )
    layer.set("gate_up_proj_scale", of_rows)
    hidden = layer.down_proj.shape[1]
    layer.set("down_proj_scale", layer.down_proj_scale.data.expand(-1, hidden, 1).contiguous())
    layer.method = replace(layer.method, scheme=replace(scheme, weight="channel"))


def stack_stored(layer: QuantizedExperts) -> None:
    """Replace the loaded tensors by the scheme's. Raises ValueError for a contradiction."""
    stored = {
        part: {
            name: weight.data for name, weight in child._parameters.items() if weight is not None
        }
        for part, child in layer.named_children()
    }
    if stored:
        layer.method, tensors = stack(layer.method, stored)
        for part in stored:
            delattr(layer, part)
        layer.replace_parameters(tensors)
    merge_scales(layer)


def stack(method: ExpertsMethod, stored: Mapping[str, Tensors]) -> tuple[ExpertsMethod, Tensors]:
    """The method without a format, and the parameters of QuantizedExperts.

    stored  projection -> the tensors of the format, each [E, ...]

    Rows keep their scale: experts with one fp8 scale per projection get one per row.
    """
    stacked: Tensors = {}
    for projection, parts in PROJECTIONS.items():
        num_experts = len(next(iter(stored[parts[0]].values())))
        for e in range(num_experts):
            tensors = [_rows(method.scheme, method.format, stored[part], e) for part in parts]
            joined = {
                name: torch.cat([part_tensors[name] for part_tensors in tensors])
                for name in tensors[0]
            }
            put(stacked, projection, joined, e, num_experts)
        scales = [stored[part]["input_scale"] for part in parts if "input_scale" in stored[part]]
        if scales:
            stacked[f"{projection}_input_scale"] = torch.cat(scales).max().reshape(1)
        biases = [stored[part]["bias"] for part in parts if "bias" in stored[part]]
        if biases:
            stacked[f"{projection}_bias"] = torch.cat(biases, 1)
    scheme = method.scheme
    if isinstance(scheme, Fp8):
        scheme = replace(scheme, weight="channel")
    return replace(method, scheme=scheme, format=None), stacked


def _rows(scheme: Scheme, form: Format | None, stored: Tensors, expert: int) -> Tensors:
    """The scheme's tensors of one projection of one expert, with a row per output."""
    tensors = {
        name: tensor[expert]
        for name, tensor in stored.items()
        if name not in ("bias", "input_scale")
    }
    if form is not None:
        tensors = form.convert(scheme, tensors)
    scale = tensors["weight_scale"]
    if scale.shape == (1,):
        tensors["weight_scale"] = scale.expand(len(tensors["weight"]), 1)
    return tensors
