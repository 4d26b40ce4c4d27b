"""Why not here? A tolerant growth that explains where a pattern nearly matched.

From a telling op (an anchor) it walks pattern and graph side by side in both directions, writes each difference down and
steps over it. It decides nothing: match.py does. A site where it finds no difference although the search refused is a
bug of ours.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Node

from atomc.canonical import COMMUTATIVE, GENERIC, VIEWS, Call, call, keeps_last_dim, spell, value
from atomc.match import Capture, Difference, Index, Pattern, Site, compare_attrs, problems, same_attr, without_cast
from atomc.provenance import describe
from atomc.sizes import expression, known_equal, substitute


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
    because: "NearMiss | None" = None  # the recognition miss that caused this one

    @property
    def score(self) -> tuple[float, int]:
        return (self.matched - self.edits) / self.total, -len(self.differences)

    @property
    def near(self) -> bool:
        """Worth showing: all is there but for one edit, or most of a larger pattern is."""
        if not self.differences or self.absent:
            return False
        if self.matched == self.total:
            return self.total >= 2 and self.edits <= 1
        return self.matched >= 0.6 * self.total and self.edits <= 2 and self.matched - self.edits >= 3

    @property
    def first(self) -> Difference:
        """The first cause: of the recognition miss behind this one, if there is one."""
        return self.because.first if self.because else self.differences[0]


def near_misses(
    patterns: Iterable[tuple[str, str, Pattern]], index: Index, causes: Sequence[NearMiss] = ()
) -> list[NearMiss]:
    """The best explanation per site for every (rewrite, variant, pattern), in graph order.

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
    return sorted(shown, key=lambda miss: miss.anchor)


def _caused(miss: NearMiss, causes: Sequence[NearMiss]) -> NearMiss | None:
    first = miss.differences[0]
    return next((cause for cause in causes
                 if first.node in cause.nodes and cause.rewrite in first.expected.split("(")[0]), None)


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
    here = {call(node).op for node in pattern.nodes if site.at(node) is not None}
    return NearMiss(rewrite, variant, g, sum(site.at(node) is not None for node in pattern.nodes), len(pattern.nodes),
                    len(structural), differences, site.nodes(), tuple(sorted(telling - here)))  # fmt: skip


