"""Replace the experts of a mixture by one op: as the functions of the installed transformers
compute them, or written out. The patterns of transformers are traced from these functions, so that
another version brings its own.

    ids > sort > histc > cumsum -----+
    x > rows of the sorted ids > _grouped_mm > gate > _grouped_mm > * weights > in order > sum
 or
    w13[ids] --+                w2[ids] --+
    x ------- bmm > gate --------------- bmm > * weights > sum
 =>
    moe_experts(x, ids, weights, w13, w2)
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from atomc import ops
from atomc.graph.canonical import call, value
from atomc.graph.sizes import known_equal
from atomc.ops.experts import activated, gate_and_up
from atomc.ops.op import op_of
from atomc.ops.op_traits import Kind
from atomc.passes.typed_aten import transpose
from atomc.rewriting.example import Example, OneOf, tensor_example
from atomc.rewriting.graph_pass import Context
from atomc.rewriting.matching.pattern import Index
from atomc.rewriting.rewrite import Case, Fired, Needs, Rewrite

TRANSFORMERS = "transformers.integrations.moe"


class GateForm(NamedTuple):
    """How the first product [.., 2I] becomes the input of the second; see `gated` of the op.

    limited  gate and up are clamped
    """

    activation: str
    interleaved: bool
    limited: bool

    @property
    def needs(self) -> Needs:
        """Ops of a graph that has it."""
        parts = {"aten::slice": {"step": 2 if self.interleaved else 1}}
        clamps: Needs = {"aten::clamp": {}} if self.limited else {}
        return {**_ACTIVATIONS[self.activation], **parts, **clamps}


class WeightLayout(NamedTuple):
    """How experts store their weights: with inputs as rows, and with biases or not."""

    transposed: bool
    biased: bool


_ACTIVATIONS: dict[str, Needs] = {
    "silu": {"aten::silu": {}},
    "gelu": {"aten::gelu": {"approximate": "none"}},
    "gelu_tanh": {"aten::gelu": {"approximate": "tanh"}},
    "swiglu_oai": {"aten::sigmoid": {}},
}
_GATES = [
    GateForm(activation, interleaved, limited)
    for limited, activation, interleaved in product((True, False), _ACTIVATIONS, (False, True))
]


class _Operands(NamedTuple):
    """The tensors of all patterns."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    w13: Tensor
    w2: Tensor
    b13: Tensor | None
    b2: Tensor | None


Forward = Callable[[_Operands, Callable[[Tensor], Tensor]], Tensor]


def _written_out(operands: _Operands, gate: Callable[[Tensor], Tensor]) -> Tensor:
    """The plainest experts: the weights of the chosen ones gathered, and two products."""
    x, ids, weights, w13, w2, b13, b2 = operands
    h = torch.einsum("tkih,th->tki", w13[ids], x)
    h = gate(h if b13 is None else h + b13[ids])
    y = torch.einsum("tkhi,tki->tkh", w2[ids], h)
    y = y if b2 is None else y + b2[ids]
    return (y * weights.unsqueeze(-1)).sum(1, dtype=torch.float32).to(x.dtype)


def _transformers_forward(
    name: str, experts: int, transposed: bool, operands: _Operands, gate: Callable[[Tensor], Tensor]
) -> Tensor:
    """What a function of transformers computes for a module with these parameters."""
    module = SimpleNamespace(
        num_experts=experts,
        has_gate=True,
        has_bias=operands.b13 is not None,
        has_post_expert_norm=False,
        is_transposed=transposed,
        is_concatenated=True,
        _is_expert_parallel=False,
        _apply_gate=gate,
        gate_up_proj=operands.w13,
        gate_up_proj_bias=operands.b13,
        down_proj=operands.w2,
        down_proj_bias=operands.b2,
    )
    forward = getattr(sys.modules[TRANSFORMERS], name)
    tensors = (operands.x, operands.ids, operands.weights)
    result: Tensor = torch.func.functionalize(partial(forward, module))(*tensors)
    return result


def _pattern(
    forward: Forward,
    activation: str,
    interleaved: bool,
    transposed: bool,
    alpha: float = 0.0,
    low: float | None = None,
    high: float | None = None,
    **operands: Tensor,
) -> Tensor:
    def gate(h: Tensor) -> Tensor:
        gate, up = gate_and_up(h, interleaved)
        if high is not None:
            gate, up = gate.clamp(max=high), up.clamp(low, high)
        return activated(gate, up, activation, alpha)

    return forward(_Operands(**operands), gate)


def _replacement(
    forward: Forward,
    activation: str,
    interleaved: bool,
    transposed: bool,
    alpha: float = 1.702,
    low: float | None = None,
    high: float | None = None,
    **operands: Tensor,
) -> Tensor:
    x, ids, weights, w13, w2, b13, b2 = _Operands(**operands)
    if transposed:
        w13, w2 = transpose(w13, 1, 2), transpose(w2, 1, 2)
    biases = () if b13 is None else (b13, b2)
    return ops.moe_experts(
        x,
        ids,
        weights,
        w13,
        w2,
        *biases,
        activation=activation,
        interleaved=interleaved,
        alpha=alpha,
        limit=high,
    )


def _fits(low: float | None = None, high: float | None = None, **operands: object) -> str | None:
    """A guard: matrices of tokens, and symmetric limits."""
    wrong = [
        f"`{name}` of {tensor.dim()} dimensions"
        for name, tensor in operands.items()
        if isinstance(tensor, Tensor) and tensor.dim() != (3 if name in ("w13", "w2") else 2)
    ]
    if high is not None and low != -high:
        wrong.append(f"limits {low} and {high}, which are not symmetric")
    return wrong[0] if wrong else None


