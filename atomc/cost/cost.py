"""Cost model: bytes moved and flops of a graph as formulas of its sizes, independent of the kernels
that run it.

A node reads each operand once and writes each result once; views cost nothing. Connected pointwise
nodes are one kernel (the glue compiler fuses them): only the inputs and outputs of such a group
count.

Symbols: T tokens of the step, R rows of logits, S sequences, C tokens of context of a sequence,
including the new ones, N processes of a group. Other sizes keep the names that they have in the
graph.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import sympy
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from atomc.cost.router import num_experts_of, router_of
from atomc.graph.canonical import Value, call, value
from atomc.graph.expressions import expression
from atomc.graph.op_call import op_call
from atomc.graph.provenance import layer_of, module_path, source_line
from atomc.graph.step_symbols import C, N, symbols_of
from atomc.graph.views import ZERO_COST, name_of, schema_name, storage_node, view_base
from atomc.ops.op import op_of
from atomc.ops.op_cost import Formula, OpCall, Operand, Work, lookup, read_and_write
from atomc.ops.op_traits import Kind

# Matrix products of PyTorch -> the index of the operand that is the first matrix.
PRODUCTS = {
    "aten::mm": 0,
    "aten::addmm": 1,
    "aten::bmm": 0,
    "aten::baddbmm": 1,
    "aten::linear": 0,
    "aten::matmul": 0,
    "aten::_grouped_mm": 0,
}
LOOKUPS = frozenset({"aten::embedding", "aten::index_select"})
NEVER_FUSED = PRODUCTS.keys() | LOOKUPS
COLLECTIVES = "_c10d_functional::"  # of PyTorch, not recognized as one of our ops


@dataclass(frozen=True)
class Cost:
    """Bytes moved and floating-point operations, as formulas of the module's symbols."""

    bytes: sympy.Expr
    flops: sympy.Expr


NOTHING = Cost(sympy.Integer(0), sympy.Integer(0))


@dataclass(frozen=True)
class NodeCost:
    """The cost of one kernel. `op`: an op, an ATen name, or "glue" for pointwise nodes.

    nodes  of the kernel, in the order of the graph
    apart  the bytes moved if each node were a kernel of its own
    rate   of its matrix products, relative to the bf16 peak
    sent   the bytes that it sends to other processes
    """

    op: str
    module_path: str
    layer: int | None
    source: str
    cost: Cost
    nodes: tuple[Node, ...]
    apart: sympy.Expr
    rate: int
    sent: sympy.Expr


def _work(node: Node) -> Work:
    """(bytes, flops) in the symbols of the graph."""
    op, here = op_of(node.target), call_of(node)
    if op is not None:
        return op.cost(here)
    if is_product(node):
        return read_and_write(here)[0], _product_flops(node)
    return lookup(here) if schema_name(node) in LOOKUPS else read_and_write(here)


def call_of(node: Node) -> OpCall:
    """The call of a node with symbolic sizes; the call of an ATen op has no named arguments."""
    called = op_call(node)
    values = {} if called is None else called.values
    arguments = {name: _operand_of(x) if isinstance(x, Tensor) else x for name, x in values.items()}
    reads, results = (
        tuple(map(_operand_of, tensors)) for tensors in (_reads(node), _results(node))
    )
    mutates = () if called is None else called.op.mutates
    return OpCall(arguments, mutates, reads, results, C, _chosen_among(node))


def _chosen_among(node: Node) -> int | None:
    """Among how many experts the ids of an op of experts choose, if it has fewer of them."""
    called = op_call(node)
    if called is None or Kind.EXPERTS not in called.op.kind:
        return None
    router = router_of(called["ids"])
    among = None if router is None else num_experts_of(router)
    held = value(called["w2"]).shape[0]
    fewer = among is not None and isinstance(held, int) and held < among
    return among if fewer else None


def _operand_of(tensor: Tensor) -> Operand:
    return Operand(tuple(map(expression, tensor.shape)), tensor.dtype)


def graph_costs(gm: GraphModule) -> list[NodeCost]:
    """The costs of a graph before lowering; connected pointwise nodes are one entry "glue"."""
    sizes = symbols_of(gm.graph)

    def step_formula(formula: Formula) -> sympy.Expr:
        """The formula in the symbols of a step, simplified."""
        return simplified(sympy.sympify(formula).xreplace(sizes))

    costs: list[NodeCost] = []
    for group in groups(gm.graph):
        first, fused = group[0], len(group) > 1
        moved, flops = _fused_work(group) if fused else _work(first)
        cost = Cost(step_formula(moved), step_formula(flops))
        if cost == NOTHING:
            continue
        path = module_path(first)
        costs.append(
            NodeCost(
                op="glue" if fused else name_of(first),
                module_path=path,
                layer=layer_of(path),
                source=source_line(first),
                cost=cost,
                nodes=tuple(group),
                apart=(
                    step_formula(sympy.Add(*[read_and_write(call_of(node))[0] for node in group]))
                    if fused
                    else cost.bytes
                ),
                rate=_rate(first),
                sent=step_formula(_sent(first)),
            )
        )
    return costs


