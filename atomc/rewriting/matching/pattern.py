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
from atomc.report.records import MissKind
from atomc.rewriting.matching.captures import OneOf, capture, differing, stand_ins
from atomc.torch_compat.tracing import trace_with_symbolic_sizes


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
    """A plain function traced with symbolic sizes. Its example is its specification.

    Equal sizes in the example must be equal at the site, so different things get different sizes. A
    16-bit dtype in the example stands for the model's dtype, whichever that is. Floats, strings,
    ints and `OneOf` are captured wherever an op of the pattern has them as an attribute
    (captures.py); whatever else the example holds is handed on as it is: None for an operand that
    is absent, a style, a flag.

    constants  argument -> what the example says of it, where no op of the pattern has it as an
               attribute
    captured   arguments that a site decides freely: those that are not `OneOf`
    choices    input -> the dtypes among which the site decides
    decided_by such a choice -> the argument that says the same
    any_dtype  nodes whose dtype follows from what the site decides, so that it is not compared
    """

    def __init__(
        self,
        function: Callable[..., Any],
        example: Mapping[str, Any],
        *,
        sees_through: bool = False,
        read_together: bool = False,
    ):
        self.sees_through, self.read_together = sees_through, read_together
        arguments, varied = stand_ins(example, 0), stand_ins(example, 1)
        tensors = [name for name, given in arguments.items() if isinstance(given, Tensor)]
        self.arguments = list(arguments)
        self.graph = _traced(function, arguments, tensors)
        self.inputs = dict(zip(self.graph.find_nodes(op="placeholder"), tensors, strict=True))
        self.outputs = _returned(self.graph)
        self.nodes = _calls(self.graph)
        self.position = {node: i for i, node in enumerate(self.graph.nodes)}
        self.choices = {
            p: example[name].follows
            for p, name in self.inputs.items()
            if isinstance(example[name], OneOf)
        }
        self.model_dtype = self._model_dtype()
        others = (
            _calls(_traced(function, varied, tensors))
            if differing(arguments, varied)
            else self.nodes
        )
        found = capture(self.nodes, others, example)
        self.captured = {name for name in found if not isinstance(example[name], OneOf)}
        self.constants = {
            name: given for name, given in arguments.items() if name not in {*found, *tensors}
        }
        self.decided_by = {example[name]: name for name in found - self.captured}
        self.any_dtype = self._of_any_dtype(others)

    def _model_dtype(self) -> torch.dtype | None:
        dtypes = [value(p).dtype for p in self.inputs if p not in self.choices]
        return next((dtype for dtype in dtypes if dtype in (torch.bfloat16, torch.float16)), None)

    def _of_any_dtype(self, others: list[Node]) -> set[Node]:
        # A dtype follows from the op, its attributes and the dtypes of its operands. others: of the
        # trace at turn 1.
        found: set[Node] = set()
        possible = {dtype for choice in self.choices.values() for dtype in choice.values}
        for node, other in zip(self.nodes, others, strict=True):
            here = getattr(value(node), "dtype", None)
            reads = any(
                operand in self.choices or operand in found for operand in call(node).operands
            )
            promotes = reads and here in {None, *possible} and call(node).op != "cast"
            if promotes or (
                here is not None and here not in (value(other).dtype, self.model_dtype)
            ):
                found.add(node)
        return found

    @property
    def typical_input(self) -> str:
        """The first input in the model's dtype."""
        return next(
            (
                name
                for p, name in self.inputs.items()
                if p not in self.choices and value(p).dtype == self.model_dtype
            ),
            "x",
        )


def _traced(
    function: Callable[..., Any], arguments: Mapping[str, Any], tensors: list[str]
) -> Graph:
    rest = {name: given for name, given in arguments.items() if name not in tensors}

    def run(*args: Tensor) -> Any:
        return function(**dict(zip(tensors, args, strict=True)), **rest)

    graph = trace_with_symbolic_sizes(run, *(arguments[name] for name in tensors))
    graph.eliminate_dead_code()
    return graph


def _returned(graph: Graph) -> list[Node]:
    returned = graph.output_node().args[0]
    return cast("list[Node]", list(returned) if isinstance(returned, list | tuple) else [returned])


def _calls(graph: Graph) -> list[Node]:
    return [
        node
        for node in graph.nodes
        if node.op == "call_function" and isinstance(value(node), Tensor | tuple | list)
    ]


@dataclass
class Site:
    """A (partial) match: pattern nodes -> graph nodes, inputs and captures -> what they are
    here.
    """

    pattern: Pattern
    matched: dict[Node, Node] = field(default_factory=dict)
    alias: dict[Node, Node] = field(
        default_factory=dict
    )  # a cast that is not there because the dtype is right
    bound: dict[str, Any] = field(default_factory=dict)
    deferred: list[tuple[Node, Node, str, Any, Any]] = field(
        default_factory=list
    )  # checked once all is bound
    skipped: list[Node] = field(default_factory=list)  # views seen through

    def at(self, pattern_node: Node) -> Node | None:
        return self.matched.get(pattern_node) or self.alias.get(pattern_node)

    def nodes(self) -> set[Node]:
        return set(self.matched.values()) | set(self.skipped)

    def saved(self) -> tuple[Any, ...]:
        return (
            dict(self.matched),
            dict(self.alias),
            dict(self.bound),
            list(self.deferred),
            list(self.skipped),
        )

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
            for size, actual in zip(
                reversed(value(placeholder).shape), reversed(value(node).shape), strict=False
            ):
                if isinstance(size, torch.SymInt) and isinstance(expression(size), sympy.Symbol):
                    found.setdefault(expression(size), actual)
        return found

    def arguments(self) -> dict[str, Any]:
        """What the pattern's arguments are here, in the order of the example: nodes, numbers, and
        what the example says.
        """
        found = {**self.pattern.constants, **self.bound}
        return {name: found[name] for name in self.pattern.arguments if name in found}

    def model_dtype(self) -> torch.dtype | None:
        return next(
            (
                value(node).dtype
                for _, p, node in self.tensors()
                if p not in self.pattern.choices and value(p).dtype == self.pattern.model_dtype
            ),
            None,
        )

    def dtype(self, example: Any) -> Any:
        """The dtype that an example's dtype, or a captured one, stands for here."""
        if isinstance(example, Capture):
            return self.bound.get(example.name, example)
        return (self.model_dtype() or example) if example == self.pattern.model_dtype else example

    def dtypes(self, placeholder: Node) -> list[torch.dtype]:
        """The dtypes that an input may have here; one, unless it is the first to decide it."""
        choice = self.pattern.choices.get(placeholder)
        if choice is None:
            return [self.dtype(value(placeholder).dtype)]
        decided = self.bound.get(self.pattern.decided_by.get(choice, ""))
        if decided is not None:
            return [decided]
        first = next(
            value(node).dtype
            for _, p, node in self.tensors()
            if self.pattern.choices.get(p) is choice
        )
        allowed = list(dict.fromkeys(map(self.dtype, choice.values)))
        return [first] if first in allowed else allowed


@dataclass
class Difference:
    """One thing that keeps a pattern from matching. `rank` orders the checks: upstream first."""

    kind: MissKind
    expected: str
    found: str
    node: Node | None
    rank: int = 0
    ops: tuple[str, ...] = ()  # that were expected there