class _Growth:
    """The state of one explanation."""

    def __init__(self, pattern: Pattern, p: Node, g: Node):
        self.pattern, self.site = pattern, Site(pattern)
        self.found: list[Difference] = []
        self.todo: list[tuple[Node, Node]] = []
        self.late_casts: list[tuple[Node, Node]] = []  # (graph node, its reader): missing unless the dtype is right
        self.replaced: set[Node] = set()  # pattern nodes in whose place another op stands
        self.extra: set[Node] = set()  # graph nodes in between
        self.place(p, g)

    def note(self, kind: str, expected: str, found: str, node: Node) -> bool:
        self.found.append(Difference(kind, expected, found, node))
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
            elif not any(self.follow_readers(p, g) for p, g in list({**self.site.alias, **self.site.matched}.items())):
                break
        for g, reader in self.late_casts:
            wanted = self.site.dtype(self.pattern.model_dtype or value(g).dtype)
            if value(g).dtype != wanted:
                self.note("missing op", f"a cast to {str(wanted).removeprefix('torch.')}",
                          f"{describe(g)} used as it is", reader)  # fmt: skip
        for p in self.pattern.nodes:
            here = self.site.at(p)
            for reader in p.users if here is not None else ():
                if reader in self.pattern.nodes and self.site.at(reader) is None and reader not in self.replaced:
                    others = ", ".join(describe(user) for user in here.users if user.op != "output") or "nothing"  # type: ignore[union-attr]
                    self.note("no reader", f"{spell(reader)} of {describe(here)}", f"only {others} reads it", here)  # type: ignore[arg-type]

    def structural(self) -> list[Difference]:
        """Differences of structure, upstream first, one per kind and node."""
        ordered = sorted(self.found, key=lambda difference: difference.node)  # type: ignore[arg-type,return-value]
        return list({(difference.kind, difference.node): difference for difference in ordered}.values())

    # ---- downwards: what the nodes read

    def compare_operands(self, p: Node, g: Node) -> None:
        wanted, here = call(p), call(g)
        compare_attrs(self.site, p, g, lambda kind, expected, found: self.note(kind, expected, found, g))
        if len(wanted.operands) != len(here.operands):
            self.note("arguments", f"{len(wanted.operands)} tensors into {spell(p)}", str(len(here.operands)), g)
            return

        def rate(order: list[Node]) -> float:
            return sum(self.similarity(q, h) for q, h in zip(wanted.operands, order, strict=True))

        order = max(_orders(wanted, here), key=rate)
        backwards = here.operands[::-1]
        if wanted.op not in COMMUTATIVE and len(backwards) == 2 and rate(backwards) > rate(here.operands) + 0.4:
            names = ", ".join(self.pattern.inputs.get(q, spell(q)) for q in wanted.operands)
            self.note("operand order", f"{wanted.op}({names})", "the operands the other way round", g)
            order = backwards
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
                self.note("same value", f"`{name}` to be {site.bound[name].name} as elsewhere", describe(g), reader)
            return
        wanted, here = call(p), call(g)
        if wanted.op == here.op and self.free(g):
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
        behind = [h for h in here.operands if call(h).op == wanted.op and self.free(h)]
        if behind and wanted.op != "cast":
            self.note("extra op", f"{spell(p)} read directly", f"{describe(g)} in between", g)
            self.extra.add(g)
            self.place(p, behind[0])
            return
        inner = [q for q in wanted.operands if q not in self.pattern.inputs and call(q).op == here.op]
        if not inner and wanted.op == "cast":
            inner = wanted.operands[:1]
        if inner:
            if wanted.op == "cast" and wanted.attrs["dtype"] == self.pattern.model_dtype:
                self.late_casts.append((g, reader))
            else:
                self.note("missing op", spell(p), f"{describe(g)} used as it is", reader)
            self.site.alias[p] = g
            self.settle(inner[0], g, reader)
            return
        self.note("other op", spell(p), describe(g), g)
        self.replaced.add(p)
        for q in wanted.operands:  # perhaps only this op differs: go on below it
            best = max(here.operands, key=lambda h: self.similarity(q, h), default=None)
            if best is not None and q not in self.pattern.inputs and self.similarity(q, best) >= 1.5:
                self.settle(q, best, g)

    # ---- upwards: who reads the nodes

    def follow_readers(self, p: Node, g: Node) -> bool:
        """Place one more reader of p among the readers of g. False if there is none to place."""
        for reader in p.users:
            if reader.op == "output" or self.site.at(reader) is not None or reader not in self.pattern.nodes:
                continue
            if self.follow(reader, p, g):
                return True
        return False

    def follow(self, reader: Node, p: Node, g: Node) -> bool:
        op, users = call(reader).op, list(g.users)
        direct = [user for user in users if call(user).op == op and self.free(user)]
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
        beyond_one = [(user, further) for user in users for further in user.users
                      if call(further).op == op and self.free(further) and self.free(user)]
        if beyond_one and op != "cast":
            between, further = max(beyond_one, key=lambda pair: self.similarity(reader, pair[1]))
            self.note("extra op", f"{spell(reader)} reading {describe(g)} directly", f"{describe(between)} in between",
                      between)  # fmt: skip
            self.extra.add(between)
            self.place(reader, further)
            return True
        for after in reader.users:  # perhaps the reader is missing and what follows it reads g
            if after.op == "output" or self.site.at(after) is not None:
                continue
            follower = next((u for u in users if call(u).op == call(after).op and self.free(u)), None)
            if follower is not None:
                self.note("missing op", f"{spell(reader)} after {describe(g)}", f"{describe(follower)} reads it as it is",
                          follower)  # fmt: skip
                self.site.alias[reader] = g
                self.place(after, follower)
                return True
        return False

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
