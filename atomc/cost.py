"""Bytes and flops of a graph as formulas of its sizes: what it must move and compute, whatever runs it.

A node reads each operand once and writes each result once; views cost nothing. Pointwise nodes that meet are one kernel
(the glue compiler fuses them), so that only what enters and leaves such a group counts.

Symbols: T tokens of the step, R rows of which logits are wanted, S sequences, C tokens of context a sequence, the new
ones included. Other sizes keep the names that they have in the graph.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from atomc.graph.canonical import input_name, value
from atomc.graph.expressions import expression
from atomc.graph.provenance import layer_of, module_path, source_line
from atomc.op import op_of

T, R, S, C = sympy.symbols("T R S C", positive=True, integer=True)
# Ops that hand on memory, or only check.
FREE = frozenset({
    "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "transpose", "t", "permute", "slice", "select",
    "split", "split_with_sizes", "chunk", "unbind", "alias", "detach", "as_strided", "unflatten", "flatten",
    "_assert_scalar", "sym_size", "sym_constrain_range_for_size", "lift_fresh_copy", "empty", "getitem",
})  # fmt: skip
NARROWING = frozenset({"slice", "select", "split", "split_with_sizes", "chunk", "unbind", "getitem"})
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "_grouped_mm"})
SCALED_PRODUCTS = frozenset({
    "scaled_linear_fp8", "scaled_linear_fp8_block", "scaled_linear_int8", "linear_w4a16", "linear_mxfp4",
})  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """Bytes moved and floating-point operations, in the module's symbols."""

    bytes: sympy.Expr
    flops: sympy.Expr

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes + other.bytes, self.flops + other.flops)

    def at(self, **sizes: int) -> tuple[float, float]:
        """(bytes, flops) for these sizes: `cost.at(T=64, S=64, C=1024, R=64)`.

        Raises ValueError naming the sizes that are missing.
        """
        values = {sympy.Symbol(name, positive=True, integer=True): size for name, size in sizes.items()}
        found = self.bytes.subs(values), self.flops.subs(values)
        missing = found[0].free_symbols | found[1].free_symbols
        if missing:
            raise ValueError(f"cost: sizes {sorted(map(str, missing))} are missing, given were {sorted(sizes)}")
        return float(found[0]), float(found[1])


NOTHING = Cost(sympy.Integer(0), sympy.Integer(0))


@dataclass(frozen=True)
class NodeCost:
    """The cost of one kernel's worth of work. `op` is an op's name, an ATen name, or "glue" for a fused group.

    nodes  those of the group, in the order of the graph
    apart  the bytes if each of them ran alone
    """

    op: str
    module_path: str
    layer: int | None
    source: str
    cost: Cost
    nodes: tuple[Node, ...]
    apart: sympy.Expr


def cost_of(node: Node, sizes: Mapping[sympy.Symbol, sympy.Expr] | None = None) -> Cost:
    """What one node must move and compute; `sizes` renames the graph's symbols (see `symbols_of`)."""
    if node.op != "call_function" or name_of(node) in FREE:
        return NOTHING
    rule = _RULES.get(name_of(node), _read_and_write)
    found = rule(node)
    renamed = sizes or {}
    return Cost(simple(found.bytes.xreplace(renamed)), simple(found.flops.xreplace(renamed)))


def graph_costs(gm: GraphModule) -> list[NodeCost]:
    """The costs of a graph before lowering, in its order; pointwise nodes that meet are one entry "glue"."""
    sizes = symbols_of(gm.graph)
    found: list[NodeCost] = []
    for group in groups(gm.graph):
        first = group[0]
        if len(group) == 1:
            name, cost = name_of(first), cost_of(first, sizes)
            apart = cost.bytes
        else:
            name, cost = "glue", _together(group, sizes)
            apart = simple(sympy.Add(*[_read_and_write(node).bytes for node in group]).xreplace(sizes))
        if cost != NOTHING:
            path = module_path(first)
            found.append(NodeCost(name, path, layer_of(path), source_line(first), cost, tuple(group), apart))
    return found


def total(costs: Iterable[NodeCost]) -> Cost:
    """The sum over a graph."""
    found = list(costs)
    return Cost(simple(sympy.Add(*[c.cost.bytes for c in found])), simple(sympy.Add(*[c.cost.flops for c in found])))


def symbols_of(graph: Graph) -> dict[sympy.Symbol, sympy.Expr]:
    """The graph's own symbols -> T, R and S, where its inputs tell which is which."""
    found: dict[sympy.Symbol, sympy.Expr] = {}
    for node in graph.find_nodes(op="placeholder"):
        shape = list(value(node).shape) if isinstance(value(node), Tensor) else []
        name = input_name(node).rpartition(".")[2]
        if name in ("input_ids", "positions") and len(shape) == 1:
            _name(found, shape[-1], T)
        elif name == "input_ids" and len(shape) == 2:  # [batch, tokens]: a step has batch * tokens
            _name(found, shape[0], S)
            if isinstance(shape[0], int) and shape[0] == 1:
                _name(found, shape[1], T)
        elif name == "logits_rows":
            _name(found, shape[0], R)
        elif name == "seq_lens":
            _name(found, shape[0], S)
        elif name.startswith("slots_"):
            _name(found, shape[0], T)
    return found


