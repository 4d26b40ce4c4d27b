"""A Rewrite is data: a pattern function, a replacement function, an example and a guard. `apply`
replaces its sites in a graph.
"""

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.proxy import GraphAppendingTracer, Proxy

from atomc.graph.canonical import Attr, call, value
from atomc.graph.edit import infer, nodes_between
from atomc.graph.mutation import mutated
from atomc.graph.provenance import Provenance, describe, inherited
from atomc.graph.sizes import same_shape
from atomc.graph.strides import Values, same_strides, spread_strides
from atomc.ops.op import Op
from atomc.rewriting.example import ExampleValue, OneOf
from atomc.rewriting.matching.near_miss import NearMiss, anchor_ops, near_misses
from atomc.rewriting.matching.pattern import Difference, Index, MatchSite, Pattern, ops_of
from atomc.rewriting.matching.search import matches
from atomc.torch_compat.core import outside_of_tracing

# (name of the rewrite, first output of a site) -> how an option turns it off there, or None.
OffHere = Callable[[str, Node], str | None]
# Op -> attributes that one of its nodes must have.
Needs = Mapping[str, Mapping[str, ExampleValue]]
# What a replacement returns; at a site it is called with proxies in the place of tensors.
Replaced = Tensor | Proxy | tuple[Tensor | Proxy, ...]
# Attributes of a site, shown in the report.
Attrs = Mapping[str, Attr]
_tracing = threading.Lock()


