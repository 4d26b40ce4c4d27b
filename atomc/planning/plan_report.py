"""The result of planning, as data and as text."""

from dataclasses import asdict, dataclass, field
from functools import partial

from atomc.files.json_types import JSONLike
from atomc.report.render.table import table


@dataclass(frozen=True)
class Workload:
    """One step: `tokens` new tokens of `sequences` sequences in total, each of `context` tokens
    including new ones.
    """

    tokens: int = 1
    sequences: int = 1
    context: int = 1024

    def __post_init__(self) -> None:
        if min(self.tokens, self.sequences, self.context) < 1:
            raise ValueError(
                f"a step of {self.tokens} tokens, {self.sequences} sequences and "
                f"{self.context} tokens of "
                "context: each must be at least 1"
            )
        if not self.sequences <= self.tokens <= self.sequences * self.context:
            raise ValueError(
                f"a step of {self.tokens} tokens for {self.sequences} sequences of "
                f"{self.context} tokens: "
                f"expected {self.sequences} to {self.sequences * self.context} tokens"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Values for the symbols of atomc.cost.cost."""
        return {"T": self.tokens, "S": self.sequences, "C": self.context, "R": self.sequences}


@dataclass(frozen=True)
class PlanRow:
    """One kernel and the number of its calls in a step. module_path: * stands for all layers.

    least     seconds of one call by the data sheet, max(bytes / bandwidth, flops / peak); None if
              unknown
    seconds   of one call, predicted; None for an unknown machine
    measured  whether the prediction uses a measured efficiency; else it is a lower bound
    timed     seconds of one call, measured here; None if not measured
    """

    op: str
    kernel: str
    module_path: str
    calls: int
    in_layers: bool
    bytes: float
    flops: float
    least: float | None
    seconds: float | None
    measured: bool
    timed: float | None = None


@dataclass(frozen=True)
class Memory:
    """Memory of one device, in bytes. `fits`: the number of sequences of `longest` tokens that fit,
    None if unknown.

    per_token, per_sequence  bytes of state: for each token of a sequence, and for each sequence
                             whatever its length; of the draft layer, too
    draft                    bytes of the draft layer, a part of `weights`
    snapshots                number of states per sequence that are kept for prefixes, beside those
                             of `fits` sequences
    """

    total: int
    weights: int
    copies: int
    cache: int
    per_token: int
    longest: int
    fits: int | None
    longest_that_fits: int | None
    per_sequence: int = 0
    draft: int = 0
    snapshots: int = 0


@dataclass(frozen=True)
class ExpertsRead:
    """`layers` mixtures of `experts` experts, of which a token uses `top_k`. distinct: the expected
    number that a step reads in each of these layers, if tokens choose uniformly.
    """

    layers: int
    experts: int
    top_k: int
    distinct: float


@dataclass(frozen=True)
class Mixture:
    """The weights of a model with mixtures of experts.

    parameters  number of weights
    active      of these, those that one token uses: all except the experts that it does not choose
    held        bytes of all experts, a part of Memory.weights
    """

    parameters: int
    active: int
    held: int
    read: list[ExpertsRead]


@dataclass(frozen=True)
class CollectiveRow:
    """One collective and the number of its calls in a step. module_path: * stands for all layers.

    sent     bytes that each device sends in one call
    seconds  of one call, if the links were used as published; None if they are unknown
    """

    kind: str  # "all-reduce" or "gather"; the name of an op that sends
    module_path: str
    calls: int
    sent: int
    seconds: float | None


@dataclass(frozen=True)
class CutRow:
    """Parameters of one name. shape: of a device's part; how: as in the plan of the model, ""
    for those that are on every device.
    """

    parameter: str
    how: str
    shape: tuple[int, ...]
    count: int


@dataclass(frozen=True)
class Communication:
    """Collectives of one step: their number, and the bytes each device sends (ring algorithms).

    link  bytes per second that a device sends, as published; None if unknown
    """

    all_reduces: int
    gathers: int
    message: int
    sent: int
    link: float | None
    collectives: list[CollectiveRow]
    cuts: list[CutRow]

    @property
    def seconds(self) -> float | None:
        """Of all collectives of a step, by the data sheet of the links; None if that is unknown."""
        return None if self.link is None else self.sent / self.link


@dataclass(frozen=True)
class StageRow:
    """What a device of a stage holds, and the part of a step that the stage computes.

    first, last   its layers
    also          what it holds besides them
    weights, per_token  bytes of a device
    seconds       of the step in this stage, predicted; None for an unknown machine
    sent          bytes that it sends to the next stage: the states of all tokens
    sent_seconds  by the data sheet of the links; None if they are unknown
    """

    index: int
    first: int
    last: int
    also: str
    weights: int
    per_token: int
    seconds: float | None
    sent: int
    sent_seconds: float | None


@dataclass(frozen=True)
class Pipeline:
    """The stages of a pipeline.

    planned  the slowest stage: memory, kernels and sums of the plan are its own
    fits     as in Memory: what all stages have room for
    link     bytes per second that a device sends, as published; None if unknown
    """

    stages: list[StageRow]
    planned: int
    fits: int | None
    link: float | None

    @property
    def seconds(self) -> float | None:
        """Of a step that goes through all stages, one after the other, and of what they send."""
        parts = [row.seconds for row in self.stages]
        parts += [row.sent_seconds for row in self.stages if row.sent]
        measured = [part for part in parts if part is not None]
        return sum(measured) if len(measured) == len(parts) else None


@dataclass
class StepPlan:
    """The cost of a step on a machine. `lower_bound` says why the times are only lower bounds, ""
    if they are predicted.
    """

    model: str
    machine: str
    arch: str
    devices: int
    weights: str
    load: Workload
    layers: int
    lines: list[PlanRow]
    memory: Memory
    mixture: Mixture | None
    communication: Communication | None
    lower_bound: str
    source: str
    notes: list[str] = field(default_factory=list)
    pipeline: Pipeline | None = None

    def total(self, what: str, *, layers_only: bool = False) -> float | None:
        """The sum of "bytes", "flops", "least", "seconds" or "timed"; None if a row has none."""
        values = [
            (getattr(line, what), line.calls)
            for line in self.lines
            if line.in_layers or not layers_only
        ]
        return (
            None
            if any(value is None for value, _ in values)
            else float(sum(value * calls for value, calls in values))
        )

    def to_dict(self) -> dict[str, JSONLike]:
        """All fields as plain data, with totals."""
        totals = {
            what: {"step": self.total(what), "layers": self.total(what, layers_only=True)}
            for what in ("bytes", "flops", "least", "seconds", "timed")
        }
        return {**asdict(self), "totals": totals}

    def to_text(self) -> str:
        return plan_text(self)


def plan_text(plan: StepPlan) -> str:
    """Memory, communication, and a row for each kernel, longest first."""
    parts = [
        _title(plan),
        _pipeline(plan),
        _memory(plan),
        _mixture(plan),
        _communication(plan),
        _kernels(plan),
        _sums(plan),
    ]
    parts += ["notes\n" + "\n".join(f"  {note}" for note in plan.notes)] if plan.notes else []
    return "\n\n".join(part for part in parts if part) + "\n"


def _title(plan: StepPlan) -> str:
    load, many = plan.load, f", sharded over {plan.devices} devices" if plan.devices > 1 else ""
    if plan.pipeline is not None:
        many += f", in {len(plan.pipeline.stages)} stages"
    return (
        f"plan: {plan.model} in {plan.weights} on {plan.machine} ({plan.arch}){many}; a step "
        f"of {load.tokens} token{'s' * (load.tokens != 1)}, "
        f"{load.sequences} sequence{'s' * (load.sequences != 1)} of {load.context}"
    )


def _pipeline(plan: StepPlan) -> str:
    pipeline = plan.pipeline
    if pipeline is None:
        return ""
    rows = [
        (
            str(row.index),
            f"{row.first}-{row.last}",
            row.also or "-",
            _bytes_text(row.weights),
            _bytes_text(row.per_token),
            _ms(row.seconds),
            f"{row.sent / 1e6:.3f}" if row.sent else "-",
            _us(row.sent_seconds) if row.sent else "-",
        )
        for row in pipeline.stages
    ]
    header = (
        "stage",
        "layers",
        "and",
        "weights",
        "cache of one token",
        "ms a step",
        "MB sent",
        "least us",
    )
    lines = [
        f"a step that goes through all stages: {_ms(pipeline.seconds)} ms, with what "
        "they send to the next one; with many micro-batches, the slowest stage decides"
    ]
    if pipeline.fits is not None:
        lines.append(
            f"sequences of {plan.memory.longest} tokens that all have room for: {pipeline.fits}"
        )
    lines.append(f"what follows is of a device of stage {pipeline.planned}, the slowest")
    return "\n\n".join([table(header, rows, numbers=range(3, 8)), "\n".join(lines)])


def _memory(plan: StepPlan) -> str:
    memory = plan.memory
    rows = [("weights", _bytes_text(memory.weights))]
    rows += [("of these, draft layer", _bytes_text(memory.draft))] if memory.draft else []
    rows += [("cache of one token", _bytes_text(memory.per_token))]
    rows += (
        [("state of one sequence", _bytes_text(memory.per_sequence))] if memory.per_sequence else []
    )
    rows += [("prepared weights", _bytes_text(memory.copies))] if memory.copies else []
    if memory.fits is not None:
        rows += [
            ("room for the cache", f"{_bytes_text(memory.cache)} of {_bytes_text(memory.total)}"),
            (f"sequences of {memory.longest} tokens", str(memory.fits)),
        ]
        if memory.snapshots:
            held = _bytes_text(memory.snapshots * memory.per_sequence)
            rows.append(("snapshots of states", f"{memory.snapshots}, {held}"))
        if not memory.fits:
            rows.append(("longest sequence that fits", str(memory.longest_that_fits)))
    return table(("memory of a device" if plan.devices > 1 else "memory", ""), rows)


def _mixture(plan: StepPlan) -> str:
    mixture = plan.mixture
    if mixture is None:
        return ""
    rows = [
        ("parameters", f"{mixture.parameters / 1e9:.2f} billion"),
        ("active for a token", f"{mixture.active / 1e9:.2f} billion"),
        ("experts held", _bytes_text(mixture.held)),
    ]
    rows += [
        (
            "experts read in a step",
            f"{of.distinct:.1f} of {of.experts} in each of {of.layers} layers, expected "
            f"(top-{of.top_k}, uniform routing)",
        )
        for of in mixture.read
    ]
    return table(("mixture of experts", ""), rows)


def _communication(plan: StepPlan) -> str:
    communication = plan.communication
    if communication is None:
        return ""
    cuts = [
        (row.parameter, row.how or "on every device", str(list(row.shape)), str(row.count))
        for row in communication.cuts
    ]
    rows = [
        (
            row.kind,
            str(row.calls),
            f"{row.sent / 1e6:.3f}",
            _us(row.seconds),
            row.module_path,
        )
        for row in communication.collectives
    ]
    links, sent = "whose links are unknown", _bytes_text(communication.sent)
    if communication.link is not None:
        took = _ms(communication.seconds)
        links = f"{took} ms at {_bytes_text(communication.link)}/s"
    said = (
        f"a step has {communication.all_reduces} all-reduces of "
        f"{_bytes_text(communication.message)} and {communication.gathers} gather of the logits: "
        f"each device sends {sent}, {links} (not in the time)"
    )
    if not communication.all_reduces:
        said = (
            f"each device sends {sent} in a step, {links} (in the time of these kernels); all have "
            "as many tokens"
        )
    return "\n\n".join(
        [
            table(("parameter", "cut", "of a device", "number"), cuts, numbers=range(3, 4)),
            table(
                ("collective", "calls", "MB sent", "least us", "behind"), rows, numbers=range(1, 4)
            ),
            said,
        ]
    )


def _kernels(plan: StepPlan) -> str:
    timed = any(line.timed is not None for line in plan.lines)
    step = plan.total("timed" if timed else "seconds")
    rows = [_row(line, step, timed) for line in sorted(plan.lines, key=_time_order)]
    header = [
        "kernel",
        "by",
        "calls",
        "MB",
        "least us",
        "us",
        "measured us",
        "ms a step",
        "share",
        "in",
    ]
    header = [name for name in header if timed or name != "measured us"]
    return table(header, rows, numbers=range(2, len(header) - 1))


def _time_order(line: PlanRow) -> float:
    return -(line.timed or line.seconds or line.bytes) * line.calls


def _row(line: PlanRow, step: float | None, timed: bool) -> list[str]:
    one = line.timed if timed else line.seconds
    in_step = None if one is None else one * line.calls
    return [
        line.op,
        line.kernel,
        str(line.calls),
        f"{line.bytes / 1e6:.3f}",
        _us(line.least),
        _us(line.seconds),
        *([_us(line.timed)] if timed else []),
        _ms(in_step),
        "-" if in_step is None or not step else f"{in_step / step:.0%}",
        line.module_path or "-",
    ]


def _sums(plan: StepPlan) -> str:
    """Totals of all layers and of the step; then the source of the times."""
    lines = []
    for name, layers_only in (("layers", True), ("step", False)):
        moved, least, seconds, timed = (
            plan.total(what, layers_only=layers_only)
            for what in ("bytes", "least", "seconds", "timed")
        )
        text = f"{name}: {_bytes_text(moved or 0)}"
        text += f", at least {_ms(least)} ms" if least is not None else ""
        text += f", {_ms(seconds)} ms" if seconds is not None else ""
        text += f", measured {_ms(timed)} ms" if timed is not None else ""
        if layers_only and plan.layers and seconds is not None and moved is not None:
            text += (
                f" ({plan.layers}, each {_bytes_text(moved / plan.layers)} and "
                f"{seconds / plan.layers * 1e6:.1f} us)"
            )
        lines.append(text)
    lines.append(plan.lower_bound or f"efficiencies: {plan.source}")
    return "\n".join(lines)


def _scaled(seconds: float | None, by: float, digits: int) -> str:
    return "-" if seconds is None else f"{seconds * by:.{digits}f}"


_ms, _us = partial(_scaled, by=1e3, digits=3), partial(_scaled, by=1e6, digits=2)


def _bytes_text(number: float) -> str:
    """1234567 -> "1.2 MB"."""
    for unit, of in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if number >= of:
            return f"{number / of:.1f} {unit}"
    return f"{number:.0f} B"
