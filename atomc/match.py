"""The matcher that decides: a small complete search for a traced pattern in a functional ATen graph.

It tries both orders of commutative operands and every reader for a further output, undoes what fails, and then checks
what structure does not say: sizes, dtypes, devices, intermediates read from outside, mutation in between, cycles.
near_miss.py explains the places where it nearly succeeded.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, Node

from atomc.canonical import COMMUTATIVE, VIEWS, Capture, call, keeps_last_dim, readers, value
from atomc.expressions import Size, expression, known_different, substitute
from atomc.provenance import describe
from atomc.sizes import known_equal, spell_shape
from atomc.torch_tracing import traced_alone


@dataclass
class Difference:
    """One thing that keeps a pattern from matching. `rank` orders the checks: upstream first.

    kind, of the structure: "extra op", "missing op", "missing cast", "other op", "operand order", "arguments",
    "attribute", "scalar", "same value", "no reader"; of the values: "dtype", "size", "view", "device",
    "extra user", "mutation", "cycle"; of rewriting: "guard", "taken".
    """

    kind: str
    expected: str
    found: str
    node: Node | None
    rank: int = 0


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


Veto = Callable[[str, str, str], bool]


def compare_attrs(site: Site, p: Node, g: Node, veto: Veto) -> bool:
    """Compare everything but tensors; `veto(kind, expected, found)` says whether to go on after a difference."""
    wanted, found = call(p), call(g)
    for name in wanted.attrs.keys() | found.attrs.keys():
        expected, here = wanted.attrs.get(name), found.attrs.get(name)
        if wanted.op in ("view", "expand", "cast") and name in ("shape", "dtype"):
            site.deferred.append((p, g, name, expected, here))
        elif isinstance(expected, Capture):
            if not _bind(site, expected, here, veto):
                return False
        elif _holds_capture(expected) and _as_long(expected, here):
            for item, found_item in zip(cast("tuple[Any, ...]", expected), cast("tuple[Any, ...]", here), strict=True):
                if isinstance(item, Capture):
                    if not _bind(site, item, found_item, veto):
                        return False
                elif not same_attr(item, found_item) and not veto("attribute", f"{name}={bare(item)}", bare(found_item)):
                    return False
        elif isinstance(expected, torch.SymInt):
            site.deferred.append((p, g, name, expected, here))
        elif not same_attr(expected, here) and not veto("attribute", f"{bare(wanted.op)} with {name}={bare(expected)}",
                                           f"{name}={bare(here)}"):  # fmt: skip
            return False
    return True


def _holds_capture(attr: Any) -> bool:
    return isinstance(attr, tuple) and any(isinstance(item, Capture) for item in attr)


def _as_long(expected: Any, here: Any) -> bool:
    return isinstance(here, tuple) and len(here) == len(expected)


def _bind(site: Site, capture: Capture, here: Any, veto: Veto) -> bool:
    """The argument is what stands here, and the same everywhere; a size that varies is no constant."""
    if here is None or isinstance(here, Node | torch.SymInt | torch.SymFloat):
        return veto("scalar", f"a constant for `{capture.name}`", str(here))
    first = site.bound.setdefault(capture.name, here)
    return bool(first == here) or veto("scalar", f"one `{capture.name}` everywhere (first {first})", str(here))


def same_attr(expected: Any, here: Any) -> bool:
    """Equality that adds no guard where a size is symbolic."""
    if isinstance(expected, tuple) and isinstance(here, tuple):
        return len(expected) == len(here) and all(map(same_attr, expected, here))
    if isinstance(expected, torch.SymInt) or isinstance(here, torch.SymInt):
        return isinstance(expected, Size) and isinstance(here, Size) and known_equal(expected, here)
    return bool(expected == here)


def bare(item: object) -> str:
    """Without the namespace: float32, rms_norm; of what the site decides, its name."""
    if isinstance(item, Capture):
        return item.name
    if isinstance(item, tuple):
        return f"({', '.join(map(bare, item))}{',' * (len(item) == 1)})"
    return str(item).replace("atom::", "").replace("torch.", "")


def _no_veto(*_: str) -> bool:
    return False


def unify(site: Site, pairs: list[tuple[Node, Node]]) -> Iterator[Site]:
    """Every way to make the pattern node of each pair be its graph node. The site is changed and changed back."""
    if not pairs:
        yield site
        return
    (p, g), rest = pairs[0], pairs[1:]

    def attempt(more: list[tuple[Node, Node]], bind: Callable[[], bool]) -> Iterator[Site]:
        saved = site.saved()
        if bind():
            yield from unify(site, more + rest)
        site.restore(saved)

    def skip() -> bool:
        site.skipped.append(g)
        return True

    if not isinstance(g, Node):
        return
    see_through = site.pattern.sees_through and call(g).op in VIEWS and keeps_last_dim(g)
    if site.at(p) is not None:
        if site.at(p) is g:
            yield from unify(site, rest)
        elif see_through:
            yield from attempt([(p, call(g).operands[0])], skip)
        return
    if p in site.pattern.inputs:
        name = site.pattern.inputs[p]
        if name not in site.bound:
            yield from attempt([], lambda: site.bound.setdefault(name, g) is g)
        elif site.bound[name] is g:
            yield from unify(site, rest)
        return
    wanted, found = call(p), call(g)

    def place() -> bool:
        site.matched[p] = g
        return compare_attrs(site, p, g, _no_veto)

    if wanted.op == found.op and len(wanted.operands) == len(found.operands) and g not in site.matched.values():
        yield from attempt(list(zip(wanted.operands, found.operands, strict=True)), place)
        if wanted.op in COMMUTATIVE and len(wanted.operands) == 2:
            yield from attempt(list(zip(wanted.operands, reversed(found.operands), strict=True)), place)
    if wanted.op == "cast" and found.op != "cast":
        yield from attempt([(wanted.operands[0], g)], lambda: without_cast(site, p, g))
    if see_through and wanted.op not in VIEWS:
        yield from attempt([(p, found.operands[0])], skip)


def without_cast(site: Site, p: Node, g: Node) -> bool:
    """The pattern casts, the graph need not because g has that dtype already (checked once all is bound)."""
    site.alias[p] = g
    site.deferred.append((p, g, "dtype", call(p).attrs["dtype"], value(g).dtype))
    return True


def _candidates(site: Site, output: Node) -> list[Node]:
    """Graph nodes that could be a further output, reached over the readers of what is matched."""
    op = call(output).op
    taken = set(site.matched.values())
    if site.pattern.read_together:
        first = next(node for node in site.outputs())
        order = next(i for i, o in enumerate(site.pattern.outputs) if site.at(o) is first)
        wanted_later = site.pattern.outputs.index(output) > order
        together = []
        for reader in first.users:
            operands = call(reader).operands
            if first in operands:
                at = operands.index(first)
                together += operands[at + 1:] if wanted_later else operands[:at]
        found = [node for operand in together for node in _through_cache(operand, op)]
        return [node for node in dict.fromkeys(found) if node not in taken]

    def reading(node: Node) -> Iterator[Node]:
        for user in readers(node):
            yield user
            if site.pattern.sees_through and call(user).op in VIEWS and keeps_last_dim(user):
                yield from user.users

    def reached(p: Node) -> list[Node]:
        here = site.at(p)
        if here is not None:
            return [here]
        if p in site.pattern.inputs:
            bound = site.bound.get(site.pattern.inputs[p])
            return [bound] if isinstance(bound, Node) else []
        return [user for operand in call(p).operands for node in reached(operand) for user in reading(node)
                if call(user).op == call(p).op and user not in taken]

    return list(dict.fromkeys(reached(output)))


def _through_cache(node: Node, op: str, depth: int = 4) -> Iterator[Node]:
    """The node itself if it is a call of `op`, else what of that kind was written to the cache that it is a view of."""
    here = call(node)
    if here.op == op:
        yield node
    elif depth and here.op in ("permute", "view", "slice", "index_copy"):
        for operand in here.operands:
            yield from _through_cache(operand, op, depth - 1)


def _complete(site: Site) -> Iterator[Site]:
    missing = next((output for output in site.pattern.outputs if site.at(output) is None), None)
    if missing is None:
        yield site
        return
    for candidate in _candidates(site, missing):
        for grown in unify(site, [(missing, candidate)]):
            yield from _complete(grown)


def matches(pattern: Pattern, index: Index) -> Iterator[tuple[Site, list[Difference]]]:
    """Every place where the structure fits, with what forbids the rewrite there (nothing: it may be rewritten)."""
    root = min(pattern.outputs, key=lambda output: len(index[call(output).op]))
    starts = list(index[call(root).op])
    if call(root).op == "cast":  # where the model's dtype is right already, the last cast is not there
        starts += index[call(call(root).operands[0]).op]
    for start in starts:
        # The last cast may vanish at a node that is itself followed by a cast: take the first way that may be rewritten.
        best: tuple[Site, list[Difference]] | None = None
        for site in unify(Site(pattern), [(root, start)]):
            done = next(_complete(site), None)
            if done is None:
                continue
            found = Site(pattern)
            found.restore(done.saved())
            wrong = problems(found)
            if best is None or not wrong:
                best = found, wrong
            if not wrong:
                break
        if best is not None:
            yield best


def problems(site: Site, partial: bool = False) -> list[Difference]:
    """Everything that forbids the rewrite although the structure fits, most upstream first.

    partial: the structure does not fit (an explanation is being made), so only the values are checked.
    """
    found = [*_input_problems(site), *_device_problems(site), *_deferred_problems(site), *_dtype_problems(site)]
    if not partial:
        found += [*_escapes(site), *_mutations_and_cycles(site)]
    return sorted(found, key=lambda difference: difference.rank)


def _input_problems(site: Site) -> Iterator[Difference]:
    symbols = site.symbols()
    for name, p, g in site.tensors():
        wanted = site.dtype(value(p).dtype)
        if value(g).dtype != wanted:
            like = f" (the dtype of `{site.pattern.typical_input}`)" if value(p).dtype == site.pattern.model_dtype else ""
            yield Difference("dtype", f"`{name}` in {bare(wanted)}{like}", bare(value(g).dtype), g, -1)
        for d, (size, actual) in enumerate(zip(reversed(value(p).shape), reversed(value(g).shape), strict=False)):
            expected = substitute(size, symbols)
            if not known_equal(expected, actual):
                yield Difference("size", f"`{name}` with size {expected} in dim {-1 - d}", _size(expected, actual), g, -1)
        if value(g).dim() < value(p).dim():
            yield Difference("size", f"`{name}` with at least {value(p).dim()} dimensions",
                             f"{value(g).dim()} (broadcast)", g, -1)  # fmt: skip
    yield from _rank_problems(site)


def _size(expected: Any, actual: Any) -> str:
    return f"{actual}" if known_different(expected, actual) else f"{actual}, which cannot be shown equal for every size"


def _rank_problems(site: Site) -> Iterator[Difference]:
    """Inputs whose example starts with the same size have the same rank and leading sizes at the site."""
    groups: dict[Any, list[tuple[str, Node, Node]]] = defaultdict(list)
    for name, p, g in site.tensors():
        if value(p).dim():
            groups[expression(value(p).shape[0]) if value(p).dim() > 1 else name].append((name, p, g))
    for (first, p0, g0), *others in groups.values():
        for name, p, g in others:
            extra = value(g).dim() - value(p).dim()
            if extra != value(g0).dim() - value(p0).dim():
                rank = value(p).dim() + value(g0).dim() - value(p0).dim()
                yield Difference("size", f"`{name}` of rank {rank}, like `{first}`",
                                 f"rank {value(g).dim()} (broadcast)", g, -1)  # fmt: skip
            elif not all(known_equal(a, b) for a, b in
                         zip(value(g0).shape[:max(0, extra)], value(g).shape[:max(0, extra)], strict=True)):
                yield Difference("size", f"`{name}` with the leading sizes of `{first}`",
                                 spell_shape(value(g).shape), g, -1)  # fmt: skip


def _device_problems(site: Site) -> Iterator[Difference]:
    first = next((node for _, _, node in site.tensors()), None)
    if first is None:
        return
    nodes = [node for _, _, node in site.tensors()] + list(site.matched.values())
    for node in nodes:
        if isinstance(value(node), Tensor) and value(node).device != value(first).device:
            yield Difference("device", f"everything on {value(first).device}",
                             f"{describe(node)} on {value(node).device}", node, -1)  # fmt: skip


def _deferred_problems(site: Site) -> Iterator[Difference]:
    symbols = site.symbols()
    for p, g, name, expected, here in site.deferred:
        rank = site.pattern.position[p]
        if name == "dtype":
            if here != site.dtype(expected):
                cast = f"a cast to {bare(site.dtype(expected))}"
                if p in site.alias:
                    yield Difference("missing cast", cast, f"{describe(g)} used as it is, in {bare(here)}", g, rank)
                else:
                    yield Difference("dtype", cast, f"one to {bare(here)}", g, rank)
        elif name == "shape":
            shape = [substitute(size, symbols) for size in expected]
            count = min(len(shape), len(here))
            if not all(known_equal(a, b) for a, b in zip(shape[-count:], here[-count:], strict=True)):
                yield Difference("view", f"shape {spell_shape(shape)}", spell_shape(here), g, rank)
        elif here is None or not known_equal(substitute(expected, symbols), here):
            yield Difference("attribute", f"{call(p).op} with {name}={substitute(expected, symbols)}",
                             f"{name}={here}", g, rank)  # fmt: skip


def _dtype_problems(site: Site) -> Iterator[Difference]:
    for p, g in site.matched.items():
        if call(p).op == call(g).op != "cast" and isinstance(value(g), Tensor):
            wanted = site.dtype(value(p).dtype)
            if value(g).dtype != wanted:
                yield Difference("dtype", f"{bare(call(p).op)} computed in {bare(wanted)}", bare(value(g).dtype), g,
                                 site.pattern.position[p])  # fmt: skip


def _escapes(site: Site) -> Iterator[Difference]:
    """An intermediate value would be gone, but somebody outside reads it."""
    inside, outputs = site.nodes(), set(site.outputs())
    position = {g: site.pattern.position[p] for p, g in site.matched.items()}
    for node in inside - outputs:
        for reader in readers(node):
            if reader not in inside:
                who = "the graph returns it" if reader.op == "output" else f"{describe(reader)} reads it too"
                yield Difference("extra user", f"no other reader of {describe(node)}", who, node,
                                 position.get(node, 0))  # fmt: skip


def _mutations_and_cycles(site: Site) -> Iterator[Difference]:
    inside, outputs = site.nodes(), set(site.outputs())
    own_writes = {node for node in inside if mutated(node)}
    read = {storage(node) for node in inside} | {storage(b) for b in site.bound.values() if isinstance(b, Node)}
    downstream: set[Node] = set()
    for node in _span(inside):
        for written in mutated(node):
            if node not in own_writes and storage(written) in read:
                yield Difference("mutation", f"{describe(written)} unchanged while it is read",
                                 f"{describe(node)} writes it", node, 10**6)  # fmt: skip
        if node not in inside and any(a in outputs or a in downstream for a in node.all_input_nodes):
            downstream.add(node)
    for node in inside:
        for operand in node.all_input_nodes:
            if operand in downstream:
                yield Difference("cycle", "inputs ready before any output is used",
                                 f"{describe(operand)} needs an output of this match", operand, 10**6)  # fmt: skip


def _span(nodes: set[Node]) -> Iterator[Node]:
    """All nodes of the graph from the first of `nodes` to the last."""
    left, node = len(nodes), min(nodes)
    while left:
        yield node
        left -= node in nodes
        node = node.next


def storage(node: Node) -> Node:
    """The node whose memory a view looks at."""
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        alias = schema.arguments[0].alias_info if schema is not None and schema.arguments else None
        if alias is None or alias.is_write or not node.args or not isinstance(node.args[0], Node):
            break
        node = node.args[0]
    return node


def mutated(node: Node) -> list[Node]:
    """The tensors that a node writes in place."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return []
    written = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            if isinstance(given, Node):
                written.append(given)
    return written


def same_signature(pattern: Callable[..., Any], replacement: Callable[..., Any]) -> bool:
    """Whether two functions take the same parameters by name."""
    return set(inspect.signature(pattern).parameters) == set(inspect.signature(replacement).parameters)
