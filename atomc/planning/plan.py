"""Plans a model on a machine without weights and without the machine: kernels, bytes and time of a
step, and memory.

The model, or one device's shard of it, is built on the meta device and compiled for the runtime on
that machine. Times are predictions (atomc.cost.efficiency); collectives are counted in bytes, not
in time.
"""

import re
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.fx import GraphModule

from atomc import models
from atomc.cost.efficiency import Predicted, Table, predict, table_for
from atomc.json_types import JSONLike
from atomc.models import stock
from atomc.models.checkpoint_files import config_dtype, load_config
from atomc.models.config import integer
from atomc.models.draft_checkpoint import check_draft_layers
from atomc.models.loader import ready
from atomc.models.mtp import DraftModel
from atomc.ops.op_cost import distinct_experts
from atomc.ops.state import StateSpec, block_size_of, groups_of
from atomc.options import Options
from atomc.planning.measure import KernelTimer, Sizes, with_peaks
from atomc.planning.plan_report import (
    Communication,
    ExpertsRead,
    Memory,
    Mixture,
    Plan,
    PlanRow,
    Workload,
)
from atomc.platform import Platform
from atomc.program import Program, compile_model
from atomc.quantization import apply
from atomc.quantization.config import QuantizationConfig, Request, decide
from atomc.quantization.linear import LinearMethod, QuantizedLinear
from atomc.quantization.scheme import Fp8, Fp8Block, Scheme
from atomc.report.records import MoeLayer
from atomc.report.render.table import collapsed
from atomc.report.report import Report
from atomc.runtime.capacity import (
    CPU_SHARE,
    GRAPH_SHARE,
    SPARE_SLOTS,
    capacity,
    max_blocks_per_sequence,
)
from atomc.runtime.draft import DraftProgram, compile_draft, draft_model_of
from atomc.runtime.hidden_states import WithHiddenStates
from atomc.torch_compat.core import GraphFunction

# Sizes in a config.json that tensor parallelism divides.
SHARDED_SIZES = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "vocab_size",
)
ROW_SHARDED, VOCAB_SHARDED = ("row", "rowwise"), ("vocab",)
MAX_NUM_BATCHED_TOKENS = 2048
UTILIZATION = 0.9
MANY_SEQUENCES = 10**6  # more than any memory can hold


@dataclass(frozen=True)
class Model:
    """One device's shard of a model on meta, with its configuration. drafts: tokens that its draft
    layer proposes per step; 0: it has none.
    """

    module: nn.Module
    config: Mapping[str, JSONLike]
    quantization: QuantizationConfig | None
    dtype: torch.dtype
    devices: int
    parameters: int  # the number of weights, whatever their dtype
    drafts: int = 0

    @property
    def draft(self) -> DraftModel | None:
        return draft_model_of(self.module) if self.drafts else None


def build_model(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    quantization: Request = None,
    devices: int = 1,
    layers: int | None = None,
    platform: Platform | None = None,
    drafts: int = 0,
) -> Model:
    """The model of a config.json on meta: one device's shard, quantized like its checkpoint or as
    requested; with its draft layer, if that proposes `drafts` tokens per step.

    Raises ValueError for a size that cannot be divided, and as loading the model does.
    """
    config = load_config(folder)
    if layers is not None:
        config = _first_layers(layers, config)
    chosen = decide(quantization, folder, config)
    if devices > 1:
        config = shard_config(config, devices)
    plain = {
        name: value
        for name, value in config.items()
        if name not in ("quantization_config", "compression_config")
    }
    dtype = dtype or config_dtype(config) or torch.float32
    if drafts:
        check_draft_layers(config, None, folder)
    module = models.build(plain, dtype=dtype, device="meta", draft_layer=drafts > 0)
    parameters = sum(x.numel() for x in module.parameters())  # before some are packed as codes
    if chosen is not None:
        prefix = stock.PREFIX if isinstance(module, stock.StockModel) else ""
        _quantize(module, apply.methods_of(module, chosen, prefix), dtype, platform)
    if devices > 1:
        sharding(module)
    return Model(ready(module), config, chosen, dtype, devices, parameters, drafts)


