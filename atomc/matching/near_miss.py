"""Why not here? A tolerant growth that explains where a pattern nearly matched.

From a telling op (an anchor) it walks pattern and graph side by side in both directions, writes each difference down and
steps over it. It decides nothing: search.py does. A site where it finds no difference although the search refused is a
bug of ours.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from atomc.graph.canonical import COMMUTATIVE, GENERIC, VIEWS, Call, Capture, call, keeps_last_dim, readers, spell, value
from atomc.graph.expressions import expression, substitute
from atomc.graph.provenance import describe
from atomc.graph.sizes import known_equal
from atomc.matching.attributes import bare, compare_attrs, same_attr
from atomc.matching.conditions import problems
from atomc.matching.pattern import Difference, Index, Pattern, Site
from atomc.matching.search import without_cast
from atomc.report_records import MissKind

# Ops that only change how a value lies, looks or is kept: several in a row are one difference.
LAYOUT = VIEWS | {"permute", "expand", "cast", "to"}
LONGEST_CHAIN = 5


@dataclass
class NearMiss:
    """How far a rewrite's pattern got from one anchor, and every difference found on the way, first cause first."""

    rewrite: str
    variant: str
    anchor: Node
    matched: int
    total: int
    edits: int  # structural differences stepped over
    differences: list[Difference]
    nodes: set[Node] = field(default_factory=set)
    absent: tuple[str, ...] = ()  # telling ops of the pattern that are not here at all
    missing: int = 0  # nodes of the pattern whose place is empty; they count as matched
    because: "NearMiss | None" = None  # the recognition miss that caused this one

    @property
    def score(self) -> tuple[float, int, int]:
        return (self.matched - self.edits) / self.total, -self.missing, -len(self.differences)

    @property
    def near(self) -> bool:
        """Worth showing: all is there but for one edit, or most of a larger pattern is."""
        if not self.differences or self.absent:
            return False
        if self.edits <= 1 and (self.matched == self.total >= 2 or self.differences[0].kind == "taken"):
            return True
        return self.matched >= 0.6 * self.total and self.edits <= 2 and self.matched - self.edits >= 3

    @property
    def complete(self) -> bool:
        """Nothing differs: where the search refused such a site, one of the two is wrong."""
        return not self.differences and self.matched == self.total and not self.missing

    @property
    def first(self) -> Difference:
        """The first cause: of the recognition miss behind this one, if there is one."""
        return self.because.first if self.because else self.differences[0]


def near_misses(
    patterns: Iterable[tuple[str, str, Pattern]], index: Index, causes: Sequence[NearMiss] = ()
) -> tuple[list[NearMiss], list[NearMiss]]:
    """The best explanation per site for every (rewrite, variant, pattern), in graph order; and those without a reason.

    causes: near misses of earlier rewrites; a miss that lacks what one of these would have made points to it.
    """
    found = [explain(pattern, p, g, rewrite, variant)
             for rewrite, variant, pattern in patterns for p in anchors(pattern) for g in index[call(p).op]]
    shown: list[NearMiss] = []
    taken: dict[str, list[set[Node]]] = defaultdict(list)
    for miss in sorted(found, key=lambda miss: miss.score, reverse=True):
        if any(len(miss.nodes & nodes) * 2 > len(miss.nodes) for nodes in taken[miss.rewrite]):
            continue
        if miss.near or (miss.differences and not miss.absent and _caused(miss, causes)):
            miss.because = _caused(miss, causes)
            shown.append(miss)
            taken[miss.rewrite].append(miss.nodes)
    return sorted(shown, key=lambda miss: miss.anchor), [miss for miss in found if miss.complete]


def _caused(miss: NearMiss, causes: Sequence[NearMiss]) -> NearMiss | None:
    first = miss.differences[0]
    return next((cause for cause in causes
                 if first.node in cause.nodes and any(cause.rewrite in op for op in first.ops)), None)


def anchors(pattern: Pattern) -> list[Node]:
    """The pattern's telling nodes. Decided by the pattern alone, so that the answer does not change with depth."""
    ops = {call(p).op for p in pattern.nodes}
    keep = (ops - GENERIC) or (ops & {"cat", "sub", "neg", "mean"}) or ops
    return [p for p in pattern.nodes if call(p).op in keep]


