"""The cache key of a graph from Dynamo, as named parts: the graph, its inputs, and the parts equal
for every program.

Values of weights are not included: compiled code reads them at each call.
"""

import enum
import operator
import re

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import Argument, Target

from atomc.cache.artifact import Uncacheable
from atomc.cache.fingerprint import (
    PLAIN_TENSORS,
    Parts,
    digest,
    digest_of_values,
    environment_parts,
    input_kind,
    source_of,
    tensor_layout,
)
from atomc.graph.provenance import module_path, source_line
from atomc.rewriting.graph_pass import Context
from atomc.torch_compat.tracing import size_facts, source_name

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def parts_of(gm: GraphModule, context: Context, floats: dict[int, float]) -> Parts:
    """The parts for one graph from Dynamo. Raises Uncacheable if an object in it cannot be
    identified.
    """
    lines: list[str] = []
    places: list[str] = []
    _describe(gm, lines, places)
    kind = f"runtime{', weights owned' * context.owned}" if context.paged else "torch.compile"
    parts = {
        "kind of program": kind if context.lora is None else f"{kind}, {context.lora}",
        **environment_parts(context.options, context.platform),
    }
    placeholders = gm.graph.find_nodes(op="placeholder")
    first: dict[int, int] = {}
    for i, each in enumerate(context.inputs):
        first.setdefault(id(each), i)
    for i, (node, each) in enumerate(zip(placeholders, context.inputs, strict=True)):
        fake = _value(node.meta.get("example_value"))
        parts[f"input {i}"] = (
            f"{source_name(node)}: {fake}, first {first[id(each)]}, {input_kind(each)}"
        )
    parts["sizes"] = "; ".join(size_facts(gm.graph))
    parts["floats"] = repr(sorted(floats.items()))
    parts["graph"] = digest("\n".join(lines))
    parts["source lines"] = digest("\n".join(places))
    return parts


def _describe(gm: GraphModule, lines: list[str], places: list[str]) -> None:
    """Append a line per node of the graph and its subgraphs, and each node's line in the user's
    program.
    """
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            lines.append(f"{node.name} = {_attribute(gm, node, lines, places)}")
        elif node.op != "placeholder":
            target = _target(node.target)
            lines.append(
                f"{node.name} = {node.op} {target} {_spell(node.args)} {_spell(node.kwargs)} "
                f"{module_path(node)}"
            )
            places.append(source_line(node))
        else:
            lines.append(f"{node.name} = input")


def _attribute(gm: GraphModule, node: Node, lines: list[str], places: list[str]) -> str:
    constant = operator.attrgetter(str(node.target))(gm)
    if isinstance(constant, GraphModule):
        lines.append("{")
        _describe(constant, lines, places)
        return "}"
    if type(constant) in PLAIN_TENSORS and not constant.is_meta:
        return f"{tensor_layout(constant)} {digest_of_values(constant)}"
    raise Uncacheable(f"{node.target} in the graph is a {type(constant).__name__}")


def _target(target: Target) -> str:
    if isinstance(target, str) or type(target).__module__ == "torch._ops":
        return str(target)
    qualname = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if qualname is None:  # such as a functools.partial
        raise Uncacheable(f"a {type(target).__name__} is called in the graph")
    owner = getattr(target, "__objclass__", target)  # methods of C have no module
    module = getattr(owner, "__module__", None)
    name = f"{module or ''}.{qualname}"
    is_from_library = (module or "torch").partition(".")[0] in (
        "torch",
        "_operator",
        "builtins",
        "math",
        "einops",
    )
    return name if is_from_library else f"{name} {source_of(target)}"


def _spell(item: Argument) -> str:
    """The text of an argument, equal for equal arguments in two processes."""
    match item:
        case Node():
            return item.name
        case tuple() | list():
            return f"{type(item).__name__}({', '.join(map(_spell, item))})"
        case dict():
            return "{" + ", ".join(f"{key!r}: {_spell(part)}" for key, part in item.items()) + "}"
        case slice():
            return f"slice{_spell((item.start, item.stop, item.step))}"
        case Tensor():
            return tensor_layout(item)
        case enum.Enum():
            return str(item)
    text = repr(item)
    if _ADDRESS.search(text):
        raise Uncacheable(
            f"a {type(item).__name__} in the graph cannot be compared between processes"
        )
    return f"{type(item).__name__} {text}"


def _value(fake: Argument) -> str:
    return tensor_layout(fake) if isinstance(fake, Tensor) else _spell(fake)
