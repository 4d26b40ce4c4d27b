"""One call of a lowered graph, run a node at a time beside what the program says.

Each place is given what it reads in the lowered graph, and runs three times: the kernel that was chosen; the original
nodes, or the op's meaning where these cannot be told, as they are; and these in fp32, which is what the others are
measured by.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from atomc.audit.error import Error, worst
from atomc.audit.evaluate import Values, computed, flat, forget, last_readers, outputs_of, widened
from atomc.audit.node_correspondence import Trail
from atomc.audit.sites import Place, Slice
from atomc.graph.mutation import mutated
from atomc.op import op_of

# Caches larger than this are not copied, to be compared.
MOST_COPIED = 2**28
Progress = Callable[[Iterable[Node]], Iterable[Node]]


class Measured:
    """What a place gives: `error` of the kernel, `original` of the original nodes in their own dtypes, both against fp32.

    against  "original nodes" or "meaning", with ", not in fp32" if they do not run in it
    """

    def __init__(self) -> None:
        self.error, self.original, self.against = Error(), Error(), ""

    def add(self, found: Any, own: Any, exact: Any, against: str) -> None:
        """One more output: by the kernel, by the original nodes in their own dtypes, and in fp32."""
        error, original = worst(flat(found), flat(exact)), worst(flat(own), flat(exact))
        if not self.against or error.rank > self.error.rank:
            self.error, self.original, self.against = error, original, against


class Examination:
    """The graphs of one trail, with the arguments of one call by name; these are not written."""

    def __init__(self, trail: Trail, lowered: GraphModule, inputs: Mapping[str, Any], places: Sequence[Place]):
        self.trail, self.lowered, self.inputs = trail, lowered, inputs
        self.places = {place.node: place for place in places}
        self.fused = {node.name: node for node in trail.fused.graph.nodes}
        self.order = list(lowered.graph.nodes)
        self.last = last_readers(lowered.graph)
        number = {node: i for i, node in enumerate(self.order)}
        for place in places:
            for part in place.slices:
                for node in part.given.values():
                    self.last[node.name] = max(self.last[node.name], number[place.node])
        self.last |= {node.name: len(self.order) for node in self.order if node.op == "placeholder"}
        self.notes: list[str] = []

    def captured(self, *, exact: bool) -> list[Any]:
        """What the program says, in fp32 or in its own dtypes."""
        return outputs_of(self.trail.captured, self.inputs, exact=exact)

    def measured(self, progress: Progress = iter) -> tuple[list[Any], dict[Node, Measured]]:
        """What the lowered graph returns, and each place beside the original."""
        found: dict[Node, Measured] = {}
        known = self._start()
        for i, node in enumerate(progress(self.order)):
            if node.op == "output":
                return self._returned(node, known), found
            place = self.places.get(node)
            if place is not None:
                found[node] = self._measure(place, known)
            else:
                self._step(node, known)
            forget(known, self.last, i)
        raise AssertionError("a graph without an output")

    def without(self, places: Iterable[Place]) -> list[Any]:
        """What the lowered graph returns if these places compute what the program says."""
        left_out = {place.node for place in places}
        known = self._start()
        for i, node in enumerate(self.order):
            if node.op == "output":
                return self._returned(node, known)
            if node in left_out:
                self._as_original(self.places[node], known)
            else:
                self._step(node, known)
            forget(known, self.last, i)
        raise AssertionError("a graph without an output")

    def _start(self) -> Values:
        """The arguments; those that the glue writes in place as copies. A cache is written with the same numbers again."""
        written = {target.name for node in self.order for target in mutated(node)}
        return {name: given.clone() if name in written and isinstance(given, Tensor) else given
                for name, given in self.inputs.items()}  # fmt: skip

    def _returned(self, output: Node, known: Values) -> list[Any]:
        return flat(torch.fx.node.map_arg(output.args[0], lambda n: known[n.name]))

    def _step(self, node: Node, known: Values) -> None:
        """Run a node of the lowered graph as it stands."""
        if node.name in known:  # an argument, or an output of a place
            return
        if node.op == "get_attr":
            known[node.name] = computed(self.lowered, node, _nothing)
            return
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: known[n.name])
        assert callable(node.target), node.format_node()
        known[node.name] = node.target(*args, **kwargs)

    def _measure(self, place: Place, known: Values) -> Measured:
        measured = Measured()
        fused = self.fused[place.node.name]
        written = mutated(fused)
        by_nodes = place.whole and not place.cached
        before = None if by_nodes and not written else self._copies(place, written, known)
        self._step(place.node, known)
        for node in place.between:
            self._step(node, known)
        for part in () if place.cached else place.slices:
            exact, against = self._exact(part, known)
            measured.add(known[part.output.name], self._slice(part, known), exact, against)
        if before is not None:
            self._beside_meaning(place, fused, before, known, measured, returned=not by_nodes and not written)
        return measured

    def _copies(self, place: Place, written: Sequence[Node], known: Values) -> Values | None:
        """What the op reads, with copies of what it writes; None if these are too large."""
        fused = self.fused[place.node.name]
        if sum(known[node.name].nbytes for node in written) > MOST_COPIED:
            self.notes.append(f"{place.op} in {place.module_path} is not compared: its caches are too large to be copied")
            return None
        read = {node.name: known[node.name] for node in fused.all_input_nodes}
        return read | {node.name: known[node.name].clone() for node in written}

    def _beside_meaning(
        self, place: Place, fused: Node, before: Values, known: Values, measured: Measured, *, returned: bool
    ) -> None:
        """Compare what was written, and what is returned if that is asked for, with those of the op's meaning."""
        op = op_of(fused.target)
        assert op is not None
        names = [node.name for node in mutated(fused)]
        made = []
        for exact in (False, True):
            copies = {name: value.clone() if name in names else value for name, value in before.items()}
            args, kwargs = torch.fx.node.map_arg((fused.args, fused.kwargs), _reader(copies))
            if exact:
                args, kwargs = _widened_but(args, kwargs, {id(copies[name]) for name in names})
            out = op.reference(*args, **kwargs)
            made.append((out, [copies[name] for name in names]))
        (own, own_written), (exact_out, exact_written) = made
        if returned:
            measured.add(known[place.node.name], own, exact_out, "meaning")
        for name, a, b in zip(names, own_written, exact_written, strict=True):
            measured.add(known[name], a, b, "meaning")

    def _exact(self, part: Slice, known: Values) -> tuple[Any, str]:
        try:
            return self._slice(part, known, exact=True), "original nodes"
        except (RuntimeError, TypeError, ValueError):  # a node that takes 16-bit numbers only
            return self._slice(part, known), "original nodes, not in fp32"

    def _slice(self, part: Slice, known: Values, *, exact: bool = False) -> Any:
        """The last of the original nodes, of what the lowered graph has."""
        values: dict[Node, Any] = {}
        for captured, node in part.given.items():
            values[captured] = self.inputs[node.name] if node.op == "placeholder" else known[node.name]
        for node in part.nodes:
            values[node] = computed(self.trail.captured, node, values.__getitem__, exact=exact)
        return values[part.nodes[-1]]

    def _as_original(self, place: Place, known: Values) -> None:
        """Compute a place by its meaning, and by the original nodes what these say."""
        fused = self.fused[place.node.name]
        op = op_of(fused.target)
        assert op is not None
        outputs = {part.output: self._slice(part, known) for part in place.slices}
        args, kwargs = torch.fx.node.map_arg((fused.args, fused.kwargs), lambda n: known[n.name])
        known[place.node.name] = op.reference(*args, **kwargs)
        for node in place.between:
            self._step(node, known)
        for node, value in outputs.items():
            known[node.name] = _lying_like(value, known[node.name])


def _reader(values: Values) -> Callable[[Node], Any]:
    return lambda node: values[node.name]


def _nothing(node: Node) -> Any:
    raise AssertionError(f"{node} reads nothing")


def _widened_but(args: Any, kwargs: Any, kept: set[int]) -> Any:
    return torch.fx.node.map_aggregate((args, kwargs), lambda x: x if id(x) in kept else widened(x))


def _lying_like(value: Any, like: Any) -> Any:
    """The value, with the strides of the other, which readers may rely on."""
    if isinstance(value, Tensor) and isinstance(like, Tensor) and value.stride() != like.stride():
        return torch.empty_like(like).copy_(value)
    return value
