"""A report as text for a terminal: plain tables of 100 columns, with repeated layers shown once."""

from collections import Counter
from collections.abc import Iterable, Sequence

from atomc.report.kernel_ranges import kernels_by_tokens
from atomc.report.records import CacheOutcome, KernelChoice, Miss, grouped_by, located, spans
from atomc.report.render.audit import headline
from atomc.report.render.table import collapsed, table, wrapped
from atomc.report.report_data import RepeatedCall, ReportData

MAX_MISSES = 20
# Passes that neither recognise nor fuse ops.
NOT_REWRITES = ("lift", "bind_state", "reinplace", "lower")


def report_text(report: ReportData) -> str:
    """Rewrites by layer, rewrites that did not fire and why, kernels, mixtures of experts, state
    and phases of one graph.
    """
    parts = [_title(report)]
    if report.treated:
        parts += [
            _rewrites(report),
            _not_fired(report),
            _near_misses(report.near),
            _kernels(report.kernels),
            _moe_layers(report),
            _listed("state", _collapsed_lines(report.state)),
        ]
    bugs = _listed("bugs of atomc, please report", report.bugs)
    parts += [
        _break_and_recompile(report),
        _audit(report),
        _listed("calls without their Python", _repeated_calls(report)),
        _listed("notes", report.notes),
        bugs,
        _phases(report),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _title(report: ReportData) -> str:
    if report.treated:
        cache = (
            f"; cache: {report.cache}"
            if report.cached not in (CacheOutcome(), CacheOutcome("off"))
            else ""
        )
        return wrapped(f"{report.title}: compiled{cache}")
    return wrapped(f"{report.title}: not treated: {report.why_not}")


def _rewrites(report: ReportData) -> str:
    sites = grouped_by(lambda site: site.rewrite, report.sites)
    rows = [
        (
            name,
            str(len(of_rewrite)),
            _layers(site.layer for site in of_rewrite),
            ", ".join(dict.fromkeys(located(collapsed(site.module_path)) for site in of_rewrite)),
        )
        for name, of_rewrite in sites.items()
        if name not in NOT_REWRITES
    ]
    return (
        table(("rewrite", "sites", "layers", "in"), rows, numbers=[1])
        if rows
        else "no rewrite fired"
    )


def _layers(layers: Iterable[int | None]) -> str:
    return spans(layer for layer in layers if layer is not None) or "-"


def _not_fired(report: ReportData) -> str:
    others = (*NOT_REWRITES, *report.optional)
    rewrites = dict.fromkeys(name for name in [*report.known, *report.off] if name not in others)
    missing = [name for name in rewrites if not report.matches[name]]
    near = {miss.rewrite for miss in report.near}
    inapplicable = [name for name in missing if report.cannot_apply(name)]
    rows: dict[str, str] = {}
    first: dict[str, str] = {}  # reason -> the first rewrite that has it
    for name in missing:
        if name in near:
            rows[name] = "near misses, below"
        elif name not in inapplicable:
            reason = report.reason(name)
            rows[name] = f"as {first[reason]}" if reason in first else reason
            first.setdefault(reason, name)
    parts = [table(("did not fire", "why"), list(rows.items()))] if rows else []
    if inapplicable:
        text = f"cannot apply, the graph lacks their ops: {', '.join(inapplicable)}"
        parts.append(wrapped(text))
    return "\n".join(parts)


def _near_misses(near: Sequence[Miss]) -> str:
    groups = grouped_by(
        lambda miss: (
            miss.rewrite,
            miss.variant,
            collapsed(miss.module_path),
            miss.kind,
            miss.source,
        ),
        near,
    )
    if not groups:
        return ""
    lines = ["near misses"]
    for misses in list(groups.values())[:MAX_MISSES]:
        first = misses[0]
        variant = f" ({first.variant})" if first.variant else ""
        layers = _layers(miss.layer for miss in misses)
        times = f" x{len(misses)}, layers {layers}" if len(misses) > 1 else ""
        source = f", {first.source}" if first.source else ""
        where = collapsed(first.module_path) if len(misses) > 1 else first.module_path
        head = (
            f"{first.rewrite}{variant} in {located(where)}{times}{source}: "
            f"{first.depth:.0%} matched"
        )
        lines += [
            wrapped(head, "  ", "    "),
            wrapped(first.expected, "    expected  ", 14 * " "),
            wrapped(first.found, "    found     ", 14 * " "),
        ]
    if len(groups) > MAX_MISSES:
        lines.append(f"  and {len(groups) - MAX_MISSES} more: Report.near has all")
    return "\n".join(lines)


def _kernels(choices: Sequence[KernelChoice]) -> str:
    if not choices:
        return ""
    nodes = grouped_by(
        lambda choice: (choice.op, choice.tokens, located(choice.chosen, choice.note)), choices
    )
    refusals: dict[tuple[str, str], list[str]] = {}
    for choice in choices:
        for refusal in choice.others:
            refusals.setdefault(refusal, []).append(choice.op)
    rows = [(op, str(len(of_op)), tokens, kernel) for (op, tokens, kernel), of_op in nodes.items()]
    lines = [table(("op", "nodes", "tokens", "runs as"), rows, numbers=[1])]
    for (provider, reason), refused in refusals.items():
        whose = "all" if len(refused) == len(choices) else ", ".join(dict.fromkeys(refused))
        lines.append(wrapped(f"not {provider} for {whose}: {reason}"))
    return "\n".join(lines)


def _moe_layers(report: ReportData) -> str:
    """Equal mixtures of experts in one row, with one row for each range of tokens."""
    choices = grouped_by(lambda choice: choice.node, report.kernels)
    groups: dict[tuple[str, ...], list[int | None]] = {}
    for mixture in report.moe:
        for tokens, kernel in kernels_by_tokens(choices.get(mixture.node, [])) or [("-", "-")]:
            row = (
                str(mixture.experts),
                str(mixture.top_k),
                mixture.scheme,
                tokens,
                kernel,
                mixture.router or "not recognized",
            )
            groups.setdefault(row, []).append(mixture.layer)
    header = ("layers", "experts", "top-k", "weights", "tokens", "runs as", "router")
    rows = [(_layers(layers), *row) for row, layers in groups.items()]
    return f"mixtures of experts\n{table(header, rows, numbers=[1, 2])}" if rows else ""


def _collapsed_lines(lines: Iterable[str]) -> list[str]:
    """The lines with layer numbers removed; equal ones once, with their count."""
    groups = Counter(map(collapsed, lines))
    return [f"{line} (x{count})" if count > 1 else line for line, count in groups.items()]


def _listed(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(wrapped(line, "  ", "    ") for line in lines)]) if lines else ""


