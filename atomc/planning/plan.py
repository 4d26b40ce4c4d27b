"""A model on a machine, planned without weights and without the machine: kernels, bytes and time of a step, memory.

The model is built on the meta device, of one device's share if it is cut over several, and compiled for the runtime as it
would be there. Times are predictions (atomc.efficiency); collectives are counted in bytes, not in time.
"""

import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from atomc import models
from atomc.efficiency import Predicted, Table, predict, table_for
from atomc.models import loader, stock
from atomc.models.config import integer
from atomc.ops.state import StateSpec, block_size_of, groups_of
from atomc.planning.measure import Bench, Sizes, with_peaks
from atomc.platform import Platform
from atomc.program import Program, compile_model
from atomc.quantization import apply
from atomc.quantization.config import QuantizationConfig, Request, decide
from atomc.quantization.linear import LinearMethod, QuantizedLinear
from atomc.quantization.scheme import Fp8, Fp8Block
from atomc.render.text import collapsed
from atomc.report import Report
from atomc.runtime.capacity import CPU_SHARE, GRAPH_SHARE, SPARE_SLOTS, blocks_of_one, capacity

# Sizes of a config.json that tensor parallelism divides.
DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "vocab_size")
ROWS, VOCABULARY = ("row", "rowwise"), ("vocab",)
MAX_NUM_BATCHED_TOKENS = 2048
UTILIZATION = 0.9
ENOUGH = 10**6  # sequences that no memory holds


@dataclass(frozen=True)
class Load:
    """One step: so many new tokens of so many sequences together, each of `context` tokens with the new ones."""

    tokens: int = 1
    sequences: int = 1
    context: int = 1024

    def __post_init__(self) -> None:
        if min(self.tokens, self.sequences, self.context) < 1:
            raise ValueError(f"a step of {self.tokens} tokens, {self.sequences} sequences and {self.context} tokens of "
                             "context: each must be at least 1")  # fmt: skip
        if not self.sequences <= self.tokens <= self.sequences * self.context:
            raise ValueError(f"a step of {self.tokens} tokens cannot be of {self.sequences} sequences of {self.context}: "
                             f"expected {self.sequences} to {self.sequences * self.context}")  # fmt: skip

    @property
    def sizes(self) -> dict[str, int]:
        """The symbols of atomc.cost."""
        return {"T": self.tokens, "S": self.sequences, "C": self.context, "R": self.sequences}


@dataclass(frozen=True)
class Line:
    """One kernel's worth of work, as often as it is there in a step. module_path: a star stands for all layers.

    least     seconds of one call by the data sheet, max(bytes / bandwidth, flops / peak), and
    seconds   as predicted; None for a machine of which nothing is known
    measured  whether the prediction rests on a measurement; else it is a lower bound
    timed     seconds of one call as they were measured here, None if they were not
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
    """Of one device, in bytes. `fits`: sequences of `longest` tokens that the cache has room for, None if unknown.

    per_token, per_sequence  of the state: for each token of a sequence, and for each sequence whatever its length
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


@dataclass(frozen=True)
class Communication:
    """Collectives of one step: how many, and the bytes that each device sends for them in a ring."""

    all_reduces: int
    gathers: int
    message: int
    sent: int