def _sent(node: Node) -> Formula:
    """The bytes that one node sends to other processes."""
    op = op_of(node.target)
    return 0 if op is None or op.sent is None else op.sent(call_of(node), N)


def _rate(node: Node) -> int:
    """The rate of the products of a linear with a quantized weight; 1 for all other nodes."""
    called = op_call(node)
    if called is None or called.op.quantized_weight is None:
        return 1
    args = called.values
    weight = called.op.weight_of(args)
    assert weight is not None
    return weight.rate(args) if callable(weight.rate) else weight.rate


def is_product(node: Node) -> bool:
    """Whether it is a matrix product of PyTorch."""
    return schema_name(node) in PRODUCTS


@functools.lru_cache(4096)  # layers repeat the same expressions
def simplified(formula: sympy.Expr) -> sympy.Expr:
    return sympy.expand(formula) if not formula.is_number else formula


def _numel(tensor: Tensor) -> sympy.Expr:
    return sympy.prod([expression(size) for size in tensor.shape])


def bytes_of(result: Value) -> sympy.Expr:
    """The size of a tensor, or of all tensors of a tuple, in bytes; 0 for a number."""
    if isinstance(result, Tensor):
        return _numel(result) * result.element_size()
    if isinstance(result, tuple | list):
        return sympy.Add(*[bytes_of(item) for item in result])
    return sympy.Integer(0)


def _reads(node: Node) -> list[Tensor]:
    """The tensors that a node reads, with the sizes that they have in memory."""
    return [
        value(source)
        for source in map(view_base, node.all_input_nodes)
        if isinstance(value(source), Tensor)
    ]


def _results(node: Node) -> list[Tensor]:
    result = value(node)
    return [
        item
        for item in (result if isinstance(result, tuple | list) else [result])
        if isinstance(item, Tensor)
    ]


def _product_flops(node: Node) -> sympy.Expr:
    """The last dimension of the first matrix is the reduction dimension."""
    first = value(call(node).operands[PRODUCTS[schema_name(node)]])
    return 2 * expression(first.shape[-1]) * sympy.Add(*[_numel(out) for out in _results(node)])


def _pointwise(node: Node) -> bool:
    """Whether the glue compiler fuses it with its neighbours."""
    name = schema_name(node)
    ours = op_of(node.target) is not None
    fuses = name not in NEVER_FUSED and not name.startswith(COLLECTIVES)
    return _is_kernel(node) and not ours and fuses


def groups(graph: Graph) -> list[list[Node]]:
    """The nodes with a cost: pointwise nodes in groups of connected ones, each other node alone.

    Pointwise nodes with a kernel between them are in different groups: their depths, counted in
    kernels, differ.
    """
    group_of: dict[Node, list[Node]] = {}
    all_groups: list[list[Node]] = []
    depth: dict[Node, int] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        depth[node] = max(
            (depth[n] + (n not in group_of and _is_kernel(n)) for n in inputs), default=0
        )
        # By the first node of each group: the group of a view may have been merged into another
        # one.
        near = [
            group_of[group_of[n][0]] for n in inputs if n in group_of and depth[n] == depth[node]
        ]
        if _pointwise(node):
            mine: list[Node] = near[0] if near else []
            for other in near:
                if group_of[other[0]] is not mine:
                    mine += other
                    group_of.update(dict.fromkeys(other, mine))
            mine.append(node)
            group_of[node] = mine
            all_groups += [mine] * (not near)
        elif _is_kernel(node):
            all_groups.append([node])
        elif near:  # a view belongs to the group of its base
            group_of[node] = near[0]
    return [
        group for group in all_groups if group_of.get(group[0], group) is group
    ]  # without merged groups


def _is_kernel(node: Node) -> bool:
    return node.op == "call_function" and name_of(node) not in ZERO_COST and bool(_results(node))


def _fused_work(group: list[Node]) -> Work:
    """(bytes, flops) of a fused group: each input is read once, each output is written once."""
    inside = set(group)
    entering = {
        view_base(source)
        for node in group
        for source in node.all_input_nodes
        if storage_node(source) not in inside
    }
    leaving = {node for node in group if any(user not in inside for user in _readers(node))}
    moved = bytes_of([value(node) for node in entering | leaving])
    return moved, sympy.Add(*[_numel(out) for node in group for out in _results(node)])


def _readers(node: Node) -> Iterable[Node]:
    """The readers of a node, through views."""
    for user in node.users:
        if user.op == "call_function" and name_of(user) in ZERO_COST:
            yield from _readers(user)
        else:
            yield user