def _repeated_calls(report: ReportData) -> list[str]:
    lines = [_repeated(call) for call in report.repeated]
    if any(call["direct"] for call in report.repeated) and not report.cuda_graphs:
        lines.append('mode="reduce-overhead" takes the time of one launch instead, of a CUDA graph')
    return lines


def _repeated(call: RepeatedCall) -> str:
    launches = f"{call['kernels']} kernels and {call['ops']} ops of PyTorch"
    direct = f", {call['direct']} by CUDA's driver and cuBLASLt directly" if call["direct"] else ""
    size = f"{call['bytes'] / 2**20:.1f} MiB of temporaries"
    return f"{launches}{direct}, {size}, {call['host_ms']:.2f} ms of the host"


def _audit(report: ReportData) -> str:
    if not report.audit:
        return ""
    return wrapped(f"audit: {headline(report.audit)}")


def _break_and_recompile(report: ReportData) -> str:
    lines = []
    if report.graph_break is not None:
        code = f" ({report.graph_break.code})" if report.graph_break.code else ""
        first, *rest = report.graph_break.reason.strip().splitlines() or [""]
        lines.append(wrapped(f"graph break at {report.graph_break.source}{code}: {first}"))
        lines += [wrapped(line.strip(), "  ", "    ") for line in rest if line.strip()]
    if report.recompile is not None:
        lines.append(wrapped(f"recompiled, because this guard failed: {report.recompile}"))
    return "\n".join(lines)


def _phases(report: ReportData) -> str:
    if not report.phases:
        return ""
    parts = [f"{name} {seconds:.2f}" for name, seconds in report.phases.items()]
    return wrapped(
        f"{', '.join(parts)}; together {sum(report.phases.values()):.2f}", "seconds: ", 9 * " "
    )


def fired_counts(report: ReportData) -> list[tuple[str, int]]:
    """The rewrites that fired, and at how many sites."""
    names = [name for name in dict.fromkeys(report.known) if name not in NOT_REWRITES]
    return [(name, report.matches[name]) for name in names if report.matches[name]]


def summary(report: ReportData) -> str:
    """Three lines: rewrites, kernels, and near misses with notes."""
    if not report.treated:
        return f"not compiled: {report.why_not}"
    layers = len({site.layer for site in report.sites if site.layer is not None})
    rewrites = [f"{count} {name}" for name, count in fired_counts(report)]
    near = [f"{miss.rewrite} in {located(miss.module_path)}" for miss in report.near]
    missed = f"{len(near)} near misses, such as {near[0]}" if near else "nothing nearly fused"
    lines = [
        f"{layers} layers: {', '.join(rewrites) or 'no rewrite'} fired",
        _kernel_counts(report.kernels),
        "; ".join([missed, *report.notes]),
    ]
    return "\n".join(lines)


def _kernel_counts(choices: Sequence[KernelChoice]) -> str:
    """The number of calls of each op, by kernel."""
    runs: dict[str, Counter[str]] = {}
    for choice in choices:
        runs.setdefault(choice.chosen, Counter())[choice.op] += 1
    kernels = [
        f"{kernel} runs {', '.join(f'{count} {op}' for op, count in ops.items())}"
        for kernel, ops in runs.items()
    ]
    return "; ".join(kernels) or "no kernels"