def _attrs(ids: Tensor, w13: Tensor, activation: str, **_: object) -> dict[str, str | int]:
    return {"experts": len(w13), "top_k": ids.shape[-1], "activation": activation}


def _example(
    forward: Forward, gate: GateForm, layout: WeightLayout, tokens: int, experts: int, device: str
) -> Example:
    # A pattern of transformers is traced for one number of experts; no other size is equal to it.
    k, width, inner = (3, 40, 56) if experts not in (3, 40, 56, 112, tokens) else (11, 72, 88)
    of_w13, of_w2 = (2 * inner, width), (width, inner)
    if layout.transposed:
        of_w13, of_w2 = of_w13[::-1], of_w2[::-1]
    example = partial(tensor_example, device=device)
    limits = {"low": -3.5, "high": 6.5} if gate.limited else {}
    return {
        "x": example(tokens, width),
        "ids": example(tokens, k, dtype=torch.int64),
        "weights": example(tokens, k, dtype=OneOf(torch.float32, torch.bfloat16)),
        "w13": example(experts, *of_w13),
        "w2": example(experts, *of_w2),
        "forward": forward,
        "activation": gate.activation,
        "interleaved": gate.interleaved,
        "transposed": layout.transposed,
        "b13": example(experts, 2 * inner) if layout.biased else None,
        "b2": example(experts, width) if layout.biased else None,
        **({"alpha": 1.3} if gate.activation == "swiglu_oai" else {}),
        **limits,
    }


# Function of transformers, or "" for experts that are written out; layout, tokens, experts, device.
_Key = tuple[str, WeightLayout, int, int, str]


@cache
def _case(key: _Key, gate: GateForm) -> Case:
    forward, layout, tokens, experts, device = key
    of_transformers = partial(_transformers_forward, forward, experts, layout.transposed)
    arguments: Example = {
        "forward": of_transformers if forward else _written_out,
        "gate": gate,
        "layout": layout,
        "tokens": tokens,
        "experts": experts,
        "device": "cpu" if device == "cpu" else "meta",
    }
    variant = forward.removesuffix("_experts_forward") or "written out"
    return Case(f"{variant}, {gate.activation}", arguments, gate.needs)


def _cases(index: Index) -> Sequence[Case]:
    """The cases for the layouts and numbers of a graph. Limited gates come first: without their
    limits they are not what the others compute.
    """
    keys = list(_gathered(index))
    if TRANSFORMERS in sys.modules:  # else no graph has its functions
        keys += [*_grouped(index), *_batched(index)]
    return [_case(key, gate) for key, gate in product(keys, _GATES)]


def _grouped(index: Index) -> Iterator[_Key]:
    """grouped_mm of transformers, whose pattern has the number of experts."""
    layouts = {
        WeightLayout(call(call(node).operands[1]).op != "permute", _is_biased(node))
        for node in index["_grouped_mm"]
    }
    counted = {(call(node).attrs["bins"], value(node).device.type) for node in index["histc"]}
    for layout, (experts, device) in product(sorted(layouts), sorted(counted)):
        assert isinstance(experts, int)
        yield "grouped_mm_experts_forward", layout, 5, experts, device


def _batched(index: Index) -> Iterator[_Key]:
    """batched_mm of transformers."""
    layouts = {
        WeightLayout(call(call(node).operands[1]).op == "index", any(map(_is_biased, node.users)))
        for node in index["bmm"]
        if any(call(each).op == "index" for each in call(node).operands)
    }
    for layout, experts in product(sorted(layouts), sorted(_clamped(index) or {13})):
        yield "batched_mm_experts_forward", layout, 5, experts, "meta"


def _clamped(index: Index) -> set[int]:
    """Numbers of experts to which ids are clamped, as transformers 5.17 does."""
    sizes = [value(call(node).operands[0]).shape[0] for node in index["index"]]
    clamps = [call(node).attrs.get("max") for node in index["clamp"]]
    numbers = {highest + 1 for highest in clamps if isinstance(highest, int)}
    return {size for size in sizes if isinstance(size, int) and size in numbers}


def _gathered(index: Index) -> Iterator[_Key]:
    """Experts that are written out. One token is another graph: einsum leaves sizes of 1 out."""
    weights = [node for node in index["index"] if value(node).dim() == 4]
    biased = any(value(node).dim() == 3 and _is_biased(node) for node in index["index"])
    for tokens in sorted({1 if known_equal(value(node).shape[0], 1) else 5 for node in weights}):
        yield "", WeightLayout(False, biased), tokens, 13, "meta"


def _is_biased(node: Node) -> bool:
    return any(call(user).op == "add" for user in node.users)


MOE_EXPERTS = Rewrite(
    "moe_experts",
    _pattern,
    _replacement,
    _example,
    guard=_fits,
    attrs=_attrs,
    needs={"aten::index": {}},
    cases=(),
    cases_in=_cases,
)


def ids_as_chosen(gm: GraphModule, context: Context) -> Iterator[Fired]:
    """Let experts, and what sends tokens to them, read the int32 ids of the router, without a cast
    to int64.
    """
    for node in gm.graph.nodes:
        op = op_of(node.target)
        if op is None or not op.kind & (Kind.EXPERTS | Kind.COLLECTIVE):
            continue
        ids = op.bind(*node.args, **node.kwargs).get("ids")
        if not isinstance(ids, Node) or value(ids).dtype != torch.int64:
            continue
        cast = call(ids)
        if cast.op == "cast" and value(cast.operands[0]).dtype == torch.int32:
            node.replace_input_with(ids, cast.operands[0])
            yield Fired("ids_as_chosen", node)
