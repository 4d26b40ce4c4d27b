"""Plans a model on a machine without weights and without the machine: kernels, bytes and time of a
step, and memory.

The model, or one device's shard of it, is built on the meta device and compiled for the runtime on
that machine. Times are predictions (atomc.cost.efficiency); collectives are counted in bytes, not
in time.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch.fx import GraphModule

from atomc.cost.efficiency import Predicted, Table, predict, table_for
from atomc.files.json_types import JSONMapping
from atomc.ops.inputs import TEXT, ModelInputs
from atomc.ops.op_cost import distinct_experts
from atomc.options import Options
from atomc.parallel.stages import StageModel
from atomc.planning.communication import communication_of
from atomc.planning.device_model import Model
from atomc.planning.measure import KernelTimer, measure_peaks
from atomc.planning.memory import memory_of
from atomc.planning.plan_report import ExpertsRead, Mixture, PlanRow, StepPlan, Workload
from atomc.platform import Platform
from atomc.program import Program, compile_model
from atomc.report.records import MoeLayer
from atomc.report.render.table import collapsed
from atomc.report.report import Report
from atomc.runtime.execution.draft import DraftProgram, compile_draft
from atomc.runtime.execution.views.hidden_states import WithHiddenStates
from atomc.torch_compat.core import GraphFunction


def plan_step(
    model: Model,
    platform: Platform,
    load: Workload,
    *,
    longest: int | None = None,
    options: JSONMapping | None = None,
    table: Table | None = None,
    program: Program | None = None,
) -> StepPlan:
    """The plan of a step on this platform.

    longest   tokens of the longest sequence; None: max_position_embeddings
    table     of efficiencies; None: the shipped one of the machine, if any
    program   the model compiled by `compile_for`; None: it is compiled here
    """
    program = program or compile_for(model, platform, options)
    draft = _compile_draft(model, program, platform, options)
    table = table or table_for(platform)
    sizes = load.sizes | {"N": model.data_ranks}
    predicted = predict(program.report.costs, program.report.kernels, platform, sizes, table)
    drafted = _predict_drafts(draft, platform, load, table) if draft else []
    programs = [program, *(draft.text_programs if draft else ())]
    mixtures = [layer for compiled in programs for layer in compiled.report.moe]
    weights = (
        str(model.dtype).removeprefix("torch.")
        if model.quantization is None
        else model.quantization.method
    )
    name = type(getattr(model.module, "hf_model", model.module)).__name__
    return StepPlan(
        name,
        platform.name,
        platform.arch,
        max(model.devices, model.expert_ranks),
        weights,
        load,
        program.report.num_layers,
        [
            *plan_rows(predicted, program.report.num_layers),
            *_draft_rows(drafted),
        ],
        memory_of(model, program, draft, platform, longest),
        _mixture(model, mixtures, load) if mixtures else None,
        communication_of(model, model.sharding, load, platform, predicted)
        if model.sharding
        else None,
        _lower_bound(platform, table, [*predicted, *drafted]),
        table.source if table else "",
        _notes(program.report, model),
    )


def compile_for(
    model: Model,
    platform: Platform,
    options: JSONMapping | None = None,
    observers: Sequence[Callable[[str, GraphModule], None]] = (),
) -> Program:
    """The model compiled for the runtime on that platform; neither glue nor cache is used."""
    module, takes = model.module, TEXT
    if layers := model.draft_layers:
        module = WithHiddenStates(module, layers[0].reads)
    if model.stage is not None:
        module = of_stage = StageModel(module)
        if not model.stage.is_first:
            takes = ModelInputs(hidden=(of_stage.width, of_stage.dtype))
    program = compile_model(
        module, _options(options, platform), platform, observers, owned=True, takes=takes
    )
    program.report.model = type(model.module).__name__
    return program


def _compile_draft(
    model: Model, target: Program, platform: Platform, options: JSONMapping | None
) -> DraftProgram | None:
    """The draft layers compiled like their target, which has the last report, too."""
    layers, parsed = model.draft_layers, _options(options, platform)
    if not layers:
        return None
    return compile_draft(layers, target, parsed, model.drafts, owned=True, platform=platform)


def _options(options: JSONMapping | None, platform: Platform) -> Options:
    glue = "eager" if platform.is_cpu else "auto"
    return Options.of({"glue": glue, **(options or {}), "cache": False})


def _predict_drafts(
    draft: DraftProgram, platform: Platform, load: Workload, table: Table | None
) -> list[Predicted]:
    """The kernels of all draft steps after a step: that of each layer reads the tokens of the step,
    each further one of the last layer a token of each sequence.
    """
    further = Workload(load.sequences, load.sequences, load.context)
    reports = [program.report for program in draft.text_programs]
    steps = [(report, load) for report in reports]
    steps += [(reports[-1], further)] * (draft.count - len(reports))
    return [
        predicted
        for report, step in steps
        for predicted in predict(report.costs, report.kernels, platform, step.sizes, table)
    ]


def _draft_rows(predicted: Sequence[Predicted]) -> list[PlanRow]:
    """Rows of draft steps, which are not part of the layers of the model."""
    return [
        replace(row, module_path=f"draft.{row.module_path}".rstrip("."), in_layers=False)
        for row in plan_rows(predicted, 0)
    ]


class TimedProgram:
    """A model compiled for this machine to time its kernels: the program, and the graph of each
    range of token counts.
    """

    def __init__(
        self,
        model: Model,
        options: JSONMapping | None = None,
        platform: Platform | None = None,
    ):
        self.model, self.platform = model, measure_peaks(platform or Platform.detect(), model.dtype)
        self.graphs: list[GraphModule] = []
        self.program = compile_for(model, self.platform, options, [self._take])
        self.fuses = any(glue.how == "inductor" for glue in self.program.report.glue)

    def _take(self, name: str, gm: GraphModule) -> None:
        if name == "lower":
            self.graphs.append(gm)

    def time(
        self, load: Workload, table: Table | None = None
    ) -> tuple[list[Predicted], dict[int, float]]:
        """(predictions for the kernels of a step, number of a prediction -> measured seconds)."""
        report = self.program.report
        predicted = predict(report.costs, report.kernels, self.platform, load.sizes, table)
        return predicted, dict(enumerate(self.time_some(load, predicted)))

    def time_some(self, load: Workload, wanted: Sequence[Predicted]) -> list[float]:
        """The measured seconds of these kernels in a step."""
        gm = next(gm for gm in self.graphs if load.tokens in gm.meta["tokens"])
        bench = KernelTimer(gm, self.program.specs, load, torch.device(self.platform.device))
        return [bench.seconds(p.nodes, self._inline if self.fuses else None) for p in wanted]

    def _inline(self, piece: GraphModule) -> GraphFunction:
        compiled: GraphFunction = torch.compile(piece, dynamic=False)
        return compiled


def measure_step(
    model: Model,
    load: Workload,
    *,
    longest: int | None = None,
    options: JSONMapping | None = None,
    table: Table | None = None,
) -> StepPlan:
    """The plan of a step on this machine, with the measured time of each kernel.

    Raises ValueError for a model with a draft layer.
    """
    if model.drafts:
        raise ValueError("--measure does not time draft steps: leave out it or --speculative")
    lowered = TimedProgram(model, options)
    table = table or table_for(lowered.platform)
    step_plan = plan_step(
        model, lowered.platform, load, longest=longest, table=table, program=lowered.program
    )
    predicted, timed = lowered.time(load, table)
    return replace(step_plan, lines=plan_rows(predicted, step_plan.layers, timed))


def plan_rows(
    predicted: Sequence[Predicted], layers: int, timed: Mapping[int, float] | None = None
) -> list[PlanRow]:
    """One row for kernels equal in all layers. timed: number of a prediction -> seconds."""
    groups: dict[tuple[str, str, str, float, float, bool], list[int]] = {}
    for i, p in enumerate(predicted):
        key = (p.op, p.kernel, collapsed(p.module_path), p.bytes, p.flops, p.layer is not None)
        groups.setdefault(key, []).append(i)
    rows = []
    for (op, kernel, path, moved, flops, inside), numbers in groups.items():
        p = predicted[numbers[0]]
        # A kernel that fuses the end of a layer with the start of the next has no layer number.
        inside = inside or len(numbers) >= max(layers, 2)
        seconds = sum(timed[i] for i in numbers) / len(numbers) if timed else None
        rows.append(
            PlanRow(
                op,
                kernel,
                path,
                len(numbers),
                inside,
                moved,
                flops,
                p.least,
                p.seconds,
                p.measured,
                seconds,
            )
        )
    return rows


def _lower_bound(platform: Platform, table: Table | None, predicted: Sequence[Predicted]) -> str:
    if platform.bandwidth is None and table is None:
        return (
            f"the bandwidth of {platform.name} is unknown: measure it (--measure, on that machine)"
        )
    if table is None:
        return f"lower bound: no kernel was measured on {platform.name}"
    absent = list(dict.fromkeys(f"{p.op} by {p.kernel}" for p in predicted if not p.measured))
    return f"lower bound for kernels that were not measured: {', '.join(absent)}" if absent else ""


def _notes(report: Report, model: Model) -> list[str]:
    notes = list(model.quantization.notes) if model.quantization else []
    if model.expert_ranks > 1 and model.data_ranks == 1:
        notes.append(
            f"experts: all {model.expert_ranks} devices have the same tokens, of which none is "
            "sent to the device of an expert; with --dp and --ep, devices have tokens of their own"
        )
    of_glue = {glue.note for glue in report.glue}  # the glue is not built here
    return notes + [note for note in report.notes if note not in of_glue]


def _mixture(model: Model, layers: Sequence[MoeLayer], load: Workload) -> Mixture:
    kinds = Counter((layer.experts, layer.top_k) for layer in layers)
    ranks = model.expert_ranks
    unused = sum(
        layer.weights * (layer.experts * ranks - layer.top_k) // (layer.experts * ranks)
        for layer in layers
    )
    return Mixture(
        model.parameters,
        model.parameters - unused,
        sum(layer.bytes for layer in layers),
        [
            ExpertsRead(
                count,
                held,
                top_k,
                distinct_experts(held * ranks, top_k, load.tokens * model.data_ranks) / ranks,
            )
            for (held, top_k), count in kinds.items()
        ],
    )
