"""Runs passes in order; sorts, checks, counts, dumps and times: once, for all."""

import contextlib
import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable, Sequence

from torch.fx import GraphModule, Node

from atomc.errors import OptionsError
from atomc.graph.canonical import GENERIC, call
from atomc.graph.provenance import describe, layer_of, module_path, source_line
from atomc.graph_pass import Context, Outcome, Pass, rewriting
from atomc.graph_printer import graph_text
from atomc.matching.near_miss import NearMiss
from atomc.matching.pattern import Index
from atomc.op import op_of
from atomc.registered import REGISTERED
from atomc.report import Report
from atomc.report_records import Miss, Site, Stage
from atomc.rewrite import Case, Fired, Rewrite, apply, misses, sort_topologically
from atomc.torch_compat.tracing import fake_mode_of, num_guards, sizes_stay_symbolic

log = logging.getLogger("atomc")

Observer = Callable[[str, GraphModule], None]
# The pass that stands before the pipeline, on Dynamo's graph.
LIFT = "lift"


class PassError(RuntimeError):
    """A pass failed; the message says which, where, and what ran before it."""


def selected(pipeline: Sequence[Pass], context: Context) -> tuple[list[Pass], list[str]]:
    """The passes to run, and the names of those left out by option.

    Raises OptionsError for a switch of an unknown pass or one that cannot take effect, ValueError for a pipeline whose
    order breaks an `after`.
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
        needs_off = sorted(off & set(p.after))
        if not isinstance(switches.get(p.name, False), bool) and not p.by_site:
            raise OptionsError(f"option passes: {p.name!r} is left out as a whole or not at all, expected True or False")
        if switches.get(p.name) and needs_off and p.rewrites:
            raise OptionsError(f"option passes: {p.name!r} cannot take effect, it needs {needs_off[0]!r}, which is off")
        if switches.get(p.name) and p.paged and not context.paged:
            raise OptionsError(f"option passes: {p.name!r} cannot take effect outside the runtime")
    if context.paged and "bind_state" in off:
        raise OptionsError("option passes: 'bind_state' cannot be left out, the runtime needs it")
    return [p for p in pipeline if p.name not in off and (context.paged or not p.paged)], sorted(off)


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
    """Add a pass, or a rewrite as a pass of its own, at the end of the pipeline or before a named pass.

    Raises ValueError if a pass of that name exists.
    """
    made = rewriting(added.name, [added]) if isinstance(added, Rewrite) else added
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
            raise ValueError(f"register_pass: {added.name!r} is to stand before {before!r}; passes are {names}")
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
    gm: GraphModule, passes: Sequence[Pass], context: Context, report: Report, observers: Sequence[Observer] = ()
) -> Outcome:
    """Run the passes on the graph and write what happened into the report. Returns what all of them did and found."""
    with sizes_stay_symbolic():
        return _run(gm, passes, context, report, observers)


def _run(
    gm: GraphModule, passes: Sequence[Pass], context: Context, report: Report, observers: Sequence[Observer]
) -> Outcome:
    done = Outcome()
    names: list[str] = []
    consumed: dict[str, Counter[str]] = {}
    unused: list[str] = []
    mode = fake_mode_of(gm.graph)
    guards = num_guards(mode)
    before = graph_text(gm) if context.keep_texts else ""
    if report.stages and report.stages[-1].text == before:
        before = ""
    for p in passes:
        report.requires[p.name] = list(p.after)
        if not p.cleanup:
            report.about[p.name] = about(p)
            report.known.append(p.name)
        try:
            outcome = _rewrite(gm, p, done.near, context, report, consumed) if p.rewrites else _call(gm, p, context)
            if outcome.fired:
                sort_topologically(gm.graph)
                gm.graph.lint()
        except Exception as error:  # whatever it is, say in which pass; the caller decides what to do about it
            raise PassError(f"pass {p.name!r} failed (after {', '.join(names) or 'none'}): {error}") from error
        if report.bugs and context.options.strict:
            raise PassError(f"pass {p.name!r}: {report.bugs[0]}")
        if num_guards(mode) != guards:
            raise PassError(f"pass {p.name!r} added a guard on the sizes of the inputs")
        for f in outcome.fired:
            for name in f.consumed:
                consumed.setdefault(name, Counter())[f.name] += 1
        record(report, p, outcome.fired, gm, context, before)
        before = "" if outcome.fired else before
        report.near += [miss_of(miss) for miss in outcome.near]
        report.notes += outcome.notes
        unused += [f"option passes: {p.name!r} is left out in {pattern!r}, where it would not fire anyway"
                   for pattern in _patterns(p, context) if pattern not in outcome.off]  # fmt: skip
        names.append(p.name)
        done.fired += outcome.fired
        done.near += outcome.near
        done.state += outcome.state
        done.extras += outcome.extras
        if outcome.fired:
            for observer in observers:
                observer(p.name, gm)
    report.notes += unused
    if context.choose is None:  # lowering leaves none
        report.num_ops = dict(Counter(op.name for node in gm.graph.nodes if (op := op_of(node.target))))
    return done


def _patterns(p: Pass, context: Context) -> Sequence[str]:
    """The modules in which the options leave a pass out."""
    patterns = context.options.passes.get(p.name, False)
    return () if isinstance(patterns, bool) else patterns


def _call(gm: GraphModule, p: Pass, context: Context) -> Outcome:
    assert p.run is not None
    made = p.run(gm, context)
    return made if isinstance(made, Outcome) else Outcome(list(made))


def _rewrite(
    gm: GraphModule, p: Pass, causes: list[NearMiss], context: Context, report: Report,
    consumed: dict[str, Counter[str]],
) -> Outcome:  # fmt: skip
    done = Outcome()
    refused: list[NearMiss] = []

    def off_here(name: str, node: Node) -> str | None:
        off = context.off_here(name, node)
        done.off |= {off.pattern} if off else set()
        return off.text if off else None

    index = Index(gm.graph)
    possible = [(rewrite, case) for rewrite, case in _cases(p) if not rewrite.unmet(case, index)]
    for rewrite, case in possible:
        more_fired, more_refused = apply(gm.graph, rewrite, index, off_here, case)
        if more_fired:
            index = Index(gm.graph)
        done.fired += more_fired
        refused += more_refused
    if p.cleanup:
        return done
    gone = {node for f in done.fired for node in f.nodes}
    done.near = _best(refused, gone)
    shown = {node for miss in done.near for node in miss.nodes}
    try:
        explained, unexplained = misses(index, possible, causes)
    except Exception as error:  # which costs the explanation, not the compilation
        report.bugs.append(f"{p.name}: what nearly fired cannot be told: {type(error).__name__}: {error}")
        return done
    done.near += [miss for miss in explained if not (miss.nodes & shown)]
    for miss in _best(unexplained, {node for other in refused for node in other.nodes}):
        report.bugs.append(f"{p.name} at {describe(miss.anchor)}: the matcher refused it, but nothing differs")
    if not done.fired and not done.near:
        _say_what_is_absent(index, p, report, consumed)
    return done


def _cases(p: Pass) -> list[tuple[Rewrite, Case]]:
    return [(rewrite, case) for rewrite in p.rewrites for case in rewrite.cases]


def _best(refused: list[NearMiss], gone: set[Node]) -> list[NearMiss]:
    """One refusal per site: not where another variant fired."""
    kept: list[NearMiss] = []
    for miss in sorted(refused, key=lambda miss: len(miss.differences)):
        if miss.anchor not in gone and not any(miss.nodes & other.nodes for other in kept):
            kept.append(miss)
    return kept


def _say_what_is_absent(index: Index, p: Pass, report: Report, consumed: dict[str, Counter[str]]) -> None:
    possible = [(rewrite, case) for rewrite, case in _cases(p) if not rewrite.unmet(case, index)]
    unmet = [rewrite.unmet(case, index) for rewrite, case in _cases(p)]
    least = min(map(len, unmet))
    needed = sorted({op for ops in unmet if len(ops) == least for op in ops})
    if not possible and not any(op in consumed for op in needed):
        report.absent[p.name] = _needed(needed, index)
        return
    ops = {call(node).op for rewrite, case in possible[:1] for node in rewrite.traced(case).nodes} or set(needed)
    telling = sorted((ops - GENERIC) or ops)
    missing = [op for op in telling if not index[op]]
    for op in missing:
        if op in consumed:
            winner, count = consumed[op].most_common(1)[0]
            report.taken[p.name] = f"taken by {winner}, which used every {op.removeprefix('atom::')} ({count})"
            return
    shown = [op.removeprefix("atom::") for op in missing]
    nearest = max((op for op in sorted(ops) if index[op]), key=lambda op: -len(index[op]), default=None)
    text = f"the graph has no {' and no '.join(shown)}" if shown else "its ops stand nowhere together"
    if nearest is not None:
        text += f"; the nearest op found is {describe(index[nearest][0])}"
    report.absent[p.name] = text


def _needed(ops: Sequence[str], index: Index) -> str:
    """Which of the ops that a pass cannot do without the graph does not have, or not with attributes that it takes in."""
    for op in ops:
        for node in index[op]:
            return f"it takes in no {op.removeprefix('atom::')} like {describe(node)}"
    return f"the graph has no {' and no '.join(op.removeprefix('atom::') for op in ops)}"


def record(
    report: Report, p: Pass, fired: Sequence[Fired], gm: GraphModule, context: Context, before: str = ""
) -> None:
    """Write sites and the changed graph into the report. before: the graph before it, if no stage has it."""
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
    return Miss(near.rewrite, near.variant, path, layer_of(path), source_line(node) or source_line(near.anchor),
                near.matched / near.total, first.kind, first.expected, first.found,
                sorted(node.name for node in near.nodes))  # fmt: skip


def about(p: Pass) -> str:
    """What a pass does: the docstring of the file that it is written in; of one from outside, that of its function."""
    made_by = p.rewrites[0].example if p.rewrites else p.run
    module = sys.modules.get(getattr(made_by, "__module__", ""))
    if module is not None and module.__name__.startswith("atomc."):
        return inspect.cleandoc(module.__doc__ or "")
    return inspect.getdoc(p.rewrites[0].pattern if p.rewrites else p.run) or ""
