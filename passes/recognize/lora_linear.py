"""Replace the products of a LoRA adapter by one op, as peft writes them.

    x -+- linear(weight) -> y ---------+             x -+- linear(weight) -> y -+
       |                               + > y'   =>      +------------------------+- lora_linear > y'
       +- linear(A) > linear(B) > * s -+

A would otherwise be merged with the linear layers that read x, which then are no group of queries,
keys and values, or of gate and up. The adapter may be in fp32 where the model is not: then y' is
rounded to the dtype of y. Products that are not thin are left alone: they are no adapter.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import Node

from atomc import ops
from atomc.graph.canonical import GENERIC, call
from atomc.ops.op import op_of
from atomc.ops.op_traits import Kind
from atomc.rewriting.example import Example, OneOf, tensor_example
from atomc.rewriting.matching.pattern import Index
from atomc.rewriting.rewrite import Case, Rewrite

aten = torch.ops.aten
LINEAR = "atom::linear"
_16_BITS = (torch.bfloat16, torch.float16)


def _pattern(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float | None, dtype: torch.dtype | None
) -> Tensor:
    products = ops.linear(ops.linear(x, a), b)
    total = y + (products if scale is None else products * scale)
    return total if dtype is None else total.to(dtype)


def _replacement(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float | None, dtype: torch.dtype | None
) -> Tensor:
    b_t = aten.permute.default(b, [1, 0])
    stacked = aten.unsqueeze.default(a, 0), aten.unsqueeze.default(b_t, 0)
    return ops.lora_linear(y, x, *stacked, scale=1.0 if scale is None else scale)


def _example(in_fp32: bool, scale: float | None = 2.5) -> Example:
    model = OneOf(*_16_BITS) if in_fp32 else OneOf(torch.float32, *_16_BITS)
    adapter = torch.float32 if in_fp32 else model
    return {
        "y": tensor_example(3, 10, dtype=model),
        "x": tensor_example(3, 6, dtype=adapter),
        "a": tensor_example(2, 6, dtype=adapter),
        "b": tensor_example(10, 2, dtype=adapter),
        "scale": scale,
        "dtype": model if in_fp32 else None,
    }


def _guard(x: Tensor, a: Tensor, b: Tensor, **_: object) -> str | None:
    rank, inputs, outputs = a.shape[0], a.shape[-1], b.shape[0]
    if not all(isinstance(size, int) for size in (rank, inputs, outputs)):
        return "the sizes of its weights are dynamic"
    if rank >= min(inputs, outputs):
        return f"its rank {rank} is not below its {inputs} inputs and {outputs} outputs"
    return None


def _unscaled_pattern(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    dtype: torch.dtype | None,
) -> Tensor:
    total = ops.linear(inputs, weight, bias) + ops.linear(ops.linear(x, a), b)
    return total if dtype is None else total.to(dtype)


def _unscaled_replacement(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    dtype: torch.dtype | None,
) -> Tensor:
    return _replacement(ops.linear(inputs, weight, bias), x, a, b, 1.0, dtype)


def _unscaled_example(in_fp32: bool, biased: bool) -> Example:
    scaled = _example(in_fp32)
    model = scaled["y"].follows if isinstance(scaled["y"], OneOf) else None
    assert model is not None, "the dtype of y is one of several"
    return {
        "inputs": tensor_example(3, 6, dtype=model),
        "weight": tensor_example(10, 6, dtype=model),
        "bias": tensor_example(10, dtype=model) if biased else None,
        **{name: value for name, value in scaled.items() if name not in ("y", "scale")},
    }


def _if_chained(*cases: Case) -> Callable[[Index], Sequence[Case]]:
    """The cases, for graphs in which a linear layer reads what another one computes, maybe behind
    generic ops. Most models have no such layers, and each of theirs would be compared with all
    patterns.
    """
    return lambda index: cases if _is_chained(index) else ()


def _if_quantized(*cases: Case) -> Callable[[Index], Sequence[Case]]:
    """The cases, for graphs with chained linear layers as above and with quantized ones."""
    return lambda index: cases if _is_quantized(index) and _is_chained(index) else ()


def _is_quantized(index: Index) -> bool:
    present = (op_of(nodes[0].target) for nodes in index.nodes.values())
    return any(op is not None and op.kind is Kind.LINEAR and op.quantized_weight for op in present)


def _is_chained(index: Index) -> bool:
    linears, seen = set(index[LINEAR]), set[Node]()
    waiting = [call(linear).operands[0] for linear in linears]
    while waiting:
        node = waiting.pop()
        if node in linears:
            return True
        if node not in seen and call(node).op in GENERIC:
            seen.add(node)
            waiting += call(node).operands
    return False


LORA_LINEAR = Rewrite(
    "lora_linear",
    _pattern,
    _replacement,
    _example,
    guard=_guard,
    cases=(),
    cases_in=_if_chained(Case("adapter in fp32", {"in_fp32": True}), Case("", {"in_fp32": False})),
)
# A scale of 1 is no node of the graph. Without it, the layer is part of the pattern: a sum of any y
# and two products could be a residual stream and a layer of low rank.
LORA_LINEAR_UNSCALED = Rewrite(
    "lora_linear",
    _unscaled_pattern,
    _unscaled_replacement,
    _unscaled_example,
    guard=_guard,
    variant="scale of 1",
    cases=(),
    cases_in=_if_chained(
        *(
            Case(
                f"{'adapter in fp32' if in_fp32 else ''}{', bias' if biased else ''}",
                {"in_fp32": in_fp32, "biased": biased},
            )
            for in_fp32 in (True, False)
            for biased in (True, False)
        )
    ),
)
# Below an adapter of a quantized layer there are several ops, a different one for each scheme. The
# layers of such a model are quantized, so products of two that are not are an adapter.
LORA_LINEAR_QUANTIZED = Rewrite(
    "lora_linear",
    _pattern,
    _replacement,
    _example,
    guard=_guard,
    variant="scale of 1, quantized",
    cases=(),
    cases_in=_if_quantized(
        Case("adapter in fp32", {"in_fp32": True, "scale": None}),
        Case("", {"in_fp32": False, "scale": None}),
    ),
)
