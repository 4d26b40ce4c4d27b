"""Runs one call of a lowered graph node by node, and compares its kernels with the original nodes.

Each site runs three times on its inputs in the lowered graph: the selected kernel; the original
nodes, or the op's reference if these are unknown, in their own dtypes; and the same in fp32,
against which the first two are measured.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from atomc.audit.error import Error, worst
from atomc.audit.evaluate import (
    Values,
    evaluate_graph,
    evaluate_node,
    flatten,
    free_dead,
    last_uses,
    upcast,
)
from atomc.audit.node_correspondence import NodeCorrespondence
from atomc.audit.sites import AuditSite, Slice
from atomc.graph.mutation import mutated
from atomc.ops.op import op_of

# Caches larger than this are not copied for comparison.
MAX_COPIED_BYTES = 2**28
Progress = Callable[[Iterable[Node]], Iterable[Node]]
# Of a node: (args, kwargs).
Arguments = tuple[tuple[Argument, ...], dict[str, Argument]]


class SiteErrors:
    """Errors of one site against fp32: `error` of the kernel, `original` of the original nodes in
    their own dtypes.

    against  "original nodes" or "meaning" (the op's reference), with ", not in fp32" if they do not
             run in fp32
    """

    def __init__(self) -> None:
        self.error, self.original, self.against = Error(), Error(), ""

    def add(self, found: Argument, own: Argument, exact: Argument, against: str) -> None:
        """Add an output of the kernel, of the original nodes in their own dtypes, and in fp32; the
        worst one is kept.
        """
        error, original = worst(flatten(found), flatten(exact)), worst(flatten(own), flatten(exact))
        if not self.against or error.rank > self.error.rank:
            self.error, self.original, self.against = error, original, against


class KernelComparison:
    """Runs the captured and the lowered graph of one compile on the arguments of one call, which
    are not written.
    """

    def __init__(
        self,
        correspondence: NodeCorrespondence,
        lowered: GraphModule,
        inputs: Mapping[str, Argument],
        sites: Sequence[AuditSite],
    ):
        self.correspondence, self.lowered, self.inputs = correspondence, lowered, inputs
        self.sites = {site.node: site for site in sites}
        self.fused = {node.name: node for node in correspondence.fused.graph.nodes}
        self.order = list(lowered.graph.nodes)
        self.last = last_uses(lowered.graph)
        number = {node: i for i, node in enumerate(self.order)}
        for site in sites:
            for part in site.slices:
                for node in part.given.values():
                    self.last[node.name] = max(self.last[node.name], number[site.node])
        self.last |= {node.name: len(self.order) for node in self.order if node.op == "placeholder"}
        self.notes: list[str] = []

    def captured(self, *, exact: bool) -> list[Argument]:
        """The outputs of the captured graph, in fp32 or in its own dtypes."""
        return evaluate_graph(self.correspondence.captured, self.inputs, exact=exact)

    def measured(self, progress: Progress = iter) -> tuple[list[Argument], dict[Node, SiteErrors]]:
        """(the outputs of the lowered graph, the errors of each site)."""
        errors: dict[Node, SiteErrors] = {}

        def measure(node: Node, values: Values) -> None:
            errors[node] = self._measure(self.sites[node], values)

        return self._run(self.sites, measure, progress), errors

    def run_without(self, sites: Iterable[AuditSite]) -> list[Argument]:
        """The outputs of the lowered graph with these sites replaced by the original nodes."""

        def evaluate(node: Node, values: Values) -> None:
            self._evaluate_original(self.sites[node], values)

        return self._run({site.node for site in sites}, evaluate)

    def _run(
        self,
        apart: Container[Node],
        evaluate: Callable[[Node, Values], None],
        progress: Progress = iter,
    ) -> list[Argument]:
        """The outputs of the lowered graph, of which `evaluate` runs the nodes `apart`."""
        values = self._start()
        for i, node in enumerate(progress(self.order)):
            if node.op == "output":
                return flatten(torch.fx.node.map_arg(node.args[0], _reader(values)))
            (evaluate if node in apart else self._step)(node, values)
            free_dead(values, self.last, i)
        raise AssertionError("a graph without an output")

    def _start(self) -> Values:
        """The arguments, with clones of those that nodes write in place."""
        written = {target.name for node in self.order for target in mutated(node)}
        return {
            name: value.clone() if name in written and isinstance(value, Tensor) else value
            for name, value in self.inputs.items()
        }

    def _step(self, node: Node, known: Values) -> None:
        """Run a node of the lowered graph."""
        if node.name in known:  # an argument, or an output of a site
            return
        if node.op == "get_attr":
            known[node.name] = evaluate_node(self.lowered, node, _reader(known))
            return
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), _reader(known))
        assert callable(node.target), node.format_node()
        known[node.name] = node.target(*args, **kwargs)

    def _measure(self, site: AuditSite, known: Values) -> SiteErrors:
        measured = SiteErrors()
        fused = self.fused[site.node.name]
        written = mutated(fused)
        by_nodes = site.whole and not site.cached
        before = None if by_nodes and not written else self._copies(site, written, known)
        self._step(site.node, known)
        for node in site.between:
            self._step(node, known)
        for part in () if site.cached else site.slices:
            exact, against = self._exact(part, known)
            measured.add(known[part.output.name], self._slice(part, known), exact, against)
        if before is not None:
            self._compare_with_reference(
                site, fused, before, known, measured, returned=not by_nodes and not written
            )
        return measured

    def _copies(self, site: AuditSite, written: Sequence[Node], known: Values) -> Values | None:
        """The inputs of the op, with clones of those that it writes; None if these are too
        large.
        """
        fused = self.fused[site.node.name]
        caches = {node.name: _tensor(known[node.name]) for node in written}
        if sum(cache.nbytes for cache in caches.values()) > MAX_COPIED_BYTES:
            self.notes.append(
                f"{site.op} in {site.module_path} is not compared: its caches are too large to copy"
            )
            return None
        read = {node.name: known[node.name] for node in fused.all_input_nodes}
        return read | {name: cache.clone() for name, cache in caches.items()}

    def _compare_with_reference(
        self,
        site: AuditSite,
        fused: Node,
        before: Values,
        known: Values,
        measured: SiteErrors,
        *,
        returned: bool,
    ) -> None:
        """Compare the tensors that were written, and the result if `returned`, with those of the
        op's reference.
        """
        op = op_of(fused.target)
        assert op is not None
        names = [node.name for node in mutated(fused)]
        runs = []
        for exact in (False, True):
            copies = before | {name: _tensor(before[name]).clone() for name in names}
            args, kwargs = torch.fx.node.map_arg((fused.args, fused.kwargs), _reader(copies))
            if exact:
                kept = {id(copies[name]) for name in names}
                args, kwargs = _upcast_except((args, kwargs), kept)
            out = op.reference(*args, **kwargs)
            runs.append((out, [copies[name] for name in names]))
        (own, own_written), (exact_out, exact_written) = runs
        if returned:
            measured.add(known[site.node.name], own, exact_out, "meaning")
        for name, a, b in zip(names, own_written, exact_written, strict=True):
            measured.add(known[name], a, b, "meaning")

    def _exact(self, part: Slice, known: Values) -> tuple[Argument, str]:
        try:
            return self._slice(part, known, exact=True), "original nodes"
        except (RuntimeError, TypeError, ValueError):  # a node that only accepts 16-bit dtypes
            return self._slice(part, known), "original nodes, not in fp32"

    def _slice(self, part: Slice, known: Values, *, exact: bool = False) -> Argument:
        """The result of the original nodes for inputs from the lowered graph."""
        values = {
            captured: (self.inputs if node.op == "placeholder" else known)[node.name]
            for captured, node in part.given.items()
        }
        for node in part.nodes:
            values[node] = evaluate_node(
                self.correspondence.captured, node, values.__getitem__, exact=exact
            )
        return values[part.nodes[-1]]

    def _evaluate_original(self, site: AuditSite, known: Values) -> None:
        """Evaluate a site by the op's reference, and its outputs by the original nodes where these
        are known.
        """
        fused = self.fused[site.node.name]
        op = op_of(fused.target)
        assert op is not None
        outputs = {part.output: self._slice(part, known) for part in site.slices}
        args, kwargs = torch.fx.node.map_arg((fused.args, fused.kwargs), _reader(known))
        known[site.node.name] = op.reference(*args, **kwargs)
        for node in site.between:
            self._step(node, known)
        for node, value in outputs.items():
            known[node.name] = _restrided(value, known[node.name])


def _reader(values: Values) -> Callable[[Node], Argument]:
    return lambda node: values[node.name]


def _upcast_except(arguments: Arguments, kept: set[int]) -> Arguments:
    return torch.fx.node.map_aggregate(arguments, lambda x: x if id(x) in kept else upcast(x))


def _tensor(value: Argument) -> Tensor:
    """A value that a node writes in place."""
    assert isinstance(value, Tensor)
    return value


def _restrided(value: Argument, like: Argument) -> Argument:
    """The value with the strides of `like`, on which readers may rely."""
    if isinstance(value, Tensor) and isinstance(like, Tensor) and value.stride() != like.stride():
        return torch.empty_like(like).copy_(value)
    return value
