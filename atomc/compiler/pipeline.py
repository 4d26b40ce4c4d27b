"""Runs passes in order; sorts, checks, counts, dumps and times: once, for all."""

import contextlib
import inspect
import logging
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from torch.fx import GraphModule, Node

from atomc.errors import OptionsError
from atomc.graph.canonical import GENERIC, call
from atomc.graph.graph_printer import graph_text
from atomc.graph.provenance import describe, layer_of, module_path, source_line
from atomc.ops.op import op_of
from atomc.report.records import Miss, Site, Stage
from atomc.report.report import Report
from atomc.rewriting.graph_pass import Context, Outcome, Pass, rewriting
from atomc.rewriting.matching.near_miss import NearMiss
from atomc.rewriting.matching.pattern import Index
from atomc.rewriting.registered import REGISTERED
from atomc.rewriting.rewrite import Case, Fired, Rewrite, apply, misses, sort_topologically
from atomc.torch_compat.tracing import fake_mode_of, num_guards, sizes_stay_symbolic

log = logging.getLogger("atomc")

Observer = Callable[[str, GraphModule], None]
# The pass that stands before the pipeline, on Dynamo's graph.
LIFT = "lift"


class PassError(RuntimeError):
    """A pass failed; the message says which, where, and what ran before it."""


def selected(pipeline: Sequence[Pass], context: Context) -> tuple[list[Pass], list[str]]:
    """The passes to run, and the names of those left out by option.

    Raises OptionsError for a switch of an unknown pass or one that cannot take effect, ValueError
    for a pipeline whose order breaks an `after`.
    """
    pipeline = with_registered(pipeline)
    check_order(pipeline)
    switches = context.options.passes
    names = [LIFT, *(p.name for p in pipeline)]
    for name in switches:
        if name not in names:
            raise OptionsError(f"option passes: no pass {name!r}; passes are {sorted(names)}")
    off = {name for name, on in switches.items() if on is False}
    for p in pipeline:
        if wrong := _wrong_switch(p, switches.get(p.name, False), off, context.paged):
            raise OptionsError(f"option passes: {p.name!r} {wrong}")
    if context.paged and "bind_state" in off:
        raise OptionsError("option passes: 'bind_state' cannot be left out, the runtime needs it")
    return [p for p in pipeline if p.name not in off and (context.paged or not p.paged)], sorted(
        off
    )


def _wrong_switch(p: Pass, switch: bool | Sequence[str], off: set[str], paged: bool) -> str | None:
    """Why a pass cannot be switched like this, or None."""
    needs_off = sorted(off & set(p.after))
    if not isinstance(switch, bool) and not p.by_site:
        return "is left out as a whole or not at all, expected True or False"
    if switch and needs_off and p.rewrites:
        return f"cannot take effect, it needs {needs_off[0]!r}, which is off"
    if switch and p.paged and not paged:
        return "cannot take effect outside the runtime"
    return None


class Registration:
    """A pass added from outside; `remove()` takes it out again. Also a context manager."""

    def __init__(self, entry: tuple[Pass, str | None]):
        self._entry = entry

    def remove(self) -> None:
        with contextlib.suppress(ValueError):
            REGISTERED.remove(self._entry)

    def __enter__(self) -> "Registration":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def register_pass(added: Pass | Rewrite, *, before: str | None = None) -> Registration:
    """Add a pass, or a rewrite as a pass of its own, at the end of the pipeline or before a named
    pass.

    Raises ValueError if a pass of that name exists.
    """
    made = rewriting(added) if isinstance(added, Rewrite) else added
    if any(known.name == made.name for known, _ in REGISTERED):
        raise ValueError(f"register_pass: there is a pass named {made.name!r} already")
    REGISTERED.append((made, before))
    return Registration(REGISTERED[-1])


def with_registered(pipeline: Sequence[Pass]) -> list[Pass]:
    """The pipeline with the passes added from outside in their places."""
    whole = list(pipeline)
    for added, before in REGISTERED:
        names = [p.name for p in whole]
        if before is not None and before not in names:
            raise ValueError(
                f"register_pass: {added.name!r} is to stand before {before!r}; passes are {names}"
            )
        whole.insert(len(whole) if before is None else names.index(before), added)
    return whole


def check_order(pipeline: Sequence[Pass]) -> None:
    """Raise ValueError if a pass stands before one that it needs, or names are not unique."""
    seen: set[str] = set()
    for p in pipeline:
        late = set(p.after) - seen
        if late:
            raise ValueError(f"pass {p.name!r} must stand after {sorted(late)}")
        if p.name in seen:
            raise ValueError(f"two passes are named {p.name!r}")
        seen.add(p.name)


