"""A Rewrite is data: a pattern function, a replacement function, a guard, an example. `apply` makes
one sweep with it.
"""

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.proxy import GraphAppendingTracer, Proxy

from atomc.graph.canonical import call, value
from atomc.graph.mutation import mutated
from atomc.graph.provenance import describe, inherited
from atomc.graph.sizes import same_shape
from atomc.graph.strides import Values, same_strides, spread_strides
from atomc.rewriting.matching.captures import OneOf
from atomc.rewriting.matching.near_miss import NearMiss, near_misses
from atomc.rewriting.matching.pattern import Difference, Index, Pattern, Site
from atomc.rewriting.matching.search import matches
from atomc.torch_compat.core import outside_of_tracing
from atomc.torch_compat.tracing import fake_mode_of

# The rewrite's name, the first output of a site -> how the user left it out there, or None.
OffHere = Callable[[str, Node], str | None]
_tracing = threading.Lock()


@dataclass(frozen=True, eq=False)
class Case:
    """One of the patterns that a rewrite stands for: a style, or an operand that is there or
    absent.

    variant  its name among the rewrite's cases
    given    what the rewrite's `example` is called with for it
    needs    as Rewrite.needs, for this case
    """

    variant: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)
    needs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Rewrite:
    """Replace what looks like `pattern` by `replacement`; both are plain functions of the same
    named arguments.

    The pattern is traced, so it may use all of torch; the replacement is called once a site with
    graph nodes, so it uses atomc.ops and torch.ops.aten.<name>.<overload>. An argument is what the
    site decides: a node, or what is captured (Pattern); where it decides nothing, what the example
    says.

    example        name -> fake-sized tensor or number; it specifies which sizes, ranks and dtypes
                   are equal (Pattern)
    guard          the arguments as fake tensors and numbers -> the sentence why not, or None
    variant        which of several patterns of the same name this is
    cases          the patterns, most specific first: each is traced with an example of its own
    attrs          what a site is, shown in the report beside what is captured; or a function like
                   `guard` that says it
    sees_through   views that keep the last dimension may stand between the pattern's nodes
    read_together  the pattern's outputs are operands of one node, in this order; a static cache may
                   lie in between
    needs          op of ours, or "aten::cat" -> attributes that one of its nodes must have (OneOf:
                   one of these); without such a node nothing is traced or explained
    """

    name: str
    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    example: Callable[..., Mapping[str, Any]]
    guard: Callable[..., str | None] | None = None
    variant: str = ""
    attrs: Mapping[str, Any] | Callable[..., Mapping[str, Any]] = field(default_factory=dict)
    sees_through: bool = False
    read_together: bool = False
    needs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    cases: Sequence[Case] = (Case(),)
    _traced: dict[Case, Pattern] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if (
            signature(self.pattern).parameters.keys()
            != signature(self.replacement).parameters.keys()
        ):
            raise ValueError(
                f"rewrite {self.name!r}: pattern and replacement take different arguments"
            )

    def traced(self, case: Case | None = None) -> Pattern:
        """The pattern of a case (of the first by default), traced on first use."""
        case = case or self.cases[0]
        with _tracing, outside_of_tracing():
            if case not in self._traced:
                self._traced[case] = Pattern(
                    self.pattern,
                    self.example(**case.given),
                    sees_through=self.sees_through,
                    read_together=self.read_together,
                )
        return self._traced[case]

    def unmet(self, case: Case, index: Index) -> list[str]:
        """Canonical names of the ops that a case needs and that the graph has not, or not with
        these attributes.
        """
        needs = {
            op.removeprefix("aten::") if "::" in op else f"atom::{op}": attrs
            for op, attrs in (*self.needs.items(), *case.needs.items())
        }
        return [
            op for op, attrs in needs.items() if not any(_has(node, attrs) for node in index[op])
        ]


def _has(node: Node, attrs: Mapping[str, Any]) -> bool:
    found = call(node).attrs
    return all(
        name in found
        and (found[name] in wanted if isinstance(wanted, OneOf) else found[name] == wanted)
        for name, wanted in attrs.items()
    )