def explain(pattern: Pattern, p: Node, g: Node, rewrite: str = "", variant: str = "") -> NearMiss:
    """Grow a match of `pattern` from the pair (p, g) and report how it differs."""
    growth = _Growth(pattern, p, g)
    growth.run()
    site = growth.site
    structural = growth.structural()
    whole = all(site.at(node) is not None for node in pattern.nodes)
    differences = structural + problems(site, partial=bool(structural) or not whole)
    telling = {call(node).op for node in pattern.nodes} - GENERIC
    placed = [node for node in pattern.nodes if site.at(node) is not None]
    absent = tuple(sorted(telling - {call(node).op for node in placed}))
    return NearMiss(rewrite, variant, g, len(placed), len(pattern.nodes), _num_edits(structural), differences,
                    site.nodes(), absent, len(growth.missing))  # fmt: skip


def _num_edits(structural: Sequence[Difference]) -> int:
    """How many things are different: one dim given to several ops is one, so is one op put in between at several places."""

    def what(d: Difference) -> Any:
        return {"attribute": d.found, "extra op": spell(d.node)}.get(d.kind, id(d))

    return len({(d.kind, what(d)) for d in structural})


class _Growth:
    """The state of one explanation."""

    def __init__(self, pattern: Pattern, p: Node, g: Node):
        self.pattern, self.site = pattern, Site(pattern)
        self.found: list[Difference] = []
        self.todo: list[tuple[Node, Node]] = []
        self.late_casts: list[tuple[Node, Node]] = []  # (graph node, its reader): missing unless the dtype is right
        self.replaced: set[Node] = set()  # pattern nodes in whose place another op stands
        self.missing: set[Node] = set()  # pattern nodes that are not there
        self.extra: set[Node] = set()  # graph nodes in between
        self.place(p, g)

    def note(self, kind: MissKind, expected: str, found: str, node: Node, *ops: str) -> bool:
        self.found.append(Difference(kind, expected, found, node, ops=ops))
        return True

    def place(self, p: Node, g: Node) -> None:
        self.site.matched[p] = g
        self.todo.append((p, g))

    def free(self, g: Node) -> bool:
        return g not in self.site.matched.values()

    def run(self) -> None:
        done = 0
        while True:
            if done < len(self.todo):
                p, g = self.todo[done]
                done += 1
                self.compare_operands(p, g)
            elif not self.grow_upwards():
                break
        for g, reader in self.late_casts:
            wanted = self.site.dtype(self.pattern.model_dtype or value(g).dtype)
            if value(g).dtype != wanted:
                self.note("missing cast", f"a cast to {bare(wanted)}",
                          f"{describe(g)} used as it is, in {bare(value(g).dtype)}", reader)  # fmt: skip
        for p in self.pattern.nodes:
            here = self.site.at(p)
            for reader in p.users if here is not None else ():
                if reader in self.pattern.nodes and self.site.at(reader) is None and reader not in self.replaced:
                    others = ", ".join(describe(user) for user in here.users if user.op != "output") or "nothing"  # type: ignore[union-attr]
                    self.note("no reader", f"{_wanted(reader)} reading {describe(here)}", f"only {others} reads it", here,  # type: ignore[arg-type]
                              call(reader).op)  # fmt: skip

    def structural(self) -> list[Difference]:
        """Differences of structure, upstream first, one per kind and node."""
        ordered = sorted(self.found, key=lambda difference: difference.node)  # type: ignore[arg-type,return-value]
        return list({(difference.kind, difference.node): difference for difference in ordered}.values())

    # ---- downwards: what the nodes read

    def compare_operands(self, p: Node, g: Node) -> None:
        wanted, here = call(p), call(g)
        compare_attrs(self.site, p, g, lambda kind, expected, found: self.note(kind, expected, found, g))
        if len(wanted.operands) != len(here.operands):
            self.note("arguments", f"{len(wanted.operands)} tensors into {_wanted(p)}", str(len(here.operands)), g)
            return

        def rate(order: list[Node]) -> float:
            return sum(self.similarity(q, h) for q, h in zip(wanted.operands, order, strict=True))

        order = max(_orders(wanted, here), key=rate)
        swapped = max(_swaps(here.operands), key=rate, default=order)
        if wanted.op not in COMMUTATIVE and rate(swapped) > rate(order) + 0.4:
            a, b = (self.pattern.inputs.get(q, _wanted(q))
                    for q, h, other in zip(wanted.operands, order, swapped, strict=True) if h is not other)  # fmt: skip
            self.note("operand order", f"{a} before {b} in {bare(wanted.op)}", "the operands the other way round", g)
            order = swapped
        pairs = sorted(zip(wanted.operands, order, strict=True), key=lambda pair: pair[0] in self.pattern.inputs)
        for q, h in pairs:
            self.settle(q, h, g)

    def settle(self, p: Node, g: Node, reader: Node) -> None:
        """Pattern operand p should be graph node g."""
        site = self.site
        known = site.at(p)
        if known is not None:
            if known is not g and not (g in self.extra and known in g.all_input_nodes):
                self.note("same value", f"the same {spell(known)} here as well", describe(g), reader)
            return
        if p in self.pattern.inputs:
            name = self.pattern.inputs[p]
            if site.bound.setdefault(name, g) is not g:
                self.note("same value", f"`{name}` to be {describe(site.bound[name])} as elsewhere", describe(g), reader)
            return
        wanted, here = call(p), call(g)
        if wanted.op == here.op and self.alike(p, g) and self.free(g):
            self.place(p, g)
        elif wanted.op == "cast" and value(g).dtype == wanted.attrs["dtype"] != self.pattern.model_dtype:
            without_cast(site, p, g)
            self.settle(wanted.operands[0], g, reader)
        elif self.pattern.sees_through and here.op in VIEWS and keeps_last_dim(g):
            site.skipped.append(g)
            self.settle(p, here.operands[0], reader)
        else:
            self.step_over(p, g, reader)

    def step_over(self, p: Node, g: Node, reader: Node) -> None:
        """g is not what p says: an op in between, an op missing, or another op."""
        wanted, here = call(p), call(g)
        chain = self.chain_down(p, g)
        if chain and wanted.op != "cast":
            *between, found = chain
            self.in_between(between[::-1], f"{describe(reader)} reading {_wanted(p)} directly", call(reader).op)
            self.place(p, found)
            return
        inner = [q for q in wanted.operands if q not in self.pattern.inputs and call(q).op == here.op]
        if not inner and wanted.op == "cast":
            inner = wanted.operands[:1]
        if inner:
            if wanted.op == "cast" and wanted.attrs["dtype"] == self.pattern.model_dtype:
                self.late_casts.append((g, reader))
            else:
                self.note("missing op", _wanted(p), f"{describe(g)} used as it is", reader, wanted.op)
                self.missing.add(p)
            self.site.alias[p] = g
            self.settle(inner[0], g, reader)
            return
        self.replaced.add(p)
        maker = here.operands[0] if here.op == "getitem" else g
        if wanted.op in maker.meta.get("consumed", ()):
            self.note("taken", f"{_wanted(p)} for itself", f"taken by {maker.meta['made_by']}", g, wanted.op)
            return
        self.note("other op", _wanted(p), describe(g), g, wanted.op)
        for q in wanted.operands:  # perhaps only this op differs: go on below it
            best = max(here.operands, key=lambda h: self.similarity(q, h), default=None)
            if best is not None and q not in self.pattern.inputs and self.similarity(q, best) >= 1.5:
                self.settle(q, best, g)

    # ---- upwards: who reads the nodes

    def grow_upwards(self) -> bool:
        """Place one more node that reads, or is read together with, what is placed. False if there is none."""
        placed = {**self.site.alias, **self.site.matched}
        return any(self.follow_readers(p, g) for p, g in placed.items()) or self.find_together()

    def follow_readers(self, p: Node, g: Node) -> bool:
        """Place one more reader of p among the readers of g. False if there is none to place."""
        for reader in p.users:
            if reader.op == "output" or self.site.at(reader) is not None or reader not in self.pattern.nodes:
                continue
            if self.follow(reader, p, g):
                return True
        return False

    def follow(self, reader: Node, p: Node, g: Node) -> bool:
        op, users = call(reader).op, readers(g)
        direct = [user for user in users if call(user).op == op and self.alike(reader, user) and self.free(user)]
        if direct:
            self.place(reader, max(direct, key=lambda user: self.similarity(reader, user)))
            return True
        if op == "cast" and isinstance(value(g), Tensor) and value(g).dtype == self.site.dtype(call(reader).attrs["dtype"]):
            return without_cast(self.site, reader, g)
        if self.pattern.sees_through:
            for view in users:
                if call(view).op in VIEWS and keeps_last_dim(view):
                    beyond = [user for user in view.users if call(user).op == op]
                    if beyond:
                        self.site.skipped.append(view)
                        self.place(reader, beyond[0])
                        return True
        chain = self.chain_up(reader, g)
        if chain:
            *between, found = chain
            self.in_between(between, f"{_wanted(reader)} reading {describe(g)} directly", op)
            self.place(reader, found)
            return True
        for after in reader.users:  # perhaps the reader is missing and what follows it reads g
            if after.op == "output" or self.site.at(after) is not None:
                continue
            follower = next((u for u in users if call(u).op == call(after).op and self.free(u)), None)
            if follower is not None:
                self.note("missing op", f"{_wanted(reader)} after {describe(g)}", f"{describe(follower)} reads it as it is",
                          follower, op)  # fmt: skip
                self.missing.add(reader)
                self.site.alias[reader] = g
                self.place(after, follower)
                return True
        return False

    # ---- several results that one node reads

    def find_together(self) -> bool:
        """Place one more result of the pattern among what is read together with one that is placed."""
        outputs = self.pattern.outputs if self.pattern.read_together else []
        placed = [(p, g) for p in outputs if (g := self.site.at(p)) is not None]
        unplaced = [p for p in outputs if self.site.at(p) is None and p not in self.replaced]
        for (mate, here), p in itertools.product(placed, unplaced):
            later = outputs.index(p) > outputs.index(mate)
            found = [(self.similarity_beyond(p, g), g, reader, between) for reader, between in self.readers_beyond(here)
                     for g in _mates(reader, [here, *between][-1], later)]  # fmt: skip
            rating, g, reader, between = max(found, key=lambda entry: entry[0], default=(0.0, here, here, []))
            if rating > 1:
                if between:
                    self.in_between(between, f"{describe(here)} read together with {_wanted(p)}", call(here).op)
                self.settle(p, g, reader)
                return True
        return False

    def readers_beyond(self, g: Node) -> list[tuple[Node, list[Node]]]:
        """Who reads g, directly or behind ops in between."""
        found: list[tuple[Node, list[Node]]] = [(user, []) for user in readers(g)]
        for user, between in found:
            if len(between) < LONGEST_CHAIN and _num_real([*between, user]) <= 1:
                found += [(further, [*between, user]) for further in readers(user)]
        return found

    def similarity_beyond(self, p: Node, g: Node) -> float:
        """How much g, or what it is made of, looks like p."""
        chain = self.chain_down(p, g)
        return max([self.similarity(p, g)] + ([self.similarity(p, chain[-1]) - 0.5] if chain else []))

    # ---- ops in between

    def in_between(self, between: list[Node], expected: str, *ops: str) -> None:
        """Note ops that the pattern does not have, first come first."""
        found = " > ".join([*map(spell, between[:-1]), describe(between[-1])])
        self.note("extra op", expected, f"{found} in between", between[0], *ops)
        self.extra |= set(between)

    def chain_down(self, p: Node, g: Node) -> list[Node]:
        """[g, .., what p says]: the way down from g to an op like p, of which at most one op is not layout."""
        chains = [[g]]
        for chain in chains:
            for h in call(chain[-1]).operands:
                if self.like(p, h) and self.free(h):
                    return [*chain, h]
                if len(chain) < LONGEST_CHAIN and _num_real([*chain, h]) <= 1 and h.op == "call_function":
                    chains.append([*chain, h])
        return []

    def chain_up(self, p: Node, g: Node) -> list[Node]:
        """[.., what p says]: the way up from a reader of g to an op like p, of which at most one op is not layout."""
        chains = [[user] for user in readers(g) if self.free(user)]
        for chain in chains:
            beyond = [user for user in readers(chain[-1]) if self.like(p, user) and self.free(user)]
            if beyond:
                return [*chain, max(beyond, key=lambda user: self.similarity(p, user))]
            if len(chain) < LONGEST_CHAIN:
                chains += [[*chain, user] for user in readers(chain[-1])
                           if _num_real([*chain, user]) <= 1 and self.free(user)]  # fmt: skip
        return []

    def like(self, p: Node, g: Node) -> bool:
        wanted, here = call(p), call(g)
        dtype = wanted.attrs.get("dtype")
        same_cast = wanted.op != "cast" or isinstance(dtype, Capture) or self.site.dtype(dtype) == here.attrs.get("dtype")
        return wanted.op == here.op and same_cast and self.alike(p, g)

    def alike(self, p: Node, g: Node) -> bool:
        """Not one a product of two tensors and the other of a tensor and a number."""
        return call(p).op not in COMMUTATIVE or len(call(p).operands) == len(call(g).operands)

    # ---- choosing between candidates

    def similarity(self, p: Node, g: Node, depth: int = 3) -> float:
        """How much the graph below g looks like the pattern below p."""
        known = self.site.at(p)
        if known is None and p in self.pattern.inputs:
            known = self.site.bound.get(self.pattern.inputs[p])
            if known is None:
                return 0.1
        if known is not None:
            return 1.0 if known is g else -0.5
        wanted, here = call(p), call(g)
        if wanted.op != here.op:
            return self.similarity(wanted.operands[0], g, depth) if wanted.op == "cast" and depth else 0.0
        score = 1.0 + 0.5 * _equal_attrs(wanted, here)
        if depth and wanted.operands:
            score += max(sum(self.similarity(q, h, depth - 1) for q, h in zip(wanted.operands, order, strict=False))
                         for order in _orders(wanted, here))  # fmt: skip
        return score


