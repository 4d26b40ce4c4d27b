"""A tolerant match that grows from one pair of nodes and records the differences.

It walks pattern and graph in parallel in both directions, records each difference and steps over
it. Of several candidates for a node of the pattern, it takes the most similar one (similarity.py).
"""

import itertools
from collections import deque
from collections.abc import Iterable

from torch import Tensor
from torch.fx import Node

from atomc.graph.canonical import COMMUTATIVE, VIEWS, call, keeps_last_dim, readers, spell, value
from atomc.graph.node_record import record_of
from atomc.graph.op_call import kind_of
from atomc.graph.provenance import describe
from atomc.ops.op import op_of
from atomc.ops.op_traits import Kind
from atomc.report.records import MissKind
from atomc.rewriting.matching.attributes import attr_differences, bare
from atomc.rewriting.matching.pattern import Difference, MatchSite, Pattern
from atomc.rewriting.matching.search import read_beside, skip_cast
from atomc.rewriting.matching.similarity import alike, like, similarity

# Ops that only change layout, shape or dtype: several in a row are one difference.
LAYOUT = VIEWS | {"permute", "expand", "cast", "to"}
LONGEST_CHAIN = 5
# Thresholds of similarity: exchanged operands must exceed the given order by more than CLEARLY;
# after another op, the match continues with an operand of at least WORTH_GOING_ON; another result
# must exceed WORTH_PLACING, and candidates after extra ops lose BEHIND_OTHERS.
CLEARLY = 0.4
WORTH_GOING_ON = 1.5
WORTH_PLACING = 1.0
BEHIND_OTHERS = 0.5