@dataclass
class Fired:
    """One place where a rewrite was applied. `node` is what was replaced; it still carries its
    metadata.
    """

    name: str
    node: Node
    attrs: dict[str, Any]
    nodes: set[Node] = field(default_factory=set)  # all that it replaced
    made: list[Node] = field(default_factory=list)
    consumed: tuple[str, ...] = ()  # the ops that it replaced


def apply(
    graph: Graph,
    rewrite: Rewrite,
    index: Index,
    off_here: OffHere | None = None,
    case: Case | None = None,
) -> tuple[list[Fired], list[NearMiss]]:
    """One sweep: replace every site. Returns what fired, and the sites that fit but for a stated
    reason.

    index     of the graph as it is; another one is due after something fired
    off_here  says where the user left it out
    case      which of the rewrite's; the first by default
    """
    case = case or rewrite.cases[0]
    pattern = rewrite.traced(case)
    if any(not index[call(p).op] for p in pattern.nodes if call(p).op not in ("cast", "slice")):
        return [], []
    sites: list[Site] = []
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
            claimed |= set(site.matched.values())
    renamed: dict[Node, Node] = {}
    moved: list[tuple[Node, Any]] = []
    fired = [_replace(graph, rewrite, site, renamed, moved) for site in sites]
    if sites:
        sort_topologically(graph)
        values = Values(graph)
        for node, before in moved:
            spread_strides(graph, node, before, values)
        remove_dead_nodes(graph)  # a split whose parts are gone would count as a reader
    return fired, refused


def _objections(
    rewrite: Rewrite, site: Site, claimed: set[Node], off_here: OffHere | None
) -> list[Difference]:
    """Why a site that fits is left alone: an earlier one of the sweep, the guard, the options."""
    first = site.outputs()[0]
    # Several readers may share an input view; only what disappears can be claimed twice.
    if shared := sorted(claimed & set(site.matched.values())):
        return [
            Difference(
                "taken", f"{describe(shared[0])} for itself", f"taken by {rewrite.name}", shared[0]
            )
        ]
    if rewrite.guard is not None and (reason := rewrite.guard(**_values(site))):
        return [Difference("guard", f"what {rewrite.name} asks for", reason, first)]
    if off_here is not None and (off := off_here(rewrite.name, first)):
        return [Difference("off", f"{rewrite.name} to be on", off, first)]
    return []


def misses(
    index: Index, cases: list[tuple[Rewrite, Case]], causes: list[NearMiss]
) -> tuple[list[NearMiss], list[NearMiss]]:
    """Explain what is left over for these cases; see near_miss.near_misses."""
    patterns = [
        (rewrite.name, rewrite.variant or case.variant, rewrite.traced(case))
        for rewrite, case in cases
    ]
    return near_misses(patterns, index, causes)


def _values(site: Site) -> dict[str, Any]:
    """What the arguments are at a site, tensors as fake ones."""
    return {
        name: value(given) if isinstance(given, Node) else given
        for name, given in site.arguments().items()
    }


def _replace(
    graph: Graph,
    rewrite: Rewrite,
    site: Site,
    renamed: dict[Node, Node],
    moved: list[tuple[Node, Any]],
) -> Fired:
    """Replace one site. Outputs that lie differently from then on are added to `moved`, with their
    values before.
    """
    # An earlier site of this sweep may have replaced an input of this one.
    site.bound = {name: _renamed(bound, renamed) for name, bound in site.bound.items()}
    attrs = rewrite.attrs(**_values(site)) if callable(rewrite.attrs) else rewrite.attrs
    outputs, matched = site.outputs(), site.nodes()
    consumed = tuple(call(node).op for node in matched)
    meta = {**inherited(site.matched.values(), outputs[0], rewrite.name), "consumed": consumed}
    last = max(matched)
    before = last.next
    with graph.inserting_before(before):
        results = _results(graph, rewrite, site)
    made = _between(last, before)
    # Behind a view that was seen through the op sees another shape than the replaced nodes did.
    replaced = [] if site.skipped else [value(output) for output in outputs]
    _describe_new_nodes(graph, made, meta, replaced)
    for output, new in zip(outputs, results, strict=True):
        if not same_shape(value(output), value(new)):
            with graph.inserting_before(before):
                new = _as_seen(graph, site, new, output, meta)
        output.replace_all_uses_with(new)
        renamed[output] = new
        if not same_strides(value(new), value(output)):
            moved.append((new, value(output)))
    for node in sorted(matched, reverse=True):
        if not node.users:
            graph.erase_node(node)
    captured = {name: bound for name, bound in site.bound.items() if name in site.pattern.captured}
    return Fired(rewrite.name, outputs[0], {**attrs, **captured}, matched, made, consumed)


