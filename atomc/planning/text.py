"""A plan as text: memory of a device, then the kernels of a step by time."""

from atomc.planning.plan import Line, Plan
from atomc.render.text import table


def plan_text(plan: Plan) -> str:
    """Memory, communication, and a row for each kernel's worth of work, the longest first."""
    parts = [_title(plan), _memory(plan), _communication(plan), _kernels(plan), _sums(plan)]
    parts += ["notes\n" + "\n".join(f"  {note}" for note in plan.notes)] if plan.notes else []
    return "\n\n".join(part for part in parts if part) + "\n"


def _title(plan: Plan) -> str:
    load, many = plan.load, f", cut over {plan.devices} devices" if plan.devices > 1 else ""
    return (f"plan: {plan.model} in {plan.weights} on {plan.machine} ({plan.arch}){many}; a step of {load.tokens} tokens, "
            f"{load.sequences} sequences of {load.context}")  # fmt: skip


def _memory(plan: Plan) -> str:
    memory = plan.memory
    rows = [("weights", size(memory.weights)), ("cache of one token", size(memory.per_token))]
    rows += [("state of one sequence", size(memory.per_sequence))] if memory.per_sequence else []
    rows += [("copies of weights", size(memory.copies))] if memory.copies else []
    if memory.fits is not None:
        rows += [("room for the cache", f"{size(memory.cache)} of {size(memory.total)}"),
                 (f"sequences of {memory.longest} tokens", str(memory.fits))]  # fmt: skip
        if not memory.fits:
            rows.append(("longest sequence that fits", str(memory.longest_that_fits)))
    return table(("memory of a device" if plan.devices > 1 else "memory", ""), rows)


def _communication(plan: Plan) -> str:
    found = plan.communication
    if found is None:
        return ""
    return (f"a step has {found.all_reduces} all-reduces of {size(found.message)} and {found.gathers} gather of the "
            f"logits: each device sends {size(found.sent)} (not in the time)")  # fmt: skip


def _kernels(plan: Plan) -> str:
    timed = any(line.timed is not None for line in plan.lines)
    step = plan.total("timed" if timed else "seconds")
    rows = [_row(line, step, timed) for line in sorted(plan.lines, key=_longest_first)]
    header = ["kernel", "by", "calls", "MB", "least us", "us", "measured us", "ms a step", "share", "in"]
    header = [name for name in header if timed or name != "measured us"]
    return table(header, rows, numbers=range(2, len(header) - 1))


def _longest_first(line: Line) -> float:
    return -(line.timed or line.seconds or line.bytes) * line.calls


def _row(line: Line, step: float | None, timed: bool) -> list[str]:
    one = line.timed if timed else line.seconds
    whole = None if one is None else one * line.calls
    return [line.op, line.kernel, str(line.calls), f"{line.bytes / 1e6:.3f}", scaled(line.least, 1e6, 2),
            scaled(line.seconds, 1e6, 2),
            *([scaled(line.timed, 1e6, 2)] if timed else []), scaled(whole, 1e3, 3),
            "-" if whole is None or not step else f"{whole / step:.0%}", line.module_path or "-"]  # fmt: skip


def _sums(plan: Plan) -> str:
    """A layer, all layers and the step; then what the times rest on."""
    lines = []
    for name, layers_only in (("layers", True), ("step", False)):
        moved, least, seconds, timed = (plan.total(what, layers_only=layers_only)
                                        for what in ("bytes", "least", "seconds", "timed"))  # fmt: skip
        text = f"{name}: {size(moved or 0)}, at least {scaled(least, 1e3, 3)} ms, {scaled(seconds, 1e3, 3)} ms"
        text += f", measured {scaled(timed, 1e3, 3)} ms" if timed is not None else ""
        if layers_only and plan.layers and seconds is not None and moved is not None:
            text += f" ({plan.layers}, each {size(moved / plan.layers)} and {seconds / plan.layers * 1e6:.1f} us)"
        lines.append(text)
    lines.append(plan.lower_bound or f"efficiencies: {plan.source}")
    return "\n".join(lines)


def scaled(seconds: float | None, by: float, digits: int) -> str:
    return "-" if seconds is None else f"{seconds * by:.{digits}f}"


def size(number: float) -> str:
    """1234567 -> "1.2 MB"."""
    for unit, of in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if number >= of:
            return f"{number / of:.1f} {unit}"
    return f"{number:.0f} B"
