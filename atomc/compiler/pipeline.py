"""Runs passes in order; sorts and checks the graph after each, and fills the report."""

import contextlib
import inspect
import logging
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch.fx import GraphModule, Node

from atomc.capture.variable_floats import readers_of_numbers
from atomc.errors import OptionsError, suggestion
from atomc.files.json_types import JSONLike
from atomc.graph.canonical import GENERIC
from atomc.graph.graph_printer import graph_text
from atomc.graph.node_record import record_of, set_record
from atomc.graph.provenance import describe, layer_of, module_path, source_line
from atomc.ops.op import op_of
from atomc.report.records import Miss, Site, Stage
from atomc.report.report import Report
from atomc.rewriting.graph_pass import Change, Context, Outcome, Pass, rewriting
from atomc.rewriting.matching.near_miss import NearMiss
from atomc.rewriting.matching.pattern import Difference, Index
from atomc.rewriting.registered import REGISTERED
from atomc.rewriting.rewrite import (
    Case,
    Fired,
    Rewrite,
    apply,
    misses,
    remove_dead_nodes,
    sort_topologically,
)
from atomc.torch_compat.tracing import fake_mode_of, num_guards, sizes_stay_symbolic

log = logging.getLogger("atomc")

# The name of the pass that runs before the pipeline, on Dynamo's graph.
LIFT = "lift"


class PassError(RuntimeError):
    """A pass failed; the message contains its name, the reason, and the passes before it."""


def selected(pipeline: Sequence[Pass], context: Context) -> tuple[list[Pass], list[str]]:
    """The passes to run, and the names of those that options turn off or do not turn on.

    Raises OptionsError for an unknown pass or an option that cannot take effect, ValueError if
    the order of the pipeline violates an `after`.
    """
    pipeline = insert_registered(pipeline)
    check_order(pipeline)
    switches = context.options.passes
    check_switches(pipeline, switches, paged=context.paged)
    off = {name for name, on in switches.items() if on is False}
    off |= {p.name for p in pipeline if p.off_by_default and p.name not in switches}
    on = [p for p in pipeline if p.name not in off]
    return on if context.paged else [_without_paged_rewrites(p) for p in on if not p.paged], sorted(
        off
    )


def _without_paged_rewrites(p: Pass) -> Pass:
    return replace(p, rewrites=tuple(r for r in p.rewrites if not r.paged))


def check_switches(
    pipeline: Sequence[Pass], switches: Mapping[str, bool | Sequence[str]], *, paged: bool
) -> None:
    """Raise OptionsError for an unknown pass or an option that cannot take effect."""
    pipeline = insert_registered(pipeline)
    off = {name for name, on in switches.items() if on is False}
    names = [LIFT, *(p.name for p in pipeline)]
    for name in switches:
        if name not in names:
            raise OptionsError(
                f"option passes: no pass {name!r}{suggestion(name, names)}; passes are "
                f"{', '.join(sorted(names))}"
            )
    for p in pipeline:
        if wrong := _wrong_switch(p, switches.get(p.name, False), off, paged):
            raise OptionsError(f"option passes: {p.name!r} {wrong}")
    if paged and "bind_state" in off:
        raise OptionsError("option passes: 'bind_state' cannot be turned off, the runtime needs it")


def runtime_only(pipeline: Sequence[Pass]) -> list[str]:
    """The passes that run only for the runtime."""
    return [
        p.name
        for p in insert_registered(pipeline)
        if p.paged or (p.rewrites and all(rewrite.paged for rewrite in p.rewrites))
    ]


def _wrong_switch(p: Pass, switch: bool | Sequence[str], off: set[str], paged: bool) -> str | None:
    """Why a pass cannot have this value of the option, or None."""
    needs_off = sorted(off & set(p.after))
    if not isinstance(switch, bool) and not p.by_site:
        return "can only be turned off as a whole, expected True or False"
    if switch and needs_off and p.rewrites:
        return f"cannot take effect, it needs {needs_off[0]!r}, which is off"
    if switch and p.paged and not paged:
        return "cannot take effect outside the runtime"
    return None