def _swaps(operands: list[Node]) -> list[list[Node]]:
    """The operands with two different ones exchanged, in every way."""
    found = []
    for i, j in itertools.combinations(range(len(operands)), 2):
        if operands[i] is not operands[j]:
            swapped = list(operands)
            swapped[i], swapped[j] = operands[j], operands[i]
            found.append(swapped)
    return found


def _wanted(p: Node) -> str:
    """A pattern's node in few words."""
    return spell(p, of_pattern=True)


def _num_real(nodes: Iterable[Node]) -> int:
    """How many of the nodes compute something."""
    return sum(call(node).op not in LAYOUT for node in nodes)


def _mates(reader: Node, read: Node, later: bool) -> list[Node]:
    """What the reader takes after (or before) `read`."""
    operands = call(reader).operands
    if read not in operands:
        return []
    at = operands.index(read)
    return operands[at + 1:] if later else operands[:at]


def _orders(wanted: Call, here: Call) -> list[list[Node]]:
    both = wanted.op in COMMUTATIVE and len(here.operands) == 2
    return [here.operands, here.operands[::-1]] if both else [here.operands]


def _equal_attrs(wanted: Call, here: Call) -> float:
    """The share of constant attributes that agree, sizes taken from the operands."""
    symbols = {expression(a): b
               for q, h in zip(wanted.operands, here.operands, strict=False)
               if isinstance(value(q), Tensor) and isinstance(value(h), Tensor)
               for a, b in zip(reversed(value(q).shape), reversed(value(h).shape), strict=False)
               if isinstance(a, torch.SymInt)}  # fmt: skip
    equal = []
    for name, expected in wanted.attrs.items():
        if isinstance(expected, Capture | tuple):
            continue
        found = here.attrs.get(name)
        if isinstance(expected, torch.SymInt):
            equal.append(found is not None and known_equal(substitute(expected, symbols), found))
        else:
            equal.append(same_attr(expected, found))
    return sum(equal) / len(equal) if equal else 1.0
