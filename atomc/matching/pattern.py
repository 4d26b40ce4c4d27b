"""A traced pattern, and a place in a graph where some or all of it was found."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, Node

from atomc.graph.canonical import Capture, call, value
from atomc.graph.expressions import expression
from atomc.report import MissKind
from atomc.torch_compat.tracing import traced_alone


class Index:
    """The nodes of a graph by canonical op."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.nodes: dict[str, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            self.nodes[call(node).op].append(node)

    def __getitem__(self, op: str) -> list[Node]:
        return self.nodes.get(op, [])


class Pattern:
    """A plain function traced once with symbolic sizes. Its example is its specification.

    Equal sizes in the example must be equal at the site, so different things get different sizes. A 16-bit dtype in the
    example stands for the model's dtype, whichever that is. Floats and strings are captured wherever the function uses
    them, ints where the traced number equals the example's (choose an odd one).
    """

    def __init__(self, function: Callable[..., Any], example: Mapping[str, Any], *, sees_through: bool = False,
                 read_together: bool = False):  # fmt: skip
        self.sees_through, self.read_together = sees_through, read_together
        tensors = {name: given for name, given in example.items() if isinstance(given, Tensor)}
        stand_ins = {name: given + 0.7310585 + i if isinstance(given, float) else given
                     for i, (name, given) in enumerate(example.items()) if not isinstance(given, Tensor)}

        def run(*args: Tensor) -> Any:
            return function(**dict(zip(tensors, args, strict=True)), **stand_ins)

        self.graph = traced_alone(run, *tensors.values())
        self.graph.eliminate_dead_code()
        placeholders = self.graph.find_nodes(op="placeholder")
        self.inputs = dict(zip(placeholders, tensors, strict=True))
        returned = self.graph.output_node().args[0]
        self.outputs = cast("list[Node]", list(returned) if isinstance(returned, list | tuple) else [returned])
        self.nodes = [node for node in self.graph.nodes
                      if node.op == "call_function" and isinstance(value(node), Tensor | tuple | list)]
        self.position = {node: i for i, node in enumerate(self.graph.nodes)}
        self.model_dtype = next((value(p).dtype for p in placeholders
                                 if value(p).dtype in (torch.bfloat16, torch.float16)), None)
        captured = {(type(given), given): name for name, given in stand_ins.items()}
        for node in self.nodes:
            attrs = call(node).attrs
            for name, attr in attrs.items():
                attrs[name] = _captured(attr, captured)

    @property
    def typical_input(self) -> str:
        """The first input in the model's dtype."""
        return next((name for p, name in self.inputs.items() if value(p).dtype == self.model_dtype), "x")


def _captured(attr: Any, names: Mapping[tuple[type, Any], str]) -> Any:
    """The attribute, or the number of a tuple, as a Capture if an argument of the pattern decides it."""
    if isinstance(attr, tuple):
        return tuple(_captured(item, names) for item in attr)
    if isinstance(attr, int | float | str) and (type(attr), attr) in names:
        return Capture(names[type(attr), attr])
    return attr


@dataclass
class Site:
    """A (partial) match: pattern nodes -> graph nodes, inputs and captures -> what they are here."""

    pattern: Pattern
    matched: dict[Node, Node] = field(default_factory=dict)
    alias: dict[Node, Node] = field(default_factory=dict)  # a cast that is not there because the dtype is right
    bound: dict[str, Any] = field(default_factory=dict)
    deferred: list[tuple[Node, Node, str, Any, Any]] = field(default_factory=list)  # checked once all is bound
    skipped: list[Node] = field(default_factory=list)  # views seen through

    def at(self, pattern_node: Node) -> Node | None:
        return self.matched.get(pattern_node) or self.alias.get(pattern_node)

    def nodes(self) -> set[Node]:
        return set(self.matched.values()) | set(self.skipped)

    def saved(self) -> tuple[Any, ...]:
        return dict(self.matched), dict(self.alias), dict(self.bound), list(self.deferred), list(self.skipped)

    def restore(self, saved: tuple[Any, ...]) -> None:
        self.matched, self.alias, self.bound, self.deferred, self.skipped = saved

    def outputs(self) -> list[Node]:
        found = [self.at(output) for output in self.pattern.outputs]
        return [node for node in found if node is not None]

    def tensors(self) -> Iterator[tuple[str, Node, Node]]:
        """(input name, pattern placeholder, graph node) of every bound tensor input."""
        for placeholder, name in self.pattern.inputs.items():
            node = self.bound.get(name)
            if isinstance(node, Node) and isinstance(value(node), Tensor):
                yield name, placeholder, node

    def symbols(self) -> dict[sympy.Symbol, Any]:
        """What the sizes of the example are at this site."""
        found: dict[sympy.Symbol, Any] = {}
        for _, placeholder, node in self.tensors():
            for size, actual in zip(reversed(value(placeholder).shape), reversed(value(node).shape), strict=False):
                if isinstance(size, torch.SymInt) and isinstance(expression(size), sympy.Symbol):
                    found.setdefault(expression(size), actual)
        return found

    def model_dtype(self) -> torch.dtype | None:
        return next((value(node).dtype for _, p, node in self.tensors() if value(p).dtype == self.pattern.model_dtype),
                    None)

    def dtype(self, example: torch.dtype) -> torch.dtype:
        """The dtype that an example's dtype stands for here."""
        return (self.model_dtype() or example) if example == self.pattern.model_dtype else example


@dataclass
class Difference:
    """One thing that keeps a pattern from matching. `rank` orders the checks: upstream first."""

    kind: MissKind
    expected: str
    found: str
    node: Node | None
    rank: int = 0
    ops: tuple[str, ...] = ()  # that were expected there
