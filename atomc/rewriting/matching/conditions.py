"""Conditions at a site whose structure matches: sizes, dtypes, devices, and no other readers or
writers.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator

import sympy
from torch import Tensor
from torch.fx import Node

from atomc.graph.canonical import call, readers, value
from atomc.graph.expressions import Size, expression, known_different, substitute
from atomc.graph.mutation import mutated, storage
from atomc.graph.provenance import describe
from atomc.graph.sizes import known_equal, same_sizes, spell_shape
from atomc.rewriting.matching.attributes import bare
from atomc.rewriting.matching.pattern import Difference, MatchSite

# The rank of differences of the whole site.
LAST = 10**6


def problems(site: MatchSite, partial: bool = False) -> list[Difference]:
    """All reasons against the rewrite although the structure matches, most upstream first.

    partial: the structure does not match (for explanations), so only values are checked.
    """
    differences = [
        *_input_problems(site),
        *_device_problems(site),
        *_deferred_problems(site),
        *_dtype_problems(site),
    ]
    if not partial:
        differences += [*_escapes(site), *_mutations(site), *_cycles(site)]
    return sorted(differences, key=lambda difference: difference.rank)


def _input_problems(site: MatchSite) -> Iterator[Difference]:
    symbols = site.symbols()
    for name, p, g in site.tensors():
        allowed = site.dtypes(p)
        if value(g).dtype not in allowed:
            like = (
                f" (the dtype of `{site.pattern.typical_input}`)"
                if value(p).dtype == site.pattern.model_dtype
                else ""
            )
            wanted = " or ".join([bare(allowed[0]) + like, *map(bare, allowed[1:])])
            yield Difference("dtype", f"`{name}` in {wanted}", bare(value(g).dtype), g, -1)
        for d, (size, actual) in enumerate(
            zip(reversed(value(p).shape), reversed(value(g).shape), strict=False)
        ):
            expected = substitute(size, symbols)
            if not known_equal(expected, actual):
                yield Difference(
                    "size",
                    f"`{name}` with size {expected} in dim {-1 - d}",
                    _size(expected, actual),
                    g,
                    -1,
                )
        if value(g).dim() < value(p).dim():
            yield Difference(
                "size",
                f"`{name}` with at least {value(p).dim()} dimensions",
                f"{value(g).dim()} (broadcast)",
                g,
                -1,
            )
    yield from _rank_problems(site)


def _size(expected: sympy.Expr | Size, actual: Size) -> str:
    return (
        f"{actual}"
        if known_different(expected, actual)
        else f"{actual}, which is not known to be equal for all sizes"
    )


def _rank_problems(site: MatchSite) -> Iterator[Difference]:
    """Inputs whose examples have the same first size have the same rank and leading sizes at the
    site.
    """
    groups: dict[Hashable, list[tuple[str, Node, Node]]] = defaultdict(list)
    for name, p, g in site.tensors():
        if value(p).dim():
            groups[expression(value(p).shape[0]) if value(p).dim() > 1 else name].append(
                (name, p, g)
            )
    for (first, p0, g0), *others in groups.values():
        for name, p, g in others:
            extra = value(g).dim() - value(p).dim()
            if extra != value(g0).dim() - value(p0).dim():
                rank = value(p).dim() + value(g0).dim() - value(p0).dim()
                yield Difference(
                    "size",
                    f"`{name}` of rank {rank}, like `{first}`",
                    f"rank {value(g).dim()} (broadcast)",
                    g,
                    -1,
                )
            elif not same_sizes(value(g0).shape[: max(0, extra)], value(g).shape[: max(0, extra)]):
                yield Difference(
                    "size",
                    f"`{name}` with the leading sizes of `{first}`",
                    spell_shape(value(g).shape),
                    g,
                    -1,
                )


def _device_problems(site: MatchSite) -> Iterator[Difference]:
    first = next((node for _, _, node in site.tensors()), None)
    if first is None:
        return
    nodes = [node for _, _, node in site.tensors()] + list(site.matched.values())
    for node in nodes:
        if isinstance(value(node), Tensor) and value(node).device != value(first).device:
            yield Difference(
                "device",
                f"all tensors on {value(first).device}",
                f"{describe(node)} on {value(node).device}",
                node,
                -1,
            )


def _deferred_problems(site: MatchSite) -> Iterator[Difference]:
    symbols = site.symbols()
    for p, g, name, expected, here in site.deferred:
        rank = site.pattern.position[p]
        if name == "dtype":
            if here != site.attr(expected):
                cast = f"a cast to {bare(site.attr(expected))}"
                if p in site.alias:
                    yield Difference(
                        "missing cast",
                        cast,
                        f"{describe(g)} used as it is, in {bare(here)}",
                        g,
                        rank,
                    )
                else:
                    yield Difference("dtype", cast, f"one to {bare(here)}", g, rank)
        elif name == "shape":
            assert isinstance(expected, tuple) and isinstance(here, tuple)
            shape = [substitute(size, symbols) for size in expected]
            if not all(
                known_equal(a, b) for a, b in zip(reversed(shape), reversed(here), strict=False)
            ):
                yield Difference("view", f"shape {spell_shape(shape)}", spell_shape(here), g, rank)
        elif here is None or not known_equal(substitute(expected, symbols), here):
            yield Difference(
                "attribute",
                f"{call(p).op} with {name}={substitute(expected, symbols)}",
                f"{name}={here}",
                g,
                rank,
            )


def _dtype_problems(site: MatchSite) -> Iterator[Difference]:
    for p, g in site.matched.items():
        if (
            call(p).op == call(g).op != "cast"
            and isinstance(value(g), Tensor)
            and p not in site.pattern.any_dtype
        ):
            wanted = site.dtype(value(p).dtype)
            if value(g).dtype != wanted:
                yield Difference(
                    "dtype",
                    f"{bare(call(p).op)} computed in {bare(wanted)}",
                    bare(value(g).dtype),
                    g,
                    site.pattern.position[p],
                )


def _escapes(site: MatchSite) -> Iterator[Difference]:
    """Intermediate values that have other readers. What is made of no tensor, such as an arange,
    may be shared: it stays for the others.
    """
    inside, outputs = site.nodes(), set(site.outputs())
    position = {g: site.pattern.position[p] for p, g in site.matched.items()}
    for node in inside - outputs:
        for reader in readers(node) if call(node).operands else ():
            if reader not in inside:
                who = (
                    "the graph returns it"
                    if reader.op == "output"
                    else f"{describe(reader)} also reads it"
                )
                yield Difference(
                    "extra user",
                    f"no other reader of {describe(node)}",
                    who,
                    node,
                    position.get(node, 0),
                )


def _mutations(site: MatchSite) -> Iterator[Difference]:
    """Other nodes that write what the site reads."""
    inside = site.nodes()
    own_writes = {node for node in inside if mutated(node)}
    read = {storage(node) for node in inside} | {storage(bound) for bound in site.bound.values()}
    for node in _span(inside):
        for written in mutated(node):
            if node not in own_writes and storage(written) in read:
                yield Difference(
                    "mutation",
                    f"{describe(written)} unchanged while it is read",
                    f"{describe(node)} writes it",
                    node,
                    LAST,
                )


def _cycles(site: MatchSite) -> Iterator[Difference]:
    """Inputs that depend on an output."""
    inside, outputs = site.nodes(), set(site.outputs())
    downstream: set[Node] = set()
    for node in _span(inside):
        if node not in inside and any(
            a in outputs or a in downstream for a in node.all_input_nodes
        ):
            downstream.add(node)
    for node in inside:
        for operand in node.all_input_nodes:
            if operand in downstream:
                yield Difference(
                    "cycle",
                    "inputs ready before any output is used",
                    f"{describe(operand)} depends on an output of this match",
                    operand,
                    LAST,
                )


def _span(nodes: set[Node]) -> Iterator[Node]:
    """All nodes of the graph from the first of `nodes` to the last."""
    left, node = len(nodes), min(nodes)
    while left:
        yield node
        left -= node in nodes
        node = node.next