class Registration:
    """A registered pass; `remove()` or leaving the context removes it."""

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
    new = rewriting(added) if isinstance(added, Rewrite) else added
    if any(other.name == new.name for other, _ in REGISTERED):
        raise ValueError(f"register_pass: a pass named {new.name!r} already exists")
    REGISTERED.append((new, before))
    return Registration(REGISTERED[-1])


def insert_registered(pipeline: Sequence[Pass]) -> list[Pass]:
    """The pipeline with the registered passes in their places."""
    passes = list(pipeline)
    for added, before in REGISTERED:
        names = [p.name for p in passes]
        if before is not None and before not in names:
            raise ValueError(
                f"register_pass: before={before!r} of {added.name!r} is not a pass; passes are "
                f"{names}"
            )
        passes.insert(len(passes) if before is None else names.index(before), added)
    return passes


def check_order(pipeline: Sequence[Pass]) -> None:
    """Raise ValueError if a pass comes before one that it needs, or names are not unique."""
    seen: set[str] = set()
    for p in pipeline:
        late = set(p.after) - seen
        if late:
            raise ValueError(f"pass {p.name!r} must come after {sorted(late)}")
        if p.name in seen:
            raise ValueError(f"two passes are named {p.name!r}")
        seen.add(p.name)


def run(gm: GraphModule, passes: Sequence[Pass], context: Context, report: Report) -> Outcome:
    """Run the passes on the graph and fill the report. Returns the combined outcome."""
    unused: list[str] = []
    with sizes_stay_symbolic():
        so_far = _Run(gm, context, report)
        for p in passes:
            outcome = so_far.run(p)
            unused += [
                f"option passes: {p.name!r} is turned off in {pattern!r}, where it has no site"
                for pattern in _patterns(p, context)
                if pattern not in outcome.off
            ]
            for observer in context.observers if outcome.fired else ():
                observer(p.name, gm)
    report.notes += unused
    if context.choose is None:  # lowering leaves none
        report.num_ops = dict(
            Counter(op.name for node in gm.graph.nodes if (op := op_of(node.target)))
        )
    return so_far.done