def _first_layers(layers: int, config: Mapping[str, JSONLike]) -> Mapping[str, JSONLike]:
    count = integer(config, "num_hidden_layers", layers)
    if not 1 <= layers <= count:
        raise ValueError(f"--layers {layers}: the model has {count}")
    first = {**config, "num_hidden_layers": layers}
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(kinds := config.get(name), list):
            first[name] = kinds[:layers]
    return first


def shard_config(config: Mapping[str, JSONLike], devices: int) -> Mapping[str, JSONLike]:
    """The config of one device's shard: heads, hidden units of MLPs and vocabulary are divided, the
    model width is not.

    Raises ValueError naming a size that cannot be divided.
    """
    if devices < 1:
        raise ValueError(f"{devices} devices: expected at least 1")
    absent = [name for name in ("num_attention_heads", "vocab_size") if name not in config]
    if absent:
        raise ValueError(
            f"cannot shard this model over {devices} devices: its config.json has no {absent[0]}"
        )
    heads = integer(config, "num_attention_heads")
    found = {**config, "num_key_value_heads": config.get("num_key_value_heads") or heads}
    for name in SHARDED_SIZES:
        size = found.get(name)
        if isinstance(size, int) and size % devices:
            raise ValueError(
                f"cannot shard this model over {devices} devices: {name} is {size}, not "
                f"a multiple of {devices}"
            )
        if isinstance(size, int):
            found[name] = size // devices
    found.setdefault(
        "head_dim", config.get("head_dim") or integer(config, "hidden_size", 0) // heads
    )
    return found


def _quantize(
    module: nn.Module,
    methods: apply.Methods,
    dtype: torch.dtype,
    platform: Platform | None,
) -> None:
    """Replace linear layers and experts by quantized ones on meta; siblings share a per-tensor
    scale, as after loading.
    """
    fnuz = platform is not None and platform.arch == "gfx942"

    def on_device(scheme: Scheme) -> Scheme:
        if fnuz and isinstance(scheme, Fp8 | Fp8Block):
            return replace(scheme, dtype=torch.float8_e4m3fnuz)
        return scheme

    for name, of_experts in methods.experts.items():
        converted = replace(of_experts, scheme=on_device(of_experts.scheme), format=None)
        apply.create_experts(module, name, converted, dtype, stacked=True)
    for group in apply.groups(methods.linears):
        shared: dict[str, nn.Parameter] = {}
        for name, method in group:
            scheme = on_device(method.scheme)
            old = apply.linear(module, name)
            layer = QuantizedLinear(
                old.in_features, old.out_features, old.bias, LinearMethod(scheme)
            )
            layer.method.create_weights(layer, dtype, "meta")
            for scale in ("weight_scale", "input_scale"):
                parameter = layer._parameters.get(scale)
                if parameter is not None and parameter.shape == (1,):
                    layer.register_parameter(
                        scale, shared.setdefault(f"{scale} {scheme}", parameter)
                    )
            apply.replace(module, name, layer)


def sharding(module: nn.Module) -> dict[str, str]:
    """Name of a module -> how its parameters are sharded, from SHARD in the model's file or the
    plan of transformers.

    Raises ValueError for a model that has neither.
    """
    if isinstance(module, stock.StockModel):
        plan = getattr(module.config, "base_model_tp_plan", None) or {}
        found = {path.rpartition(".")[2]: how for path, how in plan.items()}
        found |= {"embed_tokens": "vocab", "lm_head": "vocab"}  # which the plan does not shard
    else:
        found = getattr(sys.modules[type(module).__module__], "SHARD", {})
    if not any(how in ROW_SHARDED for how in found.values()):
        raise ValueError(f"{type(module).__name__} does not define how it is sharded over devices")
    return dict(found)


