"""Remove redundant nodes: equal nodes become one; inverse views, copies and `x * 1` are removed.

Returned tensors keep their storage: two results that did not share storage before do not share it
after.
"""

import operator
from collections.abc import Callable, Hashable

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument

from atomc.graph.canonical import Call, call, value
from atomc.graph.mutation import mutated, storage
from atomc.graph.sizes import known_equal, same_shape
from atomc.graph.strides import Values, same_strides, values_behind
from atomc.graph.variable_float import VariableFloat
from atomc.graph.views import permuted_back
from atomc.rewriting.graph_pass import Context
from atomc.rewriting.matching.attributes import same_attr
from atomc.rewriting.rewrite import Fired

_WHOLE = {"start": 0, "end": None, "step": 1}
_RANDOM = torch.Tag.nondeterministic_seeded
# Exact. `x + 0` is exact for integers only: it turns -0.0 into 0.0, as `x - -0.0` does.
_NEUTRAL = {
    "mul": {"other": 1},
    "div": {"other": 1},
    "pow": {"exponent": 1},
    "sub": {"other": 0},
    "add": {"other": 0},
}


def tidy(gm: GraphModule, context: Context) -> list[Fired]:
    """Merge equal nodes, and remove nodes that return their input or have no readers."""
    return drop_proven_asserts(gm.graph) + share_equal_nodes(gm.graph) + cancel_no_ops(gm.graph)


def drop_proven_asserts(graph: Graph) -> list[Fired]:
    """Remove the assertions of `torch.export` about metadata that fake values prove: they would be
    readers of what a rewrite replaces.
    """
    fired = []
    target = torch.ops.aten._assert_tensor_metadata.default
    for node in graph.find_nodes(op="call_function", target=target):
        if _is_proven(node):
            graph.erase_node(node)
            fired.append(Fired("tidy", node))
    return fired


def _is_proven(node: Node) -> bool:
    """Whether the asserted tensor has the asserted metadata."""
    here = call(node)
    asserted = value(here.operands[0])
    metadata = {
        "size": tuple(asserted.shape),
        "stride": asserted.stride(),
        "dtype": asserted.dtype,
        "device": asserted.device,
        "layout": asserted.layout,
    }
    return all(
        same_attr(here.attrs[name], is_so) for name, is_so in metadata.items() if name in here.attrs
    )


def _seen_outside(graph: Graph) -> set[Node]:
    """The nodes whose storage the program returns, in whole or in part, or that `reinplace` may
    compute in the storage of an input.
    """
    nodes = {storage(node) for node in graph.output_node().all_input_nodes}
    nodes |= {
        storage(copy.args[1])
        for copy in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    }
    for node in list(nodes):
        while node.target is operator.getitem:
            node = storage(node.args[0])  # type: ignore[arg-type]
            nodes.add(node)
    return nodes


def share_equal_nodes(graph: Graph) -> list[Fired]:
    """Common subexpression elimination: replace a node by an earlier one that computes the same."""
    first_nodes: dict[Hashable, Node] = {}
    fired = []
    seen = _seen_outside(graph)
    written = {id(target) for node in graph.nodes for target in mutated(node)}
    for node in list(graph.nodes):
        if (
            node.op != "call_function"
            or not _pure(node)
            or any(id(a) in written for a in node.all_input_nodes)
        ):
            continue
        try:
            key = (node.target, _hashable(node.args), _hashable(node.kwargs))
            first = first_nodes.setdefault(key, node)
        except TypeError:  # an argument that cannot be a key: leave the node alone
            continue
        if first is not node and not {first, node} <= seen:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            fired.append(Fired("tidy", node))
            seen |= {first} if node in seen else set()
    return fired


def _pure(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and not target._schema.is_mutable
        and _RANDOM not in target.tags
        and target not in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default)
    )


def _hashable(argument: Argument) -> Hashable:
    if isinstance(argument, list | tuple):
        return tuple(_hashable(part) for part in argument)
    if isinstance(argument, dict):
        return tuple(sorted((name, _hashable(part)) for name, part in argument.items()))
    if isinstance(argument, Node | VariableFloat):
        return argument
    # 1, 1.0 and True are equal keys but not equal arguments, as are 0.0 and -0.0.
    return type(argument), repr(argument) if isinstance(argument, float) else argument