def run(
    gm: GraphModule,
    passes: Sequence[Pass],
    context: Context,
    report: Report,
    observers: Sequence[Observer] = (),
) -> Outcome:
    """Run the passes on the graph and write what happened into the report. Returns what all of them
    did and found.
    """
    unused: list[str] = []
    with sizes_stay_symbolic():
        so_far = _Run(gm, context, report)
        for p in passes:
            outcome = so_far.run(p)
            unused += [
                f"option passes: {p.name!r} is left out in {pattern!r}, where it would not "
                "fire anyway"
                for pattern in _patterns(p, context)
                if pattern not in outcome.off
            ]
            for observer in observers if outcome.fired else ():
                observer(p.name, gm)
    report.notes += unused
    if context.choose is None:  # lowering leaves none
        report.num_ops = dict(
            Counter(op.name for node in gm.graph.nodes if (op := op_of(node.target)))
        )
    return so_far.done


class _Run:
    """Passes over one graph, one after another.

    done      what all of them did and found
    ran       their names
    consumed  op -> how many of it each rewrite replaced
    guards    on the sizes of the inputs
    before    the text of the graph as it is, if no stage of the report has it
    """

    def __init__(self, gm: GraphModule, context: Context, report: Report):
        self.gm, self.context, self.report = gm, context, report
        self.done = Outcome()
        self.ran: list[str] = []
        self.consumed: dict[str, Counter[str]] = defaultdict(Counter)
        self.mode = fake_mode_of(gm.graph)
        self.guards = num_guards(self.mode)
        text = graph_text(gm) if context.keep_texts else ""
        self.before = "" if report.stages and report.stages[-1].text == text else text

    def run(self, p: Pass) -> Outcome:
        """Run a pass, check the graph, and write what happened into the report."""
        self.report.requires[p.name] = list(p.after)
        if not p.cleanup:
            self.report.about[p.name] = about(p)
            self.report.known.append(p.name)
        outcome = self.checked(p)
        for f in outcome.fired:
            for op in f.consumed:
                self.consumed[op][f.name] += 1
        record(self.report, p, outcome.fired, self.gm, self.context, self.before)
        self.before = "" if outcome.fired else self.before
        self.report.near += [miss_of(miss) for miss in outcome.near]
        self.report.notes += outcome.notes
        self.ran.append(p.name)
        self.done.add(outcome)
        return outcome

    def checked(self, p: Pass) -> Outcome:
        try:
            outcome = self.rewrite(p) if p.rewrites else _call(self.gm, p, self.context)
            if outcome.fired:
                sort_topologically(self.gm.graph)
                self.gm.graph.lint()
        except (
            Exception
        ) as error:  # whatever it is, say in which pass; the caller decides what to do about it
            raise PassError(
                f"pass {p.name!r} failed (after {', '.join(self.ran) or 'none'}): {error}"
            ) from error
        if self.report.bugs and self.context.options.strict:
            raise PassError(f"pass {p.name!r}: {self.report.bugs[0]}")
        if num_guards(self.mode) != self.guards:
            raise PassError(f"pass {p.name!r} added a guard on the sizes of the inputs")
        return outcome

    def rewrite(self, p: Pass) -> Outcome:
        done = Outcome()
        refused: list[NearMiss] = []

        def off_here(name: str, node: Node) -> str | None:
            off = self.context.off_here(name, node)
            if off is None:
                return None
            done.off.add(off.pattern)
            return off.text

        index = Index(self.gm.graph)
        possible = [
            (rewrite, case) for rewrite, case in _cases(p) if not rewrite.unmet(case, index)
        ]
        for rewrite, case in possible:
            fired, more_refused = apply(self.gm.graph, rewrite, index, off_here, case)
            if fired:
                index = Index(self.gm.graph)
            done.fired += fired
            refused += more_refused
        if p.cleanup:
            return done
        done.near = _best(refused, {node for f in done.fired for node in f.nodes})
        try:
            explained, unexplained = misses(index, possible, self.done.near)
        except Exception as error:  # which costs the explanation, not the compilation
            self.report.bugs.append(
                f"{p.name}: what nearly fired cannot be told: {type(error).__name__}: {error}"
            )
            return done
        shown = _nodes_of(done.near)
        done.near += [miss for miss in explained if not (miss.nodes & shown)]
        for miss in _best(unexplained, _nodes_of(refused)):
            self.report.bugs.append(
                f"{p.name} at {describe(miss.anchor)}: the matcher refused it, but nothing differs"
            )
        if not done.fired and not done.near:
            self.say_what_is_absent(index, p, possible)
        return done

    def say_what_is_absent(
        self, index: Index, p: Pass, possible: Sequence[tuple[Rewrite, Case]]
    ) -> None:
        """possible: those of the pass whose needs the graph meets."""
        needed = _least_unmet(p, index)
        if not possible and not any(op in self.consumed for op in needed):
            self.report.absent[p.name] = _needed(needed, index)
            return
        ops = {
            call(node).op for rewrite, case in possible[:1] for node in rewrite.traced(case).nodes
        } or set(needed)
        missing = [op for op in sorted((ops - GENERIC) or ops) if not index[op]]
        taken = next((op for op in missing if op in self.consumed), None)
        if taken is None:
            self.report.absent[p.name] = _absent(missing, ops, index)
            return
        winner, count = self.consumed[taken].most_common(1)[0]
        self.report.taken[p.name] = (
            f"taken by {winner}, which used every {taken.removeprefix('atom::')} ({count})"
        )