@dataclass(frozen=True, eq=False)
class Case:
    """One of the patterns of a rewrite: a style, or the presence of an optional operand.

    variant    its name among the rewrite's cases
    arguments  those of the rewrite's `example` for it
    needs      as Rewrite.needs, for this case
    """

    variant: str = ""
    arguments: Mapping[str, ExampleValue] = field(default_factory=dict)
    needs: Needs = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Rewrite:
    """Replaces each match of `pattern` by `replacement`, two functions with the same parameters.

    The pattern is traced, so it may use all of torch. The replacement is an op that takes its
    arguments by name, all tensors among them; or it is called once per site with graph nodes, so
    that it uses atomc.ops and torch.ops.aten.<name>.<overload>. An argument is a node or a captured
    attribute (Pattern); one that is neither has the value of the example. Where both are one
    function, each match is a near miss with the reason of the guard.
    """

    name: str
    pattern: Callable[..., Tensor | tuple[Tensor, ...]]
    replacement: Callable[..., Replaced]
    # Returns argument -> tensor, number or choice; it specifies which sizes, ranks and dtypes are
    # equal (Pattern).
    example: Callable[..., Mapping[str, ExampleValue]]
    # (arguments as fake tensors and numbers) -> why the site does not qualify, or None.
    guard: Callable[..., str | None] | None = None
    # Distinguishes rewrites of the same name.
    variant: str = ""
    # Of a site, for the report, besides the captured ones; or a function with the arguments of
    # `guard` that returns them.
    attrs: Attrs | Callable[..., Attrs] = field(default_factory=dict)
    # Views that keep the last dimension may occur between the pattern's nodes.
    sees_through: bool = False
    # The pattern's outputs are operands of one node, in this order; writes into a static cache may
    # occur in between.
    read_together: bool = False
    # Op of atomc, or "aten::cat" -> attributes that one of its nodes must have (OneOf: one of these
    # values); without such a node in the graph nothing is traced, and without one at a place it is
    # no near miss.
    needs: Needs = field(default_factory=dict)
    # Its result may be part of another site: it is applied until no site is left.
    nests: bool = False
    # Two arguments of which the first may not be the second, or computed from it: what computes
    # both is fused better by Inductor.
    apart: tuple[str, str] | None = None
    # Applies only for the runtime: its results differ by more than roundings, and a user's program
    # computes what it is.
    paged: bool = False
    # The patterns, most specific first; each is traced with an example of its own.
    cases: Sequence[Case] = (Case(),)
    # Index of a graph -> further cases, for patterns that are traced with numbers of the graph,
    # such as the number of experts (equal numbers give the same Case), or that only a few graphs
    # are compared with.
    cases_in: Callable[[Index], Sequence[Case]] = lambda index: ()
    # Of the cases that were traced: with symbolic sizes, and for their ops only.
    patterns: dict[Case, Pattern] = field(default_factory=dict, init=False, repr=False)
    _ops: dict[Case, frozenset[str]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        is_op = isinstance(self.replacement, Op)
        if (
            not is_op
            and signature(self.pattern).parameters.keys()
            != signature(self.replacement).parameters.keys()
        ):
            raise ValueError(
                f"rewrite {self.name!r}: pattern and replacement take different arguments"
            )

    @property
    def explained(self) -> bool:
        """Whether places where it nearly matches are near misses."""
        return self.replacement is not self.pattern

    def traced(self, case: Case | None = None) -> Pattern:
        """The pattern of a case, by default the first; traced on first use."""
        case = case or self.cases[0]
        with _tracing, outside_of_tracing():
            if case not in self.patterns:
                self.patterns[case] = Pattern(
                    self.pattern,
                    self.example(**case.arguments),
                    sees_through=self.sees_through,
                    read_together=self.read_together,
                    needed=self.needed(case),
                )
                self._check_op(self.patterns[case])
        return self.patterns[case]

    def ops(self, case: Case) -> frozenset[str]:
        """The canonical ops of the pattern of a case, which need not be traced with symbolic sizes
        in a graph that lacks some of them.
        """
        with _tracing:
            if case not in self._ops:
                self._ops[case] = ops_of(self.pattern, self.example(**case.arguments))
        return self._ops[case]

    def can_nearly_match(self, case: Case, index: Index) -> bool:
        """Whether the graph has an op from which a near miss of a case can start."""
        return any(index[op] for op in anchor_ops(self.ops(case)))

    def _check_op(self, pattern: Pattern) -> None:
        """Raise ValueError if the op that replaces the pattern does not take all of its tensors."""
        if isinstance(self.replacement, Op):
            lacks = {*pattern.inputs.values()} - self.replacement.signature.parameters.keys()
            if lacks:
                raise ValueError(
                    f"rewrite {self.name!r}: {self.replacement.name} does not take {sorted(lacks)}"
                )

    def unmet(self, case: Case, index: Index) -> list[str]:
        """Canonical names of the ops that a case needs and that the graph lacks, or has only with
        other attributes.
        """
        return [
            op
            for op, attrs in self.needed(case).items()
            if not any(_has(node, attrs) for node in index[op])
        ]

    def needed(self, case: Case) -> Needs:
        """`needs` of the rewrite and of a case, by the canonical name of the op."""
        return {
            op.removeprefix("aten::") if "::" in op else f"atom::{op}": attrs
            for op, attrs in (*self.needs.items(), *case.needs.items())
        }


def unsupported(
    name: str,
    variant: str,
    pattern: Callable[..., Tensor | tuple[Tensor, ...]],
    example: Callable[[], Mapping[str, ExampleValue]],
    needs: Sequence[str],
    reason: str,
) -> Rewrite:
    """What resembles the pattern of rewrite `name`, but is nothing that its op computes: each match
    is a near miss with this reason. needs: ops without which it does not occur.
    """
    return Rewrite(
        name,
        pattern,
        pattern,
        example,
        guard=lambda **_: reason,
        variant=variant,
        needs={op: {} for op in needs},
    )


def _has(node: Node, attrs: Mapping[str, ExampleValue]) -> bool:
    attributes = call(node).attrs
    return all(
        name in attributes
        and (
            attributes[name] in wanted if isinstance(wanted, OneOf) else attributes[name] == wanted
        )
        for name, wanted in attrs.items()
    )


@dataclass
class Fired:
    """One place where a rewrite was applied.

    node       the replaced node (the first output of the pattern), which keeps its metadata
    attrs      the attributes of the site, captured ones included
    nodes      all nodes that were replaced
    new_nodes  those in their place, in graph order
    consumed   the ops that were replaced
    """

    name: str
    node: Node
    attrs: Attrs = field(default_factory=dict)
    nodes: set[Node] = field(default_factory=set)
    new_nodes: list[Node] = field(default_factory=list)
    consumed: tuple[str, ...] = ()


def apply(
    graph: Graph,
    rewrite: Rewrite,
    index: Index,
    off_here: OffHere | None = None,
    case: Case | None = None,
) -> tuple[list[Fired], list[NearMiss]]:
    """Replace every site of one case, by default the first. Returns the replaced sites, and those
    that match but are refused, with the reason.

    index     of the current graph; outdated once a site was replaced
    off_here  where options turn the rewrite off
    """
    case = case or rewrite.cases[0]
    if any(not index[op] for op in rewrite.ops(case) - {"cast", "slice"}):
        return [], []
    pattern = rewrite.traced(case)
    sites: list[MatchSite] = []
    refused: list[NearMiss] = []
    claimed: set[Node] = set()
    for site, differences in matches(pattern, index):
        wrong = differences or _objections(rewrite, site, claimed, off_here)
        if wrong:
            refused.append(
                NearMiss(
                    rewrite.name,
                    rewrite.variant or case.variant,
                    site.outputs()[0],
                    len(pattern.nodes),
                    len(pattern.nodes),
                    0,
                    wrong,
                    site.nodes(),
                )
            )
        else:
            sites.append(site)
            claimed |= {node for node in site.matched.values() if call(node).operands}
    renamed: dict[Node, Node] = {}
    moved: list[tuple[Node, Tensor]] = []
    fired = [_replace(graph, rewrite, site, renamed, moved) for site in sites]
    if sites:
        sort_topologically(graph)
        values = Values(graph)
        for node, before in moved:
            spread_strides(graph, node, before, values)
        remove_dead_nodes(graph)  # a split without readers would count as a reader
    return fired, refused


def _objections(
    rewrite: Rewrite, site: MatchSite, claimed: set[Node], off_here: OffHere | None
) -> list[Difference]:
    """Why a match is not replaced: an earlier site overlaps, the guard, or an option."""
    first = site.outputs()[0]
    # Sites may share an input view, but not a node that is replaced.
    if shared := sorted(claimed & set(site.matched.values())):
        return [
            Difference(
                "taken",
                f"exclusive use of {describe(shared[0])}",
                f"taken by {rewrite.name}",
                shared[0],
            )
        ]
    if rewrite.apart is not None:
        names = rewrite.apart
        one, other = (site.bound[name] for name in names)
        if one is other or other in one.all_input_nodes:
            both = "is both" if one is other else f"reads {describe(other)}"
            both_are = f"{describe(one)}, which {both}"
            return [Difference("guard", f"{names[0]} and {names[1]} by themselves", both_are, one)]
    if rewrite.guard is not None and (reason := rewrite.guard(**_values(site))):
        return [Difference("guard", f"a site that qualifies for {rewrite.name}", reason, first)]
    if off_here is not None and (off := off_here(rewrite.name, first)):
        return [Difference("off", f"{rewrite.name} to be on", off, first)]
    return []


def misses(
    index: Index, cases: list[tuple[Rewrite, Case]], causes: list[NearMiss]
) -> tuple[list[NearMiss], list[NearMiss]]:
    """Explain why these cases did not match elsewhere; see near_miss.near_misses."""
    patterns = [
        (rewrite.name, rewrite.variant or case.variant, rewrite.traced(case))
        for rewrite, case in cases
    ]
    return near_misses(patterns, index, causes)


def _values(site: MatchSite) -> dict[str, Attr]:
    """The arguments at a site: fake tensors and attributes."""
    return {
        name: value(argument) if isinstance(argument, Node) else argument
        for name, argument in site.arguments().items()
    }


def _replace(
    graph: Graph,
    rewrite: Rewrite,
    site: MatchSite,
    renamed: dict[Node, Node],
    moved: list[tuple[Node, Tensor]],
) -> Fired:
    """Replace one site. Outputs with new strides are added to `moved`, with their values before."""
    # An earlier site may have replaced an input of this one.
    site.bound = {name: _renamed(bound, renamed) for name, bound in site.bound.items()}
    attrs = rewrite.attrs(**_values(site)) if callable(rewrite.attrs) else rewrite.attrs
    outputs, matched = site.outputs(), site.nodes()
    consumed = tuple(call(node).op for node in matched)
    meta = inherited(site.matched.values(), outputs[0], rewrite.name, consumed)
    last = max(matched)
    before = last.next
    with graph.inserting_before(before):
        results = _results(graph, rewrite, site)
    new_nodes = nodes_between(last, before)
    # After a skipped view, the op has another shape than the replaced nodes.
    replaced = [] if site.skipped else [value(output) for output in outputs]
    _describe_new_nodes(new_nodes, meta, replaced)
    for output, new in zip(outputs, results, strict=True):
        if not same_shape(value(output), value(new)):
            with graph.inserting_before(before):
                new = _restore_view(graph, site, new, output, meta)
        output.replace_all_uses_with(new)
        renamed[output] = new
        if not same_strides(value(new), value(output)):
            moved.append((new, value(output)))
    for node in sorted(matched, reverse=True):
        if not node.users:
            graph.erase_node(node)
    free = site.pattern.captured
    captured = {name: attr for name, attr in site.captured.items() if name in free}
    return Fired(rewrite.name, outputs[0], {**attrs, **captured}, matched, new_nodes, consumed)


def _renamed(bound: Node, renamed: Mapping[Node, Node]) -> Node:
    while bound in renamed:
        bound = renamed[bound]
    return bound


def _results(graph: Graph, rewrite: Rewrite, site: MatchSite) -> list[Node]:
    """Call the replacement; one node per output."""
    tracer = GraphAppendingTracer(graph)
    arguments = {
        name: Proxy(argument, tracer) if isinstance(argument, Node) else argument
        for name, argument in site.arguments().items()
    }
    if isinstance(op := rewrite.replacement, Op):
        names = op.signature.parameters
        bound = op.signature.bind(**{name: x for name, x in arguments.items() if name in names})
        result = op.overload(*bound.args, **bound.kwargs)
    else:
        result = rewrite.replacement(**arguments)
    parts = result if isinstance(result, tuple) else (result,)
    nodes = [part.node for part in parts if isinstance(part, Proxy)]
    count = len(site.pattern.outputs)
    if len(nodes) == count:
        return nodes
    [result_node] = nodes
    return [graph.call_function(operator.getitem, (result_node, i)) for i in range(count)]


def _restore_view(graph: Graph, site: MatchSite, new: Node, output: Node, meta: Provenance) -> Node:
    """The result in the shape of the replaced output, from which it differs by a skipped view."""
    view = next(node for node in site.skipped if call(node).op == "view")
    assert callable(view.target)
    seen = graph.call_function(view.target, (new, *view.args[1:]), dict(view.kwargs))
    seen.meta.update(meta, val=value(output))
    return seen


def _describe_new_nodes(new_nodes: list[Node], meta: Provenance, replaced: list[Tensor]) -> None:
    """Give new nodes their metadata. A single op has the value of the replaced outputs; other
    values are traced.
    """
    calls = [node for node in new_nodes if node.target is not operator.getitem]
    for node in new_nodes:
        if node.target is not operator.getitem and not isinstance(
            node.target, torch._ops.OpOverload
        ):
            raise TypeError(
                f"replacement of {meta['atomc'].made_by!r} creates {node.format_node()}: a "
                "replacement may only call atomc.ops and torch.ops.aten.<name>.<overload>"
            )
        node.meta.update(meta)
        if node.target is operator.getitem:
            node.meta["val"] = value(node.args[0])[node.args[1]]  # type: ignore[arg-type]
        elif len(calls) == 1 and _returns(node, len(replaced)):
            node.meta["val"] = tuple(replaced) if len(replaced) > 1 else replaced[0]
        else:
            infer(node)


def _returns(node: Node, count: int) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and len(schema.returns) == count


def sort_topologically(graph: Graph) -> None:
    """Sort the nodes, stable: a node moves only if one of its inputs comes later."""
    seen: set[Node] = set()
    order: list[Node] = []
    for root in list(graph.nodes):
        stack = [root]
        while stack:
            node = stack[-1]
            if node in seen:
                stack.pop()
                continue
            waiting = [operand for operand in node.all_input_nodes if operand not in seen]
            if waiting:
                stack += waiting
            else:
                seen.add(node)
                order.append(node)
                stack.pop()
    previous = None
    for node in order:
        if previous is not None and previous.next is not node:
            previous.append(node)
        previous = node


def remove_dead_nodes(graph: Graph) -> None:
    """Erase nodes without readers, except writes."""
    for node in reversed(list(graph.nodes)):
        if (
            node.op == "call_function"
            and not node.users
            and not mutated(node)
            and not node.is_impure()
        ):
            graph.erase_node(node)