class _Run:
    """The passes over one graph.

    done      the outcome of all passes so far
    ran       their names
    consumed  op -> how many each rewrite replaced
    guards    the number of guards on the sizes of the inputs, which passes must not change
    before    the text of the current graph, if no stage of the report has it
    has_numbers  whether the graph reads float inputs as numbers
    """

    def __init__(self, gm: GraphModule, context: Context, report: Report):
        self.gm, self.context, self.report = gm, context, report
        self.done = Outcome()
        self.ran: list[str] = []
        self.consumed: dict[str, Counter[str]] = defaultdict(Counter)
        self.mode = fake_mode_of(gm.graph)
        self.guards = num_guards(self.mode)
        self.has_numbers = bool(readers_of_numbers(gm.graph))
        text = graph_text(gm) if context.keep_texts else ""
        self.before = "" if report.stages and report.stages[-1].text == text else text

    def run(self, p: Pass) -> Outcome:
        """Run a pass, check the graph, and fill the report."""
        self.report.requires[p.name] = list(p.after)
        if not p.cleanup:
            self.report.about[p.name] = about(p)
            names = [name for name in (p.name, *p.lifts) if name not in self.report.known]
            self.report.known += names
        numbers = readers_of_numbers(self.gm.graph) if self.has_numbers else {}
        outcome = self.checked(p)
        if numbers:
            outcome.floats |= self.floats_of(p, outcome.fired, numbers)
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

    def floats_of(self, p: Pass, fired: Sequence[Fired], numbers: Mapping[Node, str]) -> set[str]:
        """The float inputs that changed sites read as numbers. numbers: the nodes that read them
        before the pass.
        """
        replaced = {node for f in fired for node in f.nodes}
        if fired and not p.cleanup:  # a function need not name what it replaced
            replaced |= numbers.keys() - set(self.gm.graph.nodes)
        return {numbers[node] for node in replaced & numbers.keys()}

    def checked(self, p: Pass) -> Outcome:
        try:
            outcome = self.rewrite(p) if p.rewrites else _call(self.gm, p, self.context)
            if outcome.fired:
                sort_topologically(self.gm.graph)
                self.gm.graph.lint()
        except OptionsError:  # it is about what the caller asked for, not about the pass
            raise
        except Exception as error:  # of any kind: add the name of the pass for the caller
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
        nested: list[tuple[Rewrite, Case]] = []

        def off_here(name: str, node: Node) -> str | None:
            off = self.context.off_here(name, node)
            if off is None:
                return None
            done.off.add(off.pattern)
            return off.text

        index = Index(self.gm.graph)
        possible = [
            (rewrite, case) for rewrite, case in _cases(p, index) if not rewrite.unmet(case, index)
        ]
        rounds = possible
        while rounds:
            nested, refused = [], []
            for rewrite, case in rounds:
                if rewrite.unmet(case, index):  # earlier ones replaced the ops
                    continue
                fired, more_refused = apply(self.gm.graph, rewrite, index, off_here, case)
                if fired:
                    index = Index(self.gm.graph)
                    nested = possible if rewrite.nests else nested
                done.fired += fired
                refused += more_refused
            rounds = nested
        if not p.cleanup:
            self.explain_misses(p, index, possible, done, refused)
        return done

    def explain_misses(
        self,
        p: Pass,
        index: Index,
        possible: Sequence[tuple[Rewrite, Case]],
        done: Outcome,
        refused: list[NearMiss],
    ) -> None:
        """Add the near misses of a pass to `done`; report the ops that it lacks if there are none.

        possible  the cases whose needs the graph met before the pass
        refused   the sites that the matcher found and a guard refused
        """
        done.near = _best(refused, {node for f in done.fired for node in f.nodes})
        try:
            shown_too = [
                (rewrite, case)
                for rewrite, case in possible
                if rewrite.explained
                and not rewrite.unmet(case, index)
                and rewrite.can_nearly_match(case, index)
            ]
            explained, unexplained = misses(index, shown_too, self.done.near)
        except Exception as error:  # a failed explanation must not fail the compilation
            self.report.bugs.append(
                f"{p.name}: near misses are not explained: {type(error).__name__}: {error}"
            )
            return
        shown = _nodes_of(done.near)
        done.near += [miss for miss in explained if not (miss.nodes & shown)]
        for miss in _best(unexplained, _nodes_of(refused)):
            self.report.bugs.append(
                f"{p.name} at {describe(miss.anchor)}: the matcher refused it, but nothing differs"
            )
        if not done.fired and not done.near:
            self.report_absent_ops(index, p, possible)

    def report_absent_ops(
        self, index: Index, p: Pass, possible: Sequence[tuple[Rewrite, Case]]
    ) -> None:
        """Report which ops of a pass the graph lacks. possible: the cases whose needs are met."""
        needed = _least_unmet(p, index)
        if not possible and not any(op in self.consumed for op in needed):
            self.report.absent[p.name] = _needed(needed, index)
            return
        ops = {op for rewrite, case in possible[:1] for op in rewrite.ops(case)} or set(needed)
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
    """The patterns of modules in which options turn a pass off."""
    patterns = context.options.passes.get(p.name, False)
    return () if isinstance(patterns, bool) else patterns


def _call(gm: GraphModule, p: Pass, context: Context) -> Outcome:
    """Run a function of the graph, and make its changes where no option turns it off."""
    assert p.run is not None
    results = p.run(gm, context)
    if isinstance(results, Outcome):
        return results
    done = Outcome()
    for result in results:
        if isinstance(result, Change):
            off = context.off_here(p.name, result.node)
            if off is None:
                result = result.apply()
            else:
                done.off.add(off.pattern)
                result = result.miss(Difference("off", f"{p.name} to be on", off.text, result.node))
        if isinstance(result, Fired):
            done.fired.append(result)
        else:
            done.near.append(result)
    sort_topologically(gm.graph)
    remove_dead_nodes(gm.graph)
    return done