@dataclass
class Plan:
    """What a step costs on a machine. `lower_bound` says why the time is no more than that, "" where it is predicted."""

    model: str
    machine: str
    arch: str
    devices: int
    weights: str
    load: Load
    layers: int
    lines: list[Line]
    memory: Memory
    communication: Communication | None
    lower_bound: str
    source: str
    notes: list[str] = field(default_factory=list)

    def total(self, what: str, *, layers_only: bool = False) -> float | None:
        """Of "bytes", "flops", "least", "seconds" or "timed": the sum over the step, None if a line has none."""
        values = [(getattr(line, what), line.calls) for line in self.lines if line.in_layers or not layers_only]
        return None if any(value is None for value, _ in values) else float(sum(value * calls for value, calls in values))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, with the sums."""
        totals = {what: {"step": self.total(what), "layers": self.total(what, layers_only=True)}
                  for what in ("bytes", "flops", "least", "seconds", "timed")}  # fmt: skip
        return {**asdict(self), "totals": totals}

    def to_text(self) -> str:
        from atomc.planning.text import plan_text

        return plan_text(self)


@dataclass(frozen=True)
class Model:
    """A model on meta, of one device, and what was said of it."""

    module: nn.Module
    config: dict[str, Any]
    how: QuantizationConfig | None
    dtype: torch.dtype
    devices: int


def built(
    folder: Path, *, dtype: torch.dtype | None = None, quantization: Request = None, devices: int = 1,
    layers: int | None = None, platform: Platform | None = None,
) -> Model:  # fmt: skip
    """The model of a config.json on meta: one device's share of it, quantized as its checkpoint is or as asked for.

    Raises ValueError for a size that cannot be divided, and for what loading it would raise.
    """
    config = loader.load_config(folder)
    if layers is not None:
        config = _first(layers, config)
    how = decide(quantization, folder, config)
    if devices > 1:
        config = share(config, devices)
    plain = {name: value for name, value in config.items() if name not in ("quantization_config", "compression_config")}
    dtype = dtype or loader.config_dtype(config) or torch.float32
    module = models.build(plain, dtype=dtype, device="meta")
    if how is not None:
        prefix = stock.PREFIX if isinstance(module, stock.StockModel) else ""
        _quantize(module, apply.linears(module, how, prefix), dtype, platform)
    if devices > 1:
        cut_of(module)
    return Model(loader.ready(module), config, how, dtype, devices)


def _first(layers: int, config: dict[str, Any]) -> dict[str, Any]:
    count = integer(config, "num_hidden_layers", layers)
    if not 1 <= layers <= count:
        raise ValueError(f"--layers {layers}: the model has {count}")
    kinds = {"layer_types": config["layer_types"][:layers]} if isinstance(config.get("layer_types"), list) else {}
    return {**config, "num_hidden_layers": layers, **kinds}


def share(config: Mapping[str, Any], devices: int) -> dict[str, Any]:
    """The config of one of so many devices: heads, hidden units of MLPs and vocabulary are divided, the width is not.

    Raises ValueError that names what does not divide.
    """
    if devices < 1:
        raise ValueError(f"{devices} devices: expected at least 1")
    absent = [name for name in ("num_attention_heads", "vocab_size") if name not in config]
    if absent:
        raise ValueError(f"cannot cut this model over {devices} devices: its config.json has no {absent[0]}")
    heads = integer(dict(config), "num_attention_heads")
    found = {**config, "num_key_value_heads": config.get("num_key_value_heads") or heads}
    for name in DIVIDED:
        size = found.get(name)
        if isinstance(size, int) and size % devices:
            raise ValueError(f"cannot cut this model over {devices} devices: {name} is {size}, no multiple of {devices}")
        if isinstance(size, int):
            found[name] = size // devices
    found.setdefault("head_dim", config.get("head_dim") or integer(dict(config), "hidden_size", 0) // heads)
    return found


def _quantize(
    module: nn.Module, methods: Mapping[str, LinearMethod], dtype: torch.dtype, platform: Platform | None
) -> None:
    """Layers of the tensors that each scheme ends with, without values; siblings share a scale of a whole tensor."""
    fnuz = platform is not None and platform.arch == "gfx942"
    for group in apply.groups(methods):
        shared: dict[str, nn.Parameter] = {}
        for name, method in group:
            scheme: Any = method.scheme
            if fnuz and isinstance(scheme, Fp8 | Fp8Block):
                scheme = replace(scheme, dtype=torch.float8_e4m3fnuz)
            old: Any = module.get_submodule(name)
            layer = QuantizedLinear(old.in_features, old.out_features, old.bias, LinearMethod(scheme))
            layer.method.create_weights(layer, dtype, "meta")
            for scale in ("weight_scale", "input_scale"):
                parameter = layer._parameters.get(scale)
                if parameter is not None and parameter.shape == (1,):
                    layer.register_parameter(scale, shared.setdefault(f"{scale} {scheme}", parameter))
            apply.replace(module, name, layer)


def cut_of(module: nn.Module) -> dict[str, str]:
    """How each kind of parameter is cut: by the table beside the model, or transformers' own plan.

    Raises ValueError for a model that has neither.
    """
    if isinstance(module, stock.StockModel):
        plan = getattr(module.config, "base_model_tp_plan", None) or {}
        found = {path.rpartition(".")[2]: how for path, how in plan.items()}
        found |= {"embed_tokens": "vocab", "lm_head": "vocab"}  # which it leaves whole
    else:
        found = getattr(sys.modules[type(module).__module__], "SHARD", {})
    if not any(how in ROWS for how in found.values()):
        raise ValueError(f"{type(module).__name__} does not say how it is cut over devices")
    return dict(found)


def plan(
    model: Model, platform: Platform, load: Load, *, longest: int | None = None, options: Mapping[str, Any] | None = None,
    table: Table | None = None, program: Program | None = None,
) -> Plan:  # fmt: skip
    """The plan of a step of this load on this platform.

    longest   tokens of the longest sequence; None: what the model was made for
    table     of efficiencies; None: the one that ships for the machine, if one does
    program   the model compiled by `compiled`; None: it is compiled here
    """
    program = program or compiled(model, platform, options)
    table = table or table_for(platform)
    predicted = predict(program.report, platform, load.sizes, table)
    weights = str(model.dtype).removeprefix("torch.") if model.how is None else model.how.method
    name = type(getattr(model.module, "hf_model", model.module)).__name__
    return Plan(
        name, platform.name, platform.arch, model.devices, weights, load,
        program.report.num_layers, lines(predicted, program.report.num_layers), _memory(model, program, platform, longest),
        _communication(model, load) if model.devices > 1 else None, _lower_bound(platform, table, predicted),
        table.source if table else "", _notes(program.report, model),
    )  # fmt: skip


def compiled(
    model: Model, platform: Platform, options: Mapping[str, Any] | None = None,
    observers: Sequence[Callable[[str, GraphModule], None]] = (),
) -> Program:  # fmt: skip
    """The model as the runtime would have it there; nothing is built, and the cache is not asked."""
    glue = "eager" if platform.is_cpu else "auto"
    options = {"glue": glue, **(options or {}), "cache": False}
    return compile_model(model.module, options=options, platform=platform, observers=observers)


class Lowered:
    """A model compiled for this machine, to be timed: its program, and its graph for each range of token counts."""

    def __init__(self, model: Model, options: Mapping[str, Any] | None = None, platform: Platform | None = None):
        self.model, self.platform = model, with_peaks(platform or Platform.detect(), model.dtype)
        self.graphs: list[GraphModule] = []
        self.program = compiled(model, self.platform, options, [self._take])
        self.fuses = any(glue.how == "inductor" for glue in self.program.report.glue)

    def _take(self, name: str, gm: GraphModule) -> None:
        if name == "lower":
            self.graphs.append(gm)

    def time(self, load: Load, table: Table | None = None) -> tuple[list[Predicted], dict[int, float]]:
        """Each kernel of a step of this load, and the seconds of it as measured, by its number."""
        predicted = predict(self.program.report, self.platform, load.sizes, table)
        return predicted, dict(enumerate(self.time_some(load, predicted)))

    def time_some(self, load: Load, wanted: Sequence[Predicted]) -> list[float]:
        """The seconds of these kernels in a step of this load."""
        gm = next(gm for gm in self.graphs if load.tokens in gm.meta["tokens"])
        bench = Bench(gm, self.program.specs, Sizes(**load.sizes), torch.device(self.platform.device))
        return [bench.seconds(p.nodes, self._inline if self.fuses else None) for p in wanted]

    def _inline(self, piece: GraphModule) -> Callable[..., Any]:
        found: Callable[..., Any] = torch.compile(piece, dynamic=False)
        return found


def measured(
    model: Model, load: Load, *, longest: int | None = None, options: Mapping[str, Any] | None = None,
    table: Table | None = None,
) -> Plan:  # fmt: skip
    """The plan of a step on this machine, with the time of each kernel as it is measured here."""
    lowered = Lowered(model, options)
    table = table or table_for(lowered.platform)
    found = plan(model, lowered.platform, load, longest=longest, table=table, program=lowered.program)
    predicted, timed = lowered.time(load, table)
    return replace(found, lines=lines(predicted, found.layers, timed))


def lines(predicted: Sequence[Predicted], layers: int, timed: Mapping[int, float] | None = None) -> list[Line]:
    """What is alike in all of so many layers is one line. timed: number of a prediction -> seconds measured."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, p in enumerate(predicted):
        key = (p.op, p.kernel, collapsed(p.module_path), p.bytes, p.flops, p.layer is not None)
        alike.setdefault(key, []).append(i)
    found = []
    for (op, kernel, path, moved, flops, inside), numbers in alike.items():
        p = predicted[numbers[0]]
        # What joins the end of a layer with the beginning of the next lies in neither.
        inside = inside or len(numbers) >= max(layers, 2)
        seconds = sum(timed[i] for i in numbers) / len(numbers) if timed else None
        found.append(Line(op, kernel, path, len(numbers), inside, moved, flops, p.least, p.seconds, p.measured, seconds))
    return found


