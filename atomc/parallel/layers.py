"""How the parameters of one layer are cut, quantized or not.

A cut of a linear layer, or of a projection of experts, is one of its weight [N, K]: of its outputs,
or of its inputs. Tensors of a quantization scheme follow: codes, and the scales of what is kept.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from atomc.parallel.shard_slice import ShardSlice
from atomc.quantization.experts import QuantizedExperts, sizes, stacked
from atomc.quantization.experts_spec import spec_of
from atomc.quantization.layer_weights import Shapes
from atomc.quantization.linear import Format, QuantizedLinear
from atomc.quantization.scheme import Scheme

# A tensor of checkpoints of compressed-tensors: [N, K] of the whole weight, which is not that of a
# part.
WHOLE_SHAPE = "weight_shape"
OUT, IN = 0, 1  # dimensions of a weight [N, K]
GATE_AND_UP = (1, 1)  # segments of a cut
Cuts = dict[str, ShardSlice]  # by the name of a parameter in its module
# Attributes of experts of transformers with their width.
WIDTHS = ("intermediate_dim", "intermediate_size", "expert_dim")
# The projections of an expert, stacked or as they are stored, and what is divided with its width.
PROJECTIONS = {"gate_up_proj": OUT, "gate_proj": OUT, "up_proj": OUT, "down_proj": IN}


def is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear | QuantizedLinear)


def cuts_of_linear(layer: nn.Module, cut: ShardSlice) -> Cuts:
    """The parameters of a linear layer that are cut; the bias is, if the outputs are.

    Raises ValueError if the layer cannot be divided so.
    """
    if isinstance(layer, QuantizedLinear):
        cuts = _cuts_of_scheme(layer, cut)
    else:
        cuts = {"weight": cut}
        cut.size_of(layer.get_parameter("weight").shape[cut.dim])
    if cut.dim == OUT and layer._parameters.get("bias") is not None:
        cuts["bias"] = cut
    return cuts


def resize_linear(layer: nn.Module, cut: ShardSlice) -> None:
    """Give a layer the numbers of its outputs and inputs, when its parameters are cut."""
    name = "out_features" if cut.dim == OUT else "in_features"
    setattr(layer, name, cut.size_of(getattr(layer, name)))
    if cut.parts > 1:
        layer._parameters.pop(WHOLE_SHAPE, None)


def _cuts_of_scheme(layer: QuantizedLinear, cut: ShardSlice) -> Cuts:
    """The tensors of a scheme whose shape depends on what is cut, stored or converted."""
    method, size = layer.method, (layer.out_features, layer.in_features)
    dtype = torch.get_default_dtype()
    have = {name for name in layer._parameters if name != "bias"}
    for shapes in _kinds_of_shapes(method.scheme, method.format):
        full_shapes = shapes(*size, dtype)
        if have <= full_shapes.keys():
            break
    part = _part_of(size, cut, method.scheme)
    return _changed(full_shapes, shapes(*part, dtype), cut, have)


def _kinds_of_shapes(
    scheme: Scheme, form: Format | None
) -> Iterator[Callable[[int, int, torch.dtype], Shapes]]:
    """What gives the shapes of tensors: the format of a checkpoint, and the scheme."""
    if form is not None:
        yield lambda rows, columns, dtype: form.stored(scheme, rows, columns, dtype)
    yield scheme.tensors


def _part_of(size: tuple[int, int], cut: ShardSlice, scheme: Scheme) -> tuple[int, int]:
    """(outputs, inputs) of a part. Raises ValueError if it would end within a block of scales."""
    part = cut.size_of(size[cut.dim])
    block = scheme.block_sizes[cut.dim]
    lengths = cut.lengths(size[cut.dim])
    split = next((length for length in lengths if length // cut.parts % block), None)
    if split is not None:
        kind = "outputs" if cut.dim == OUT else "inputs"
        most = min(lengths) // block
        works = [
            n for n in range(1, most + 1) if not any(length % (n * block) for length in lengths)
        ]
        raise ValueError(
            f"a cut of {split:,} {kind} in {cut.parts} gives {split // cut.parts:,}, not a "
            f"multiple of {block}, which share a scale of {scheme.description}; parts that work "
            f"are {', '.join(map(str, works)) or 'none but the whole'}"
        )
    return (part, size[1]) if cut.dim == OUT else (size[0], part)


def _changed(
    full_shapes: Shapes, part_shapes: Shapes, cut: ShardSlice, have: set[str], leading: int = 0
) -> Cuts:
    """A cut for each tensor whose shape differs, behind so many leading dimensions."""
    cuts: Cuts = {}
    for name, (shape, _) in full_shapes.items():
        smaller = part_shapes[name][0]
        if name not in have or smaller == shape:
            continue
        [dim] = [i for i, (a, b) in enumerate(zip(shape, smaller, strict=True)) if a != b]
        if smaller[dim] * cut.parts != shape[dim]:
            raise ValueError(
                f"{name} of {list(shape)} does not divide into {cut.parts} parts of {list(smaller)}"
            )
        cuts[name] = replace(cut, dim=dim + leading)
    return cuts


def cuts_of_experts(module: nn.Module, cut: ShardSlice) -> Cuts:
    """The parameters of experts, each divided by its width. Raises ValueError if they cannot be.

    cut  of rows, of the first dimension
    """
    if isinstance(module, QuantizedExperts):
        return _cuts_of_quantized_experts(module, cut)
    spec = spec_of(module)
    rows, columns = (2, 1) if spec.transposed else (1, 2)
    width = replace(cut, dim=rows, segments=(1,) if spec.gate["interleaved"] else GATE_AND_UP)
    cuts = {"gate_up_proj": width, "down_proj": replace(cut, dim=columns)}
    if spec.has_bias:
        cuts["gate_up_proj_bias"] = replace(width, dim=1)
    for name, cut in cuts.items():
        cut.size_of(module.get_parameter(name).shape[cut.dim])
    return cuts


def _cuts_of_quantized_experts(module: QuantizedExperts, cut: ShardSlice) -> Cuts:
    cuts: Cuts = {}
    for projection, (rows, columns) in sizes(module.spec).items():
        cut = replace(cut, dim=PROJECTIONS[projection])
        stored = [name for name, _ in module.named_children() if PROJECTIONS[name] == cut.dim]
        if stored:
            one = (rows // len(stored), columns)
            cuts |= _cuts_of_stored(module, stored, one, cut)
            continue
        in_two = cut.dim == OUT and not module.spec.gate["interleaved"]
        width = replace(cut, segments=GATE_AND_UP if in_two else (1,))
        cuts |= _cuts_of_stacked(module, projection, (rows, columns), width)
    return cuts


def _cuts_of_stored(
    module: QuantizedExperts,
    children: list[str],
    size: tuple[int, int],
    cut: ShardSlice,
) -> Cuts:
    """Projections of experts as a checkpoint stores them: children whose parameters are [E, ...] of
    the tensors of linear layers.
    """
    method, dtype = module.method, torch.get_default_dtype()
    shapes = next(_kinds_of_shapes(method.scheme, method.format))
    part = _part_of(size, cut, method.scheme)
    cuts: Cuts = {}
    for name in children:
        child = module.get_submodule(name)
        have = {leaf for leaf, weight in child._parameters.items() if weight is not None}
        of_child = _changed(shapes(*size, dtype), shapes(*part, dtype), cut, have, 1)
        if cut.dim == OUT and "bias" in have:
            of_child["bias"] = replace(cut, dim=1)
        cuts |= {f"{name}.{leaf}": child_cut for leaf, child_cut in of_child.items()}
    return cuts


def _cuts_of_stacked(
    module: QuantizedExperts, projection: str, size: tuple[int, int], cut: ShardSlice
) -> Cuts:
    """The tensors of a scheme, stacked."""
    scheme, dtype = module.method.scheme, torch.get_default_dtype()
    part = _part_of(size, cut, scheme)
    full_shapes, part_shapes = (
        stacked(projection, scheme.tensors(*rows_columns, dtype), module.spec.num_experts)
        for rows_columns in (size, part)
    )
    # Scales of fp8 that a checkpoint has for gate and for up are those of all their rows.
    held = {name: weight.shape for name, weight in module.named_parameters(recurse=False)}
    have = {name for name, (shape, _) in full_shapes.items() if held.get(name) == shape}
    cuts = _changed(full_shapes, part_shapes, cut, have)
    bias = f"{projection}_bias"
    if cut.dim == OUT and bias in held:
        cuts[bias] = replace(cut, dim=1)
    return cuts


def cuts_by_expert(module: nn.Module, cut: ShardSlice, ranks: Sequence[int]) -> Cuts:
    """The parameters of stacked experts, which are divided by expert.

    cut    of the first dimension
    ranks  of each expert; empty: equal ranges of experts, by rank
    """
    num_experts = num_experts_of(module)
    experts_of_rank = tuple(expert for expert, rank in enumerate(ranks) if rank == cut.index)
    cut = replace(cut, members=experts_of_rank)
    try:
        cut.size_of(num_experts)
    except ValueError as error:
        raise ValueError(f"{num_experts} experts: {error}") from error
    return {
        name: cut
        for name, weight in module.named_parameters()
        # One scale for the inputs of all experts is the largest of theirs.
        if weight.shape[:1] == (num_experts,) and not name.endswith("input_scale")
    }


def num_experts_of(module: nn.Module) -> int:
    if isinstance(module, QuantizedExperts):
        return module.spec.num_experts
    return len(module.get_parameter("down_proj"))


def resize_experts(module: nn.Module, size: int, *, by_expert: bool) -> None:
    """Give experts the numbers of their experts or their width, when their parameters are cut."""
    if isinstance(module, QuantizedExperts):
        if not by_expert:
            for child in module.children():
                child._parameters.pop(WHOLE_SHAPE, None)
        field = "num_experts" if by_expert else "intermediate_size"
        number = getattr(module.spec, field) // size
        module.spec = replace(module.spec, **{field: number})
        return
    for name in ("num_experts",) if by_expert else WIDTHS:
        if isinstance(number := vars(module).get(name), int):
            setattr(module, name, number // size)
    if by_expert and hasattr(module, "is_concatenated"):
        # Its class in transformers then leaves out choices of the expert behind the last.
        vars(module)["_is_expert_parallel"] = True