def _cases(p: Pass, index: Index) -> list[tuple[Rewrite, Case]]:
    return [
        (rewrite, case)
        for rewrite in p.rewrites
        for case in (*rewrite.cases, *rewrite.cases_in(index))
    ]


def _best(refused: list[NearMiss], gone: set[Node]) -> list[NearMiss]:
    """The refusal with the fewest differences per site, except where another variant matched."""
    best: list[NearMiss] = []
    for miss in sorted(refused, key=lambda miss: len(miss.differences)):
        if miss.anchor not in gone and not any(miss.nodes & other.nodes for other in best):
            best.append(miss)
    return best


def _nodes_of(near: Iterable[NearMiss]) -> set[Node]:
    return {node for miss in near for node in miss.nodes}


def _least_unmet(p: Pass, index: Index) -> list[str]:
    """The ops that the graph lacks, for the cases of a pass that lack the fewest."""
    unmet = [rewrite.unmet(case, index) for rewrite, case in _cases(p, index)]
    unmet = unmet or [rewrite.unmet(Case(), index) for rewrite in p.rewrites]
    least = min(map(len, unmet))
    return sorted({op for ops in unmet if len(ops) == least for op in ops})


def _absent(missing: Sequence[str], ops: set[str], index: Index) -> str:
    """A text: which characteristic ops of a pattern the graph lacks, and where its rarest op is."""
    shown = [op.removeprefix("atom::") for op in missing]
    text = (
        f"the graph has no {' and no '.join(shown)}"
        if shown
        else "its ops are not connected anywhere"
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
    """A text: which ops that a pass needs the graph lacks, or has only with other attributes."""
    if not ops:
        return "its ops are not connected anywhere"
    for op in ops:
        for node in index[op]:
            return f"it does not support {op.removeprefix('atom::')} like {describe(node)}"
    return f"the graph has no {' and no '.join(op.removeprefix('atom::') for op in ops)}"


def record(
    report: Report,
    p: Pass,
    fired: Sequence[Fired],
    gm: GraphModule,
    context: Context,
    before: str = "",
) -> None:
    """Add the sites and the changed graph to the report. before: the graph before the pass, if no
    stage has it.
    """
    if not fired:
        return
    text = graph_text(gm) if context.keep_texts or context.choose is not None else ""
    report.stages.append(Stage(p.name, len(fired), text, before))
    log.debug("pass %s changed %d sites", p.name, len(fired))
    for f in fired:
        for node in f.new_nodes:
            site = (f.name, module_path(f.node))
            set_record(node, replace(record_of(node), site=site))
    if p.cleanup:
        return
    for f in fired:
        path = module_path(f.node)
        attrs: dict[str, JSONLike] = dict(f.attrs)  # type: ignore[arg-type]  # numbers and names
        report.sites.append(Site(f.name, path, layer_of(path), source_line(f.node), attrs))
        report.matches[f.name] += 1
        if "scheme" in f.attrs:
            report.matches[f"{f.name}[{f.attrs['scheme']}]"] += 1


def miss_of(near: NearMiss) -> Miss:
    """The entry of a near miss in the report, without nodes."""
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
    """The description of a pass: the docstring of its file, or for a registered pass that of its
    function.
    """
    made_by = p.rewrites[0].example if p.rewrites else p.run
    module = sys.modules.get(getattr(made_by, "__module__", ""))
    if module is not None and module.__name__.startswith("atomc."):
        return inspect.cleandoc(module.__doc__ or "")
    return inspect.getdoc(p.rewrites[0].pattern if p.rewrites else p.run) or ""