def _lower_bound(platform: Platform, table: Table | None, predicted: Sequence[Predicted]) -> str:
    if platform.bandwidth is None and table is None:
        return f"nothing is known of the bandwidth of {platform.name}: measure it (--measure, on that machine)"
    if table is None:
        return f"lower bound: no kernel was measured on {platform.name}"
    absent = list(dict.fromkeys(f"{p.op} by {p.kernel}" for p in predicted if not p.measured))
    return f"lower bound for what was not measured: {', '.join(absent)}" if absent else ""


def _notes(report: Report, model: Model) -> list[str]:
    notes = list(model.how.notes) if model.how else []
    of_glue = {glue.note for glue in report.glue}  # nothing is built here
    return notes + [note for note in report.notes if note not in of_glue]


def _memory(model: Model, program: Program, platform: Platform, longest: int | None) -> Memory:
    held = {id(tensor): tensor for tensor in (*model.module.parameters(), *model.module.buffers())}
    weights = sum(tensor.nbytes for tensor in held.values())
    copies = program.copied_bytes
    made_for = model.config.get("max_position_embeddings")
    length = longest or (made_for if isinstance(made_for, int) else 4096)
    room = int(platform.memory * (CPU_SHARE if platform.is_cpu else UTILIZATION - GRAPH_SHARE))
    cache = max(room - (0 if platform.is_cpu else weights + copies), 0)
    per_token = sum(spec.bytes_per_token() for spec in program.specs)
    per_sequence = sum(spec.bytes_per_sequence() for spec in program.specs)
    if not platform.memory or not program.specs:
        return Memory(platform.memory, weights, copies, 0, per_token, length, None, None, per_sequence)
    fits, that_fits = _sequences(program.specs, cache, length)
    return Memory(platform.memory, weights, copies, cache, per_token, length, fits, that_fits, per_sequence)