def plan(
    model: Model,
    platform: Platform,
    load: Workload,
    *,
    longest: int | None = None,
    options: Mapping[str, JSONLike] | None = None,
    table: Table | None = None,
    program: Program | None = None,
) -> Plan:
    """The plan of a step on this platform.

    longest   tokens of the longest sequence; None: max_position_embeddings
    table     of efficiencies; None: the shipped one of the machine, if any
    program   the model compiled by `compile_for`; None: it is compiled here
    """
    program = program or compile_for(model, platform, options)
    draft = _compile_draft(model, program, platform, options)
    table = table or table_for(platform)
    predicted = predict(program.report.costs, program.report.kernels, platform, load.sizes, table)
    drafted = _predict_drafts(draft, platform, load, table) if draft else []
    mixtures = [*program.report.moe, *(draft.program.report.moe if draft else ())]
    weights = (
        str(model.dtype).removeprefix("torch.")
        if model.quantization is None
        else model.quantization.method
    )
    name = type(getattr(model.module, "hf_model", model.module)).__name__
    return Plan(
        name,
        platform.name,
        platform.arch,
        model.devices,
        weights,
        load,
        program.report.num_layers,
        [
            *plan_rows(predicted, program.report.num_layers),
            *_draft_rows(drafted),
        ],
        _memory(model, program, draft, platform, longest),
        _mixture(model, mixtures, load) if mixtures else None,
        _communication(model, load) if model.devices > 1 else None,
        _lower_bound(platform, table, [*predicted, *drafted]),
        table.source if table else "",
        _notes(program.report, model),
    )


def compile_for(
    model: Model,
    platform: Platform,
    options: Mapping[str, JSONLike] | None = None,
    observers: Sequence[Callable[[str, GraphModule], None]] = (),
) -> Program:
    """The model compiled for the runtime on that platform, without building the glue and without
    the cache.
    """
    glue = "eager" if platform.is_cpu else "auto"
    options = {"glue": glue, **(options or {}), "cache": False}
    module = (
        model.module if model.draft is None else WithHiddenStates(model.module, model.draft.reads)
    )
    program = compile_model(
        module, options=options, platform=platform, observers=observers, owned=True
    )
    program.report.model = type(model.module).__name__
    return program


def _compile_draft(
    model: Model, target: Program, platform: Platform, options: Mapping[str, JSONLike] | None
) -> DraftProgram | None:
    """The draft model compiled like its target, which has the last report, too."""
    draft = model.draft
    if draft is None:
        return None
    glue = "eager" if platform.is_cpu else "auto"
    chosen = Options.of({"glue": glue, **(options or {}), "cache": False})
    return compile_draft(draft, target, chosen, model.drafts, owned=True, platform=platform)


def _predict_drafts(
    draft: DraftProgram, platform: Platform, load: Workload, table: Table | None
) -> list[Predicted]:
    """The kernels of all draft steps after a step: the first one reads the tokens of the step, each
    further one a token of each sequence.
    """
    report = draft.program.report
    further = Workload(load.sequences, load.sequences, load.context)
    return [
        predicted
        for step in (load, *[further] * (draft.count - 1))
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
        options: Mapping[str, JSONLike] | None = None,
        platform: Platform | None = None,
    ):
        self.model, self.platform = model, with_peaks(platform or Platform.detect(), model.dtype)
        self.graphs: list[GraphModule] = []
        self.program = compile_for(model, self.platform, options, [self._take])
        self.fuses = any(glue.how == "inductor" for glue in self.program.report.glue)

    def _take(self, name: str, gm: GraphModule) -> None:
        if name == "lower":
            self.graphs.append(gm)

    def time(
        self, load: Workload, table: Table | None = None
    ) -> tuple[list[Predicted], dict[int, float]]:
        """(the predictions for each kernel of a step, number of a prediction -> measured
        seconds).
        """
        report = self.program.report
        predicted = predict(report.costs, report.kernels, self.platform, load.sizes, table)
        return predicted, dict(enumerate(self.time_some(load, predicted)))

    def time_some(self, load: Workload, wanted: Sequence[Predicted]) -> list[float]:
        """The measured seconds of these kernels in a step."""
        gm = next(gm for gm in self.graphs if load.tokens in gm.meta["tokens"])
        bench = KernelTimer(
            gm, self.program.specs, Sizes(**load.sizes), torch.device(self.platform.device)
        )
        return [bench.seconds(p.nodes, self._inline if self.fuses else None) for p in wanted]

    def _inline(self, piece: GraphModule) -> GraphFunction:
        found: GraphFunction = torch.compile(piece, dynamic=False)
        return found