def _patterns(p: Pass, context: Context) -> Sequence[str]:
    """The modules in which the options leave a pass out."""
    patterns = context.options.passes.get(p.name, False)
    return () if isinstance(patterns, bool) else patterns


def _call(gm: GraphModule, p: Pass, context: Context) -> Outcome:
    assert p.run is not None
    made = p.run(gm, context)
    return made if isinstance(made, Outcome) else Outcome(list(made))


def _cases(p: Pass) -> list[tuple[Rewrite, Case]]:
    return [(rewrite, case) for rewrite in p.rewrites for case in rewrite.cases]


def _best(refused: list[NearMiss], gone: set[Node]) -> list[NearMiss]:
    """One refusal per site: not where another variant fired."""
    kept: list[NearMiss] = []
    for miss in sorted(refused, key=lambda miss: len(miss.differences)):
        if miss.anchor not in gone and not any(miss.nodes & other.nodes for other in kept):
            kept.append(miss)
    return kept


def _nodes_of(found: Iterable[NearMiss]) -> set[Node]:
    return {node for miss in found for node in miss.nodes}


def _least_unmet(p: Pass, index: Index) -> list[str]:
    """The ops that the graph does not have for those cases of a pass that lack the fewest."""
    unmet = [rewrite.unmet(case, index) for rewrite, case in _cases(p)]
    least = min(map(len, unmet))
    return sorted({op for ops in unmet if len(ops) == least for op in ops})


def _absent(missing: Sequence[str], ops: set[str], index: Index) -> str:
    """Which telling ops of a pattern the graph does not have, and which other op of it there is
    fewest of.
    """
    shown = [op.removeprefix("atom::") for op in missing]
    text = (
        f"the graph has no {' and no '.join(shown)}" if shown else "its ops stand nowhere together"
    )
    nearest = min(
        (op for op in sorted(ops) if index[op]), key=lambda op: len(index[op]), default=None
    )
    return (
        text
        if nearest is None
        else f"{text}; the nearest op found is {describe(index[nearest][0])}"
    )


def _needed(ops: Sequence[str], index: Index) -> str:
    """Which of the ops that a pass cannot do without the graph does not have, or not with
    attributes that it takes in.
    """
    for op in ops:
        for node in index[op]:
            return f"it takes in no {op.removeprefix('atom::')} like {describe(node)}"
    return f"the graph has no {' and no '.join(op.removeprefix('atom::') for op in ops)}"


def record(
    report: Report,
    p: Pass,
    fired: Sequence[Fired],
    gm: GraphModule,
    context: Context,
    before: str = "",
) -> None:
    """Write sites and the changed graph into the report. before: the graph before it, if no stage
    has it.
    """
    if not fired:
        return
    text = graph_text(gm) if context.keep_texts or context.choose is not None else ""
    report.stages.append(Stage(p.name, len(fired), text, before))
    log.debug("pass %s changed %d sites", p.name, len(fired))
    for f in fired:
        for made in f.made:
            made.meta["site"] = (f.name, module_path(f.node))
    if p.cleanup:
        return
    for f in fired:
        path = module_path(f.node)
        report.sites.append(Site(f.name, path, layer_of(path), source_line(f.node), dict(f.attrs)))
        report.matches[f.name] += 1
        if "scheme" in f.attrs:
            report.matches[f"{f.name}[{f.attrs['scheme']}]"] += 1


def miss_of(near: NearMiss) -> Miss:
    """A near miss without the graph."""
    first = near.first
    node = first.node if first.node is not None else near.anchor
    path = module_path(node) or module_path(near.anchor)
    return Miss(
        near.rewrite,
        near.variant,
        path,
        layer_of(path),
        source_line(node) or source_line(near.anchor),
        near.matched / near.total,
        first.kind,
        first.expected,
        first.found,
        sorted(node.name for node in near.nodes),
    )


def about(p: Pass) -> str:
    """What a pass does: the docstring of the file that it is written in; of one from outside, that
    of its function.
    """
    made_by = p.rewrites[0].example if p.rewrites else p.run
    module = sys.modules.get(getattr(made_by, "__module__", ""))
    if module is not None and module.__name__.startswith("atomc."):
        return inspect.cleandoc(module.__doc__ or "")
    return inspect.getdoc(p.rewrites[0].pattern if p.rewrites else p.run) or ""