def cancel_no_ops(graph: Graph) -> list[Fired]:
    """Remove nodes that return an existing tensor: inverse transposes, slices and copies of all of
    it, `x * 1`.
    """
    fired = []
    seen, values = _seen_outside(graph), Values(graph)
    for node in list(graph.nodes):
        source = _same_as(node)
        if source is None:
            continue
        moved = not same_strides(value(source), value(node))
        changed = values_behind(node, value(source), values) if moved else {}
        if changed is None:  # it is returned, or a reader needs its strides
            continue
        memory = storage(source)
        if (
            storage(node) is memory
            or node not in seen
            or not (memory.op == "placeholder" or memory in seen)
        ):
            seen |= {memory} if node in seen else set()
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            for reader, new in changed.items():
                reader.meta["val"] = new
            fired.append(Fired("tidy", node))
    return fired


def _same_as(node: Node) -> Node | None:
    """The earlier node whose value a node returns, or None."""
    if node.op != "call_function":
        return None
    here = call(node)
    rule = _GIVES_BACK.get(here.op)
    return rule(node, here) if rule else None


def _cloned(node: Node, here: Call) -> Node | None:
    """The input of a clone with the same strides, as dropout makes in eval mode, or of the clone
    that lifting adds to a norm whose input is not dense, or to transposed heads of attention; or
    heads that only attention reads, of which kernels take any order.
    """
    [source] = here.operands
    lifted = call(source).op == "atom::rms_norm" or _is_transposed_attention(source)
    lifted = lifted or (call(source).op == "permute" and _only_attention_reads(node))
    return source if lifted or same_strides(value(source), value(node)) else None


def _is_transposed_attention(node: Node) -> bool:
    here = call(node)
    return here.op == "permute" and call(here.operands[0]).op == "atom::attention"


def _only_attention_reads(heads: Node) -> bool:
    """Whether all readers are transposes to tokens before heads, for queries, keys or values."""
    [source] = call(heads).operands
    return known_equal(value(source).stride(-1), 1) and all(
        call(node).op == "permute"
        and all(
            call(reader).op == "atom::attention" and node not in call(reader).operands[3:]
            for reader in node.users
        )
        for node in heads.users
    )


def _overwritten(node: Node, here: Call) -> Node | None:
    """The value that overwrites a whole tensor."""
    _, written = here.operands
    return written if _alike(written, node) else None


def _same_view(node: Node, here: Call) -> Node | None:
    return here.operands[0] if same_shape(value(node), value(here.operands[0])) else None


def _whole_slice(node: Node, here: Call) -> Node | None:
    return (
        here.operands[0]
        if all(same_attr(here.attrs[name], of_all) for name, of_all in _WHOLE.items())
        else None
    )


def _neutral(node: Node, here: Call) -> Node | None:
    """The operand of arithmetic with the neutral constant."""
    constants = {
        name: attr
        for name, attr in here.attrs.items()
        if isinstance(attr, int | float) and name != "alpha"
    }
    if len(here.operands) != 1 or constants != _NEUTRAL[here.op] or "rounding_mode" in here.attrs:
        return None
    result = value(node)
    moves_zero = here.op == "add" or "-0.0" in map(str, constants.values())
    exact = not moves_zero or not (result.is_floating_point() or result.is_complex())
    return here.operands[0] if exact and _alike(here.operands[0], node) else None


def _only_part(node: Node, here: Call) -> Node | None:
    """The only part of a cat that is not empty: with partial rotary embedding, the rest may be
    empty.
    """
    parts = [part for part in here.operands if not known_equal(value(part).numel(), 0)]
    return parts[0] if len(parts) == 1 and _alike(parts[0], node) else None


def _alike(a: Node, b: Node) -> bool:
    return bool(value(a).dtype == value(b).dtype) and same_shape(value(a), value(b))


# Op -> a function that returns the operand whose value a node returns, or None.
_GIVES_BACK: dict[str, Callable[[Node, Call], Node | None]] = {
    "alias": lambda node, here: here.operands[0],
    "clone": _cloned,
    "cat": _only_part,
    "copy": _overwritten,
    "view": _same_view,
    "slice": _whole_slice,
    "permute": lambda node, here: permuted_back(node),
    **dict.fromkeys(_NEUTRAL, _neutral),
}