def _renamed(bound: Any, renamed: Mapping[Node, Node]) -> Any:
    while isinstance(bound, Node) and bound in renamed:
        bound = renamed[bound]
    return bound


def _results(graph: Graph, rewrite: Rewrite, site: Site) -> list[Node]:
    """Call the replacement; one node per output."""
    tracer = GraphAppendingTracer(graph)
    result = rewrite.replacement(
        **{
            name: Proxy(given, tracer) if isinstance(given, Node) else given
            for name, given in site.arguments().items()
        }
    )
    num_outputs = len(site.pattern.outputs)
    if num_outputs == 1:
        return [result.node]
    return [
        part.node
        for part in (
            result if isinstance(result, tuple) else [result[i] for i in range(num_outputs)]
        )
    ]


def _as_seen(graph: Graph, site: Site, new: Node, output: Node, meta: Mapping[str, Any]) -> Node:
    """A view was seen through: the result in the shape that the readers of the output know."""
    view = next(node for node in site.skipped if call(node).op == "view")
    assert callable(view.target)
    seen = graph.call_function(view.target, (new, *view.args[1:]), dict(view.kwargs))
    seen.meta.update(meta, val=value(output))
    return seen


def _between(first: Node, last: Node) -> list[Node]:
    nodes, node = [], first.next
    while node is not last:
        nodes.append(node)
        node = node.next
    return nodes


def _describe_new_nodes(
    graph: Graph, made: list[Node], meta: dict[str, Any], replaced: list[Any]
) -> None:
    """Give new nodes their metadata; the values are the replaced ones where one op stands for all,
    else traced.
    """
    calls = [node for node in made if node.target is not operator.getitem]
    for node in made:
        if node.target is not operator.getitem and not isinstance(
            node.target, torch._ops.OpOverload
        ):
            raise TypeError(
                f"replacement of {meta['made_by']!r} makes {node.format_node()}: only ops of "
                "atomc.ops and "
                "torch.ops.aten.<name>.<overload> may stand in a replacement"
            )
        node.meta.update(meta)
        if node.target is operator.getitem:
            node.meta["val"] = value(node.args[0])[node.args[1]]  # type: ignore[arg-type]
        elif len(calls) == 1 and _returns(node, len(replaced)):
            node.meta["val"] = tuple(replaced) if len(replaced) > 1 else replaced[0]
        else:
            infer(graph, node)


def _returns(node: Node, count: int) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and len(schema.returns) == count


def infer(graph: Graph, node: Node) -> None:
    """Compute a node's fake value by running it on its inputs' fake values."""
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value)
    mode = fake_mode_of(graph)
    assert mode is not None and callable(node.target)
    with mode, torch.no_grad():
        node.meta["val"] = node.target(*args, **kwargs)


def sort_topologically(graph: Graph) -> None:
    """Stable: a node moves only if one of its inputs stands later."""
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
    """Erase what nobody reads, but writes stay."""
    for node in reversed(list(graph.nodes)):
        if (
            node.op == "call_function"
            and not node.users
            and not mutated(node)
            and not node.is_impure()
        ):
            graph.erase_node(node)


def tensor_example(*shape: int, dtype: torch.dtype | OneOf = torch.bfloat16) -> Any:
    """A tensor for an example: only its sizes and dtype count.

    Of which dtype the site decides: one of several. If an argument of the example is the same
    OneOf, both say the same.
    """
    if isinstance(dtype, OneOf):
        return OneOf(*(torch.empty(*shape, dtype=each) for each in dtype.values), follows=dtype)
    return torch.empty(*shape, dtype=dtype)


def norm_weight_example(width: int) -> Any:
    """The weight of a norm: in the model's dtype, or in fp32."""
    return tensor_example(width, dtype=OneOf(torch.bfloat16, torch.float32))