def _sequences(specs: Sequence[StateSpec], room: int, length: int) -> tuple[int, int]:
    """How many sequences of this length fit, and the length of the longest that fits."""
    per_sequence = sum(spec.bytes_per_sequence() for spec in specs)
    if not per_sequence:
        return _in_blocks(specs, room, length)
    # State that is kept per sequence leaves the less room for blocks the more sequences there are.
    left = room - SPARE_SLOTS * per_sequence
    most = left // per_sequence
    if most < 1:
        return 0, 0
    fits = bisect_left(range(1, most + 1), True, key=lambda n: _in_blocks(specs, left - n * per_sequence, length)[0] < n)
    return fits, length if fits else _in_blocks(specs, left - per_sequence, length)[1]


def _in_blocks(specs: Sequence[StateSpec], room: int, length: int) -> tuple[int, int]:
    """The same, of what is kept per token."""
    groups, block_size = groups_of(specs), block_size_of(specs) or length
    if not groups:
        return ENOUGH, length
    sizes = {"groups": groups, "block_size": block_size, "available": room, "longest": length,
             "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS}  # fmt: skip
    try:
        found = capacity(**sizes, max_num_seqs=ENOUGH, max_model_len=length)  # type: ignore[arg-type]
    except ValueError:
        try:
            return 0, capacity(**sizes, max_num_seqs=ENOUGH).max_model_len  # type: ignore[arg-type]
        except ValueError:
            return 0, 0
    each = [blocks_of_one(length, window, block_size, MAX_NUM_BATCHED_TOKENS) for _, window in groups]
    return min(count // of_one for count, of_one in zip(found.num_blocks, each, strict=True)), length


def _communication(model: Model, load: Load) -> Communication:
    """All-reduces behind what is cut by rows and behind the embedding; a gather of the logits."""
    cut = cut_of(model.module)
    width, size = model.config["hidden_size"], model.dtype.itemsize
    paths = {re.sub(r"\.experts\.\d+(?=\.)", ".experts", name) for name, _ in model.module.named_modules()}
    leaves = [path.rpartition(".")[2] for path in paths]
    rows = sum(cut.get(leaf) in ROWS for leaf in leaves)
    tables = [leaf for leaf in leaves if cut.get(leaf) in VOCABULARY]
    reduces = rows + sum("embed" in leaf for leaf in tables)
    gathers = len(tables) - sum("embed" in leaf for leaf in tables)
    message = load.tokens * width * size
    n = model.devices
    logits = load.sequences * model.config["vocab_size"] * size  # of one device
    sent = reduces * 2 * (n - 1) * message // n + gathers * (n - 1) * logits
    return Communication(reduces, gathers, message, sent)