def measure_plan(
    model: Model,
    load: Workload,
    *,
    longest: int | None = None,
    options: Mapping[str, JSONLike] | None = None,
    table: Table | None = None,
) -> Plan:
    """The plan of a step on this machine, with the measured time of each kernel.

    Raises ValueError for a model with a draft layer.
    """
    if model.drafts:
        raise ValueError("--measure does not time draft steps: leave out it or --speculative")
    lowered = TimedProgram(model, options)
    table = table or table_for(lowered.platform)
    found = plan(
        model, lowered.platform, load, longest=longest, table=table, program=lowered.program
    )
    predicted, timed = lowered.time(load, table)
    return replace(found, lines=plan_rows(predicted, found.layers, timed))


def plan_rows(
    predicted: Sequence[Predicted], layers: int, timed: Mapping[int, float] | None = None
) -> list[PlanRow]:
    """One row for kernels that are equal in all layers. timed: number of a prediction -> measured
    seconds.
    """
    groups: dict[tuple[str, str, str, float, float, bool], list[int]] = {}
    for i, p in enumerate(predicted):
        key = (p.op, p.kernel, collapsed(p.module_path), p.bytes, p.flops, p.layer is not None)
        groups.setdefault(key, []).append(i)
    found = []
    for (op, kernel, path, moved, flops, inside), numbers in groups.items():
        p = predicted[numbers[0]]
        # A kernel that fuses the end of a layer with the start of the next has no layer number.
        inside = inside or len(numbers) >= max(layers, 2)
        seconds = sum(timed[i] for i in numbers) / len(numbers) if timed else None
        found.append(
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
    return found


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
    of_glue = {glue.note for glue in report.glue}  # the glue is not built here
    return notes + [note for note in report.notes if note not in of_glue]


def _memory(
    model: Model,
    program: Program,
    draft: DraftProgram | None,
    platform: Platform,
    longest: int | None,
) -> Memory:
    held = {id(tensor): tensor for tensor in (*model.module.parameters(), *model.module.buffers())}
    weights = sum(tensor.nbytes for tensor in held.values())
    of_draft = sum(x.nbytes for x in model.draft.layer.parameters()) if model.draft else 0
    programs = [program, *([draft.program] if draft else [])]
    copies = sum(each.prepared_bytes - each.replaced_bytes for each in programs)
    specs = [*program.specs, *(draft.specs if draft else ())]
    made_for = model.config.get("max_position_embeddings")
    length = longest or (made_for if isinstance(made_for, int) else 4096)
    room = int(platform.memory * (CPU_SHARE if platform.is_cpu else UTILIZATION - GRAPH_SHARE))
    cache = max(room - (0 if platform.is_cpu else weights + copies), 0)
    per_token = sum(spec.bytes_per_token() for spec in specs)
    per_sequence = sum(spec.bytes_per_sequence() for spec in specs)
    found = Memory(
        platform.memory, weights, copies, 0, per_token, length, None, None, per_sequence, of_draft
    )
    if not platform.memory or not specs:
        return found
    fits, that_fits = _sequences(specs, cache, length)
    return replace(found, cache=cache, fits=fits, longest_that_fits=that_fits)


def _mixture(model: Model, layers: Sequence[MoeLayer], load: Workload) -> Mixture:
    kinds = Counter((layer.experts, layer.top_k) for layer in layers)
    unused = sum(layer.weights * (layer.experts - layer.top_k) // layer.experts for layer in layers)
    return Mixture(
        model.parameters,
        model.parameters - unused,
        sum(layer.bytes for layer in layers),
        [
            ExpertsRead(count, experts, top_k, distinct_experts(experts, top_k, load.tokens))
            for (experts, top_k), count in kinds.items()
        ],
    )


def _sequences(specs: Sequence[StateSpec], room: int, length: int) -> tuple[int, int]:
    """(number of sequences of this length that fit, length of the longest sequence that fits)."""
    per_sequence = sum(spec.bytes_per_sequence() for spec in specs)
    if not per_sequence:
        return _in_blocks(specs, room, length)
    # Each sequence also takes its state per sequence, which leaves less room for blocks.
    left = room - SPARE_SLOTS * per_sequence
    most = left // per_sequence
    if most < 1:
        return 0, 0
    fits = bisect_left(
        range(1, most + 1),
        True,
        key=lambda n: _in_blocks(specs, left - n * per_sequence, length)[0] < n,
    )
    return fits, length if fits else _in_blocks(specs, left - per_sequence, length)[1]


def _in_blocks(specs: Sequence[StateSpec], room: int, length: int) -> tuple[int, int]:
    """As `_sequences`, for the state that is kept per token."""
    groups, block_size = groups_of(specs), block_size_of(specs) or length
    if not groups:
        return MANY_SEQUENCES, length
    sizes = {
        "groups": groups,
        "block_size": block_size,
        "available": room,
        "longest": length,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
    }
    try:
        found = capacity(**sizes, max_num_seqs=MANY_SEQUENCES, max_model_len=length)  # type: ignore[arg-type]
    except ValueError:
        try:
            return 0, capacity(**sizes, max_num_seqs=MANY_SEQUENCES).max_model_len  # type: ignore[arg-type]
        except ValueError:
            return 0, 0
    each = [
        max_blocks_per_sequence(length, window, block_size, MAX_NUM_BATCHED_TOKENS)
        for _, window in groups
    ]
    return min(
        count // of_one for count, of_one in zip(found.num_blocks, each, strict=True)
    ), length


def _communication(model: Model, load: Workload) -> Communication:
    """All-reduces after row-sharded layers and the embedding, and a gather of the logits, of the
    step and of the draft steps after it.
    """
    how, draft = sharding(model.module), model.draft
    width, size = integer(model.config, "hidden_size"), model.dtype.itemsize
    n = model.devices
    logits = load.sequences * integer(model.config, "vocab_size") * size  # of one device
    inner = set(draft.layer.modules()) if draft else set()
    own = [name for name, module in model.module.named_modules() if module not in inner]
    steps = [(_collectives(own, how), load.tokens)]
    if draft is not None:
        drafted = _collectives([name for name, _ in draft.named_modules()], how)
        rows = [load.tokens, *[load.sequences] * (model.drafts - 1)]
        steps += [(drafted, tokens) for tokens in rows]
    sent = sum(
        reduces * 2 * (n - 1) * tokens * width * size // n + gathers * (n - 1) * logits
        for (reduces, gathers), tokens in steps
    )
    reduces, gathers = (sum(counts[i] for counts, _ in steps) for i in (0, 1))
    return Communication(reduces, gathers, load.tokens * width * size, sent)


def _collectives(names: Sequence[str], how: Mapping[str, str]) -> tuple[int, int]:
    """The numbers of all-reduces and gathers of a step through modules with these names."""
    paths = {re.sub(r"\.experts\.\d+(?=\.)", ".experts", name) for name in names}
    leaves = [path.rpartition(".")[2] for path in paths]
    rows = sum(how.get(leaf) in ROW_SHARDED for leaf in leaves)
    tables = [leaf for leaf in leaves if how.get(leaf) in VOCAB_SHARDED]
    embeddings = sum("embed" in leaf for leaf in tables)
    return rows + embeddings, len(tables) - embeddings