def _name(found: dict[sympy.Symbol, sympy.Expr], size: Any, symbol: sympy.Symbol) -> None:
    expr = expression(size)
    if isinstance(expr, sympy.Symbol) and symbol not in found.values():
        found.setdefault(expr, symbol)


def name_of(node: Node) -> str:
    """"rms_norm", "mm", "getitem"."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return str(schema.name).partition("::")[2]
    if node.target is operator.getitem:
        return "getitem"
    return str(node.meta.get("op") or getattr(node.target, "__name__", node.target))


@functools.lru_cache(4096)  # layers are alike
def simple(found: sympy.Expr) -> sympy.Expr:
    return sympy.expand(found) if not found.is_number else found


def _numel(tensor: Tensor) -> sympy.Expr:
    return sympy.prod([expression(size) for size in tensor.shape])


def bytes_of(given: Any) -> sympy.Expr:
    """Of a tensor, or of all tensors of a tuple; a number has none."""
    if isinstance(given, Tensor):
        return _numel(given) * given.element_size()
    if isinstance(given, tuple | list):
        return sympy.Add(*[bytes_of(item) for item in given])
    return sympy.Integer(0)


def _operands(node: Node) -> list[Tensor]:
    """The tensors a node reads, each once, as large as they lie in memory."""
    return [value(given) for given in map(shown, node.all_input_nodes) if isinstance(value(given), Tensor)]


def _results(node: Node) -> list[Tensor]:
    found = value(node)
    return [item for item in (found if isinstance(found, tuple | list) else [found]) if isinstance(item, Tensor)]


def _read_and_write(node: Node) -> Cost:
    out = _results(node)
    moved = bytes_of(_operands(node)) + bytes_of(out)
    return Cost(moved, sympy.Add(*[_numel(result) for result in out]))


def _product(node: Node) -> Cost:
    """A matrix product: the last dimension of its first matrix is summed over."""
    matrices = [value(given) for given in node.all_input_nodes if value(given).dim() >= 2]
    depth = expression(matrices[0].shape[-1])
    return Cost(_read_and_write(node).bytes, 2 * depth * sympy.Add(*[_numel(out) for out in _results(node)]))


def _scaled_product(node: Node) -> Cost:
    """A product with a weight in few bits: as many sums as inputs, of which a byte of mxfp4 holds two."""
    depth = expression(_argument(node, "x").shape[-1])
    if name_of(node) == "linear_mxfp4" and _argument(node, "x_scale") is not None and not _is_fp8(_argument(node, "x")):
        depth *= 2
    return Cost(_read_and_write(node).bytes, 2 * depth * sympy.Add(*[_numel(out) for out in _results(node)]))


def _is_fp8(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point and tensor.element_size() == 1


def _lookup(node: Node) -> Cost:
    """Reads the indices, and of the table only the rows that it writes."""
    indices = [tensor for tensor in _operands(node) if not tensor.dtype.is_floating_point]
    return Cost(bytes_of(indices) + 2 * bytes_of(_results(node)), sympy.Integer(0))


def _argument(node: Node, name: str) -> Any:
    op = op_of(node.target)
    assert op is not None
    bound = op.signature.bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    given = bound.arguments[name]
    return value(given) if isinstance(given, Node) else given


def _attention(node: Node) -> Cost:
    q, k, v = (_argument(node, name) for name in "qkv")
    rows, keys = expression(q.shape[-3]), expression(k.shape[-3])
    others = sympy.prod([expression(size) for size in q.shape[:-3]])
    pairs = rows * keys
    if _argument(node, "causal"):
        pairs = rows * (keys - (rows - 1) / sympy.Integer(2))
    window = _argument(node, "window")
    if window:
        pairs = sympy.Min(pairs, rows * window)
    heads, width = expression(q.shape[-2]), expression(q.shape[-1]) + expression(v.shape[-1])
    return Cost(bytes_of([q, k, v]) + bytes_of(_results(node)), 2 * others * pairs * heads * width)


def _paged_attention(node: Node) -> Cost:
    """Each sequence reads its context once, and each new token sees what lies before it."""
    q, k_cache, v_cache = (_argument(node, name) for name in ("q", "k_cache", "v_cache"))
    tokens = expression(q.shape[0])
    sequences = expression(_argument(node, "seq_lens").shape[0])
    context: sympy.Expr = C
    before = C - (tokens / sequences - 1) / 2
    window = _argument(node, "window")
    if window:
        context, before = sympy.Min(C, window + tokens / sequences), sympy.Min(before, window)
    per_token = sympy.Add(*[expression(c.shape[2]) * expression(c.shape[3]) * c.element_size() for c in (k_cache, v_cache)])
    heads, width = expression(q.shape[1]), expression(q.shape[2]) + expression(v_cache.shape[3])
    moved = bytes_of(q) + bytes_of(_results(node)) + sequences * context * per_token
    return Cost(moved, 2 * tokens * before * heads * width)


def _state_write(node: Node) -> Cost:
    """Reads its rows and writes as many into the caches, which are not read."""
    op = op_of(node.target)
    assert op is not None
    rows = [value(given) for name, given in op.signature.bind(*node.args, **node.kwargs).arguments.items()
            if isinstance(given, Node) and name not in op.mutates and isinstance(value(given), Tensor)]  # fmt: skip
    slots = expression(_argument(node, "slots").shape[0])
    caches = [_argument(node, name) for name in op.mutates]
    written = [slots * sympy.prod([expression(size) for size in cache.shape[2:]]) * cache.element_size()
               for cache in caches if isinstance(cache, Tensor) and cache.dim() >= 3]  # fmt: skip
    out = _results(node)
    return Cost(bytes_of(rows) + bytes_of(out) + sympy.Add(*written), sympy.Add(*[_numel(result) for result in out]))


def _product_in_few_bits(node: Node) -> Cost:
    """A product of codes, two a byte where these are bytes: each row of x with each row of the weight."""
    x, weight = _argument(node, "x"), _argument(node, "weight")
    depth = expression(x.shape[-1]) * (2 if x.element_size() == 1 and not x.dtype.is_floating_point else 1)
    rows = _numel(x) / expression(x.shape[-1])
    return Cost(_read_and_write(node).bytes, 2 * rows * depth * expression(weight.shape[-2]))


def _product_and_write(node: Node) -> Cost:
    """Queries of each head by its weight, and a write into the state."""
    latent = expression(_argument(node, "weight").shape[1])
    return Cost(_state_write(node).bytes, 2 * _numel(_argument(node, "q_nope")) * latent)


_RULES: dict[str, Callable[[Node], Cost]] = {
    **dict.fromkeys(PRODUCTS, _product),
    **dict.fromkeys(SCALED_PRODUCTS, _scaled_product),
    "embedding": _lookup,
    "index_select": _lookup,
    "attention": _attention,
    "paged_attention": _paged_attention,
    **dict.fromkeys(("kv_write", "rope_kv_write", "qk_norm_rope_kv_write", "mla_kv_write", "mla_rope_kv_write"),
                    _state_write),
    "bmm_rope_kv_write": _product_and_write,
    **dict.fromkeys(("linear_split_cat", "scaled_bmm_fp8", "bmm_mxfp4"), _product_in_few_bits),
}


def _pointwise(node: Node) -> bool:
    """Whether the glue compiler fuses it with its neighbours."""
    return _is_kernel(node) and op_of(node.target) is None and name_of(node) not in _RULES


def groups(graph: Graph) -> list[list[Node]]:
    """The nodes that cost something, each alone or, if pointwise, with the pointwise ones that it is connected to.

    A kernel between two pointwise nodes keeps them apart: they lie at different depths, counted in kernels.
    """
    group_of: dict[Node, list[Node]] = {}
    found: list[list[Node]] = []
    depth: dict[Node, int] = {}
    for node in graph.nodes:
        given = node.all_input_nodes
        depth[node] = max((depth[n] + (n not in group_of and _is_kernel(n)) for n in given), default=0)
        # Asked of its first node, because the group of a view may have joined another since.
        near = [group_of[group_of[n][0]] for n in given if n in group_of and depth[n] == depth[node]]
        if _pointwise(node):
            mine: list[Node] = near[0] if near else []
            for other in near:
                if group_of[other[0]] is not mine:
                    mine += other
                    group_of.update(dict.fromkeys(other, mine))
            mine.append(node)
            group_of[node] = mine
            found += [mine] * (not near)
        elif _is_kernel(node):
            found.append([node])
        elif near:  # a view belongs to the group of what it shows
            group_of[node] = near[0]
    return [group for group in found if group_of.get(group[0], group) is group]  # without those that joined another


def _is_kernel(node: Node) -> bool:
    return node.op == "call_function" and name_of(node) not in FREE and bool(_results(node))


def _together(group: list[Node], sizes: Mapping[sympy.Symbol, sympy.Expr]) -> Cost:
    """A fused group: what enters it is read once, what leaves it is written once."""
    inside = set(group)
    entering = {shown(given) for node in group for given in node.all_input_nodes if source_of(given) not in inside}
    leaving = {node for node in group if any(user not in inside for user in _readers(node))}
    moved = bytes_of([value(node) for node in entering | leaving])
    flops = sympy.Add(*[_numel(out) for node in group for out in _results(node)])
    return Cost(simple(moved.xreplace(dict(sizes))), simple(flops.xreplace(dict(sizes))))


def shown(node: Node) -> Node:
    """What a view shows: the node that made the memory, or the view that leaves a part of it out."""
    while node.op == "call_function" and name_of(node) in FREE - NARROWING and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def source_of(node: Node) -> Node:
    """The node that made the memory which a view shows."""
    while node.op == "call_function" and name_of(node) in FREE and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _readers(node: Node) -> Iterable[Node]:
    """Who reads a node, through views."""
    for user in node.users:
        if user.op == "call_function" and name_of(user) in FREE:
            yield from _readers(user)
        else:
            yield user
