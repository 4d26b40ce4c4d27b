"""A traced pattern, and a complete or partial match of it in a graph."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, Node

from atomc.graph.canonical import GENERIC, SPLITS, Attr, Capture, call, value
from atomc.graph.expressions import Size, expression
from atomc.graph.views import ZERO_COST, name_of, permuted_back
from atomc.ops.formats import HALVES
from atomc.report.records import MissKind
from atomc.rewriting.example import ExampleValue, Fixed, OneOf
from atomc.rewriting.matching.captures import capture, differing, stand_ins
from atomc.torch_compat.aten_graph import aten_graph


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
    """A function traced with symbolic sizes. Its example is its specification.

    Sizes that are equal in the example must be equal at a site, so use different sizes otherwise. A
    16-bit dtype in the example stands for the model's dtype. Floats, strings, ints and `OneOf` are
    captured where an op of the pattern has them as an attribute (captures.py); other values are
    passed on unchanged: None for an absent operand, a style, a flag.

    constants  argument -> its value in the example, if no op of the pattern has it as an attribute
    captured   arguments with any value at a site: those that are not `OneOf`
    choices    input -> the dtypes that it may have at a site
    decided_by such a choice -> the argument that is captured with the same value
    any_dtype  nodes whose dtype depends on the site, so that it is not compared
    telling    ops without which a place is no near miss: those that are not generic, and `needed`
    """

    def __init__(
        self,
        function: Callable[..., Tensor | tuple[Tensor, ...]],
        example: Mapping[str, ExampleValue],
        *,
        sees_through: bool = False,
        read_together: bool = False,
        needed: Iterable[str] = (),
    ):
        self.sees_through, self.read_together = sees_through, read_together
        arguments, varied = stand_ins(example, 0), stand_ins(example, 1)
        self.arguments = list(arguments)
        self.graph = _traced(function, arguments, symbolic=True)
        self.inputs = {p: str(p.target) for p in self.graph.find_nodes(op="placeholder")}
        self.outputs = _returned(self.graph)
        self.nodes = _calls(self.graph)
        ops = _ops(self.graph)
        # A graph whose split was made again behind a mutation has only its parts: slices.
        self.telling = (ops - GENERIC - SPLITS) | (ops & set(needed))
        self.position = {node: i for i, node in enumerate(self.graph.nodes)}
        self.choices = {
            p: argument.follows
            for p, name in self.inputs.items()
            if isinstance(argument := example[name], OneOf) and argument.follows is not None
        }
        self.model_dtype = self._model_dtype()
        others = (  # of which no sizes are read
            _calls(_traced(function, varied, symbolic=False))
            if differing(arguments, varied)
            else self.nodes
        )
        located = capture(self.nodes, others, example)
        self.captured = {name for name in located if not isinstance(example[name], OneOf)}
        self.constants = {
            name: argument
            for name, argument in arguments.items()
            if name not in {*located, *self.inputs.values()}
        }
        self.decided_by = {example[name]: name for name in located - self.captured}
        self.any_dtype = self._nodes_of_any_dtype(others)

    def _model_dtype(self) -> torch.dtype | None:
        dtypes = [value(p).dtype for p in self.inputs if p not in self.choices]
        return next((dtype for dtype in dtypes if dtype in HALVES), None)

    def _nodes_of_any_dtype(self, others: list[Node]) -> set[Node]:
        """A dtype depends on the op, its attributes and the dtypes of its operands. others: nodes
        of the trace at turn 1.
        """
        nodes: set[Node] = set()
        possible = {dtype for choice in self.choices.values() for dtype in choice.values}
        for node, other in zip(self.nodes, others, strict=True):
            here = getattr(value(node), "dtype", None)
            reads = any(
                operand in self.choices or operand in nodes for operand in call(node).operands
            )
            promotes = reads and here in {None, *possible} and call(node).op != "cast"
            if promotes or (
                here is not None and here not in (value(other).dtype, self.model_dtype)
            ):
                nodes.add(node)
        return nodes

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


def ops_of(
    function: Callable[..., Tensor | tuple[Tensor, ...]], example: Mapping[str, ExampleValue]
) -> frozenset[str]:
    """The canonical ops of the pattern of a function."""
    return _ops(_traced(function, stand_ins(example, 0), symbolic=False))


def _ops(graph: Graph) -> frozenset[str]:
    return frozenset(call(node).op for node in _calls(graph))


def _traced(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    arguments: Mapping[str, Fixed],
    *,
    symbolic: bool,
) -> Graph:
    graph = aten_graph(function, arguments, symbolic=symbolic)
    _tidy(graph)
    graph.eliminate_dead_code()
    return graph


def _tidy(graph: Graph) -> None:
    """What the pass of this name does to graphs, as far as patterns need it: equal views become
    one, and permutations that restore an order vanish.
    """
    first_views: dict[tuple[str, ...], Node] = {}
    for node in graph.nodes:
        if node.op == "call_function" and name_of(node) in ZERO_COST:
            same = first_views.setdefault(
                (str(node.target), str(node.args), str(node.kwargs)), node
            )
            same = permuted_back(node) or same
            if same is not node:
                node.replace_all_uses_with(same)


def _returned(graph: Graph) -> list[Node]:
    returned = graph.output_node().args[0]
    outputs = returned if isinstance(returned, Iterable) else (returned,)
    return [output for output in outputs if isinstance(output, Node)]


def _calls(graph: Graph) -> list[Node]:
    return [
        node
        for node in graph.nodes
        if node.op == "call_function" and isinstance(value(node), Tensor | tuple | list)
    ]


class Deferred(NamedTuple):
    """An attribute that is compared once all inputs of the pattern are bound."""

    pattern_node: Node
    node: Node
    name: str
    expected: Attr
    found: Attr


@dataclass
class MatchSite:
    """A complete or partial match.

    matched   pattern node -> graph node
    alias     cast of the pattern -> graph node that has its dtype without a cast
    bound     input -> graph node
    captured  captured argument -> attribute
    deferred  attributes to compare once all inputs are bound
    skipped   views between the matched nodes
    """

    pattern: Pattern
    matched: dict[Node, Node] = field(default_factory=dict)
    alias: dict[Node, Node] = field(default_factory=dict)
    bound: dict[str, Node] = field(default_factory=dict)
    captured: dict[str, Attr] = field(default_factory=dict)
    deferred: list[Deferred] = field(default_factory=list)
    skipped: list[Node] = field(default_factory=list)

    def at(self, pattern_node: Node) -> Node | None:
        return self.matched.get(pattern_node) or self.alias.get(pattern_node)

    def nodes(self) -> set[Node]:
        return set(self.matched.values()) | set(self.skipped)

    def copy(self) -> "MatchSite":
        """A site that can change by itself."""
        fields = {name: x.copy() for name, x in vars(self).items() if x is not self.pattern}
        return MatchSite(self.pattern, **fields)

    def restore(self, saved: "MatchSite") -> None:
        vars(self).update(vars(saved))

    def outputs(self) -> list[Node]:
        nodes = [self.at(output) for output in self.pattern.outputs]
        return [node for node in nodes if node is not None]

    def tensors(self) -> Iterator[tuple[str, Node, Node]]:
        """(input name, pattern placeholder, graph node) of every bound tensor input."""
        for placeholder, name in self.pattern.inputs.items():
            node = self.bound.get(name)
            if node is not None and isinstance(value(node), Tensor):
                yield name, placeholder, node

    def symbols(self) -> dict[sympy.Symbol, Size]:
        """The sizes of the example at this site."""
        sizes: dict[sympy.Symbol, Size] = {}
        for _, placeholder, node in self.tensors():
            for size, actual in zip(
                reversed(value(placeholder).shape), reversed(value(node).shape), strict=False
            ):
                if isinstance(size, torch.SymInt) and isinstance(expression(size), sympy.Symbol):
                    sizes.setdefault(expression(size), actual)
        return sizes

    def arguments(self) -> dict[str, Attr]:
        """The pattern's arguments at this site, in the order of the example: nodes, captured
        attributes and constants.
        """
        values: dict[str, Attr] = {**self.pattern.constants, **self.bound, **self.captured}
        return {name: values[name] for name in self.pattern.arguments if name in values}

    def model_dtype(self) -> torch.dtype | None:
        return next(
            (
                value(node).dtype
                for _, p, node in self.tensors()
                if p not in self.pattern.choices and value(p).dtype == self.pattern.model_dtype
            ),
            None,
        )

    def dtype(self, example: torch.dtype) -> torch.dtype:
        """The dtype for which a dtype of the example stands here."""
        return (self.model_dtype() or example) if example == self.pattern.model_dtype else example

    def attr(self, expected: Attr) -> Attr:
        """The attribute for which a dtype or a Capture of the pattern stands here."""
        if isinstance(expected, Capture):
            return self.captured.get(expected.name, expected)
        return self.dtype(expected) if isinstance(expected, torch.dtype) else expected

    def dtypes(self, placeholder: Node) -> list[torch.dtype]:
        """The dtypes that an input may have here; only one once an input with the same choice is
        bound.
        """
        choice = self.pattern.choices.get(placeholder)
        if choice is None:
            return [self.dtype(value(placeholder).dtype)]
        decided = self.captured.get(self.pattern.decided_by.get(choice, ""))
        if isinstance(decided, torch.dtype):
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
    """One reason why a pattern does not match.

    rank  position in the pattern: upstream differences come first
    ops   the ops expected there
    """

    kind: MissKind
    expected: str
    found: str
    node: Node | None
    rank: int = 0
    ops: tuple[str, ...] = ()


class Unlike(Exception):
    """A place is not what a pass replaces, for one reason."""

    def __init__(self, kind: MissKind, expected: str, found: str, node: Node):
        super().__init__(found)
        self.difference = Difference(kind, expected, found, node)