class Growth:
    """The state of one explanation: the match and its differences.

    todo        placed pairs whose operands are not compared yet
    late_casts  (graph node, its reader): a cast is missing unless the dtype is right
    replaced    pattern nodes in whose place the graph has another op
    missing     pattern nodes without a counterpart
    extra       graph nodes between placed ones
    in_next_layer  a linear between an op of atomc and its reader begins another layer
    """

    def __init__(self, pattern: Pattern, p: Node, g: Node):
        self.pattern, self.site = pattern, MatchSite(pattern)
        self.found: list[Difference] = []
        self.todo: deque[tuple[Node, Node]] = deque()
        self.late_casts: list[tuple[Node, Node]] = []
        self.replaced: set[Node] = set()
        self.missing: set[Node] = set()
        self.extra: set[Node] = set()
        self.in_next_layer = False
        self.place(p, g)

    def run(self) -> None:
        self.compare_placed()
        while self.grow_upwards():
            self.compare_placed()
        self.note_missing_casts()
        self.note_missing_readers()

    def structural(self) -> list[Difference]:
        """Differences of structure, upstream first, one per kind and node."""
        ordered = sorted(self.found, key=lambda difference: difference.node)  # type: ignore[arg-type,return-value]
        return list(
            {(difference.kind, difference.node): difference for difference in ordered}.values()
        )

    def note(self, kind: MissKind, expected: str, found: str, node: Node, *ops: str) -> None:
        self.found.append(Difference(kind, expected, found, node, ops=ops))

    def place(self, p: Node, g: Node) -> None:
        self.site.matched[p] = g
        self.todo.append((p, g))

    def free(self, g: Node) -> bool:
        return g not in self.site.matched.values()

    def similarity(self, p: Node, g: Node) -> float:
        return similarity(self.site, p, g)

    def note_missing_casts(self) -> None:
        for g, reader in self.late_casts:
            wanted = self.site.dtype(self.pattern.model_dtype or value(g).dtype)
            if value(g).dtype != wanted:
                self.note(
                    "missing cast",
                    f"a cast to {bare(wanted)}",
                    f"{describe(g)} used as it is, in {bare(value(g).dtype)}",
                    reader,
                )

    def note_missing_readers(self) -> None:
        for p in self.pattern.nodes:
            here = self.site.at(p)
            if here is None:
                continue
            for reader in filter(self.unplaced, p.users):
                if reader not in self.replaced:
                    others = (
                        ", ".join(describe(user) for user in here.users if user.op != "output")
                        or "nothing"
                    )
                    self.note(
                        "no reader",
                        f"{_wanted(reader)} reading {describe(here)}",
                        f"only {others} reads it",
                        here,
                        call(reader).op,
                    )

    def unplaced(self, p: Node) -> bool:
        return self.site.at(p) is None and p in self.pattern.nodes

    # ---- downwards: what the nodes read

    def compare_placed(self) -> None:
        while self.todo:
            self.compare_operands(*self.todo.popleft())

    def compare_operands(self, p: Node, g: Node) -> None:
        wanted, here = call(p), call(g)
        for kind, expected, found in attr_differences(self.site, p, g):
            self.note(kind, expected, found, g)
        if len(wanted.operands) != len(here.operands):
            self.note(
                "arguments",
                f"{len(wanted.operands)} tensor operands of {_wanted(p)}",
                str(len(here.operands)),
                g,
            )
            return

        def rate(order: list[Node]) -> float:
            return sum(self.similarity(q, h) for q, h in zip(wanted.operands, order, strict=True))

        order = max(here.orders(), key=rate)
        swapped = max(_swaps(here.operands), key=rate, default=order)
        if wanted.op not in COMMUTATIVE and rate(swapped) > rate(order) + CLEARLY:
            a, b = (
                self.pattern.inputs.get(q, _wanted(q))
                for q, h, other in zip(wanted.operands, order, swapped, strict=True)
                if h is not other
            )
            self.note(
                "operand order",
                f"{a} before {b} in {bare(wanted.op)}",
                "the operands exchanged",
                g,
            )
            order = swapped
        pairs = sorted(
            zip(wanted.operands, order, strict=True),
            key=lambda pair: pair[0] in self.pattern.inputs,
        )
        for q, h in pairs:
            self.settle(q, h, g)

    def settle(self, p: Node, g: Node, reader: Node) -> None:
        """Pattern operand p should be graph node g."""
        placed = self.site.at(p)
        if p in self.pattern.inputs:
            self.bind(self.pattern.inputs[p], g, reader)
        elif placed is None:
            self.settle_new(p, g, reader)
        elif placed is not g and not (g in self.extra and placed in g.all_input_nodes):
            self.note("same value", f"the same {spell(placed)} here as well", describe(g), reader)

    def bind(self, name: str, g: Node, reader: Node) -> None:
        bound = self.site.bound.setdefault(name, g)
        if bound is not g:
            self.note(
                "same value", f"`{name}` to be {describe(bound)} as elsewhere", describe(g), reader
            )

    def settle_new(self, p: Node, g: Node, reader: Node) -> None:
        wanted, here = call(p), call(g)
        if wanted.op == here.op and alike(p, g) and self.free(g):
            self.place(p, g)
        elif (
            wanted.op == "cast"
            and value(g).dtype == wanted.attrs["dtype"] != self.pattern.model_dtype
        ):
            skip_cast(self.site, p, g)
            self.settle(wanted.operands[0], g, reader)
        elif self.pattern.sees_through and here.op in VIEWS and keeps_last_dim(g):
            self.site.skipped.append(g)
            self.settle(p, here.operands[0], reader)
        elif not (self.step_over_extra(p, g, reader) or self.step_over_missing(p, g, reader)):
            self.step_over_other(p, g)

    def step_over_extra(self, p: Node, g: Node, reader: Node) -> bool:
        """The counterpart of p is an operand of g, after ops that the pattern does not have."""
        chain = self.chain_down(p, g) if call(p).op != "cast" else []
        if chain:
            *between, counterpart = chain
            self.note_between(
                between[::-1], f"{describe(reader)} reading {_wanted(p)} directly", call(reader).op
            )
            self.place(p, counterpart)
        return bool(chain)

    def step_over_missing(self, p: Node, g: Node, reader: Node) -> bool:
        """p has no counterpart: g is the counterpart of its operand."""
        wanted, here = call(p), call(g)
        inner = [
            q for q in wanted.operands if q not in self.pattern.inputs and call(q).op == here.op
        ]
        if not inner and wanted.op == "cast":
            inner = wanted.operands[:1]
        if not inner:
            return False
        if wanted.op == "cast" and wanted.attrs["dtype"] == self.pattern.model_dtype:
            self.late_casts.append((g, reader))
        else:
            self.note("missing op", _wanted(p), f"{describe(g)} used as it is", reader, wanted.op)
            self.missing.add(p)
        self.site.alias[p] = g
        self.settle(inner[0], g, reader)
        return True

    def step_over_other(self, p: Node, g: Node) -> None:
        """Another op is in the place of p: continue with its operands."""
        wanted, here = call(p), call(g)
        self.replaced.add(p)
        maker = here.operands[0] if here.op == "getitem" else g
        record = record_of(maker)
        if wanted.op in record.consumed:
            self.note(
                "taken",
                f"exclusive use of {_wanted(p)}",
                f"taken by {record.made_by}",
                g,
                wanted.op,
            )
            return
        self.note("other op", _wanted(p), describe(g), g, wanted.op)
        for q in wanted.operands:
            best = max(here.operands, key=lambda h: self.similarity(q, h), default=None)
            if (
                best is not None
                and q not in self.pattern.inputs
                and self.similarity(q, best) >= WORTH_GOING_ON
            ):
                self.settle(q, best, g)

    # ---- upwards: who reads the nodes

    def grow_upwards(self) -> bool:
        """Place one more reader of placed nodes, or a node that is read together with them. False
        if there is none.
        """
        placed = {**self.site.alias, **self.site.matched}
        return any(self.follow_readers(p, g) for p, g in placed.items()) or self.find_together()

    def follow_readers(self, p: Node, g: Node) -> bool:
        """Place one more reader of p among the readers of g. False if there is none to place."""
        return any(self.follow(reader, g) for reader in p.users if self.unplaced(reader))

    def follow(self, reader: Node, g: Node) -> bool:
        """Place a reader in the pattern as a reader of g, in the first possible way."""
        users = readers(g)
        return (
            self.follow_directly(reader, users)
            or self.follow_without_cast(reader, g)
            or self.follow_through_view(reader, users)
            or self.follow_extra(reader, g)
            or self.follow_missing(reader, g, users)
        )

    def follow_directly(self, reader: Node, users: list[Node]) -> bool:
        op = call(reader).op
        direct = [
            user
            for user in users
            if call(user).op == op and alike(reader, user) and self.free(user)
        ]
        if direct:
            self.place(reader, max(direct, key=lambda user: self.similarity(reader, user)))
        return bool(direct)

    def follow_without_cast(self, reader: Node, g: Node) -> bool:
        if call(reader).op != "cast" or not isinstance(value(g), Tensor):
            return False
        right = value(g).dtype == self.site.attr(call(reader).attrs["dtype"])
        return right and skip_cast(self.site, reader, g)

    def follow_through_view(self, reader: Node, users: list[Node]) -> bool:
        for view in users if self.pattern.sees_through else ():
            if call(view).op in VIEWS and keeps_last_dim(view):
                beyond = next(
                    (user for user in view.users if call(user).op == call(reader).op), None
                )
                if beyond is not None:
                    self.site.skipped.append(view)
                    self.place(reader, beyond)
                    return True
        return False

    def follow_extra(self, reader: Node, g: Node) -> bool:
        """The reader reads g after ops that the pattern does not have."""
        chain = self.chain_up(reader, g)
        if chain:
            *between, counterpart = chain
            self.note_between(
                between, f"{_wanted(reader)} reading {describe(g)} directly", call(reader).op
            )
            self.place(reader, counterpart)
        return bool(chain)

    def follow_missing(self, reader: Node, g: Node, users: list[Node]) -> bool:
        """The reader has no counterpart: its own reader reads g."""
        for after in reader.users:
            if after.op == "output" or self.site.at(after) is not None:
                continue
            follower = next(
                (u for u in users if call(u).op == call(after).op and self.free(u)), None
            )
            if follower is not None:
                self.note(
                    "missing op",
                    f"{_wanted(reader)} after {describe(g)}",
                    f"{describe(follower)} reads it directly",
                    follower,
                    call(reader).op,
                )
                self.missing.add(reader)
                self.site.alias[reader] = g
                self.place(after, follower)
                return True
        return False

    # ---- several results that one node reads

    def find_together(self) -> bool:
        """Place one more result of the pattern among what is read together with one that is
        placed.
        """
        outputs = self.pattern.outputs if self.pattern.read_together else []
        placed = [(p, g) for p in outputs if (g := self.site.at(p)) is not None]
        unplaced = [p for p in outputs if self.site.at(p) is None and p not in self.replaced]
        for (mate, here), p in itertools.product(placed, unplaced):
            later = outputs.index(p) > outputs.index(mate)
            candidates = [
                (self.similarity_beyond(p, g), g, reader, between)
                for reader, between in self.readers_beyond(here)
                for g in read_beside(reader, [here, *between][-1], later)
            ]
            rating, g, reader, between = max(
                candidates, key=lambda entry: entry[0], default=(0.0, here, here, [])
            )
            if rating > WORTH_PLACING:
                if between:
                    self.note_between(
                        between, f"{describe(here)} read together with {_wanted(p)}", call(here).op
                    )
                self.settle(p, g, reader)
                return True
        return False

    def readers_beyond(self, g: Node) -> list[tuple[Node, list[Node]]]:
        """The readers of g, directly or after ops in between."""
        paths: list[tuple[Node, list[Node]]] = [(user, []) for user in readers(g)]
        for user, between in paths:
            if len(between) < LONGEST_CHAIN and _num_real([*between, user]) <= 1:
                paths += [(further, [*between, user]) for further in readers(user)]
        return paths

    def similarity_beyond(self, p: Node, g: Node) -> float:
        """The similarity of p and g, or of p and an operand of g after ops in between."""
        chain = self.chain_down(p, g)
        return max(
            [self.similarity(p, g)]
            + ([self.similarity(p, chain[-1]) - BEHIND_OTHERS] if chain else [])
        )

    # ---- ops in between

    def note_between(self, between: list[Node], expected: str, *ops: str) -> None:
        """Record ops that the pattern does not have, in order of execution."""
        text = " > ".join([*map(spell, between[:-1]), describe(between[-1])])
        self.note("extra op", expected, f"{text} in between", between[0], *ops)
        self.extra |= set(between)
        after_op = op_of(between[0].all_input_nodes[0].target) is not None
        self.in_next_layer |= after_op and any(Kind.LINEAR in kind_of(node) for node in between)

    def chain_down(self, p: Node, g: Node) -> list[Node]:
        """[g, .., counterpart of p]: a path from g to its operands, with at most one op that is not
        layout.
        """
        chains = [[g]]
        for chain in chains:
            for h in call(chain[-1]).operands:
                if like(self.site, p, h) and self.free(h):
                    return [*chain, h]
                if (
                    len(chain) < LONGEST_CHAIN
                    and _num_real([*chain, h]) <= 1
                    and h.op == "call_function"
                ):
                    chains.append([*chain, h])
        return []

    def chain_up(self, p: Node, g: Node) -> list[Node]:
        """[.., counterpart of p]: a path from a reader of g to its readers, with at most one op
        that is not layout.
        """
        chains = [[user] for user in readers(g) if self.free(user)]
        for chain in chains:
            beyond = [
                user for user in readers(chain[-1]) if like(self.site, p, user) and self.free(user)
            ]
            if beyond:
                return [*chain, max(beyond, key=lambda user: self.similarity(p, user))]
            if len(chain) < LONGEST_CHAIN:
                chains += [
                    [*chain, user]
                    for user in readers(chain[-1])
                    if _num_real([*chain, user]) <= 1 and self.free(user)
                ]
        return []


def _swaps(operands: list[Node]) -> list[list[Node]]:
    """The operands with two different ones exchanged, in every way."""
    swaps = []
    for i, j in itertools.combinations(range(len(operands)), 2):
        if operands[i] is not operands[j]:
            swapped = list(operands)
            swapped[i], swapped[j] = operands[j], operands[i]
            swaps.append(swapped)
    return swaps


def _wanted(p: Node) -> str:
    """A pattern's node in few words."""
    return spell(p, of_pattern=True)


def _num_real(nodes: Iterable[Node]) -> int:
    """How many of the nodes compute something."""
    return sum(call(node).op not in LAYOUT for node in nodes)
