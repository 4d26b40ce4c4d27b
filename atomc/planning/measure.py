"""Times each distinct kernel of a step on this machine, on random inputs of the same sizes, without
the model's weights.

A kernel is called many times over copies of its inputs that together exceed the caches: in a CUDA
graph on a GPU, one by one on a CPU.
"""

import math
import operator
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument

from atomc.compiler.partition import structural_hash
from atomc.graph.canonical import value
from atomc.graph.expressions import Size, expression
from atomc.graph.node_record import record_of, step_input
from atomc.graph.step_symbols import C, R, S, T, symbols_of
from atomc.graph.views import ZERO_COST, name_of
from atomc.ops.inputs import StateInput, StepInput
from atomc.ops.op import op_of
from atomc.ops.state import GroupStep, StateSpec, Step, block_size_of, groups_of
from atomc.planning.plan_report import Workload
from atomc.platform import Platform
from atomc.torch_compat.core import GraphFunction

# Bytes: several times the L2 of a GPU, and more than the caches of a CPU core.
ROTATED_BYTES = {"cuda": 160 * 10**6, "cpu": 64 * 10**6}
MAX_COPIES = 64
REPLAYS = 9
CPU_SECONDS = 0.05  # for each kernel, at least
LONGEST_PRODUCT = 0.25  # seconds
PEAKS = 4  # measurements of a peak, of which the best counts: other load on the machine slows it


class KernelTimer:
    """Times pieces of one lowered graph, equal pieces once.

    gm      the graph lowered for the range of token counts of the step
    specs   of the program's state
    device  of this machine; the graph may have been traced on meta
    """

    def __init__(
        self, gm: GraphModule, specs: Sequence[StateSpec], load: Workload, device: torch.device
    ):
        self.gm, self.specs, self.load, self.device = gm, specs, load, device
        self.nodes = {node.name: node for node in gm.graph.nodes}
        self.known: dict[Hashable, float] = {}
        self.block_size = block_size_of(specs) or load.context
        self.columns = -(-load.context // self.block_size)
        self.symbols = self._symbols()
        self.numbers: dict[sympy.Expr, int] = {}  # a formula occurs in each copy of the inputs
        self.step = self._step()
        self.generator = torch.Generator(device).manual_seed(0)

    def seconds(
        self,
        names: Iterable[str],
        inline: Callable[[GraphModule], GraphFunction] | None = None,
    ) -> float:
        """Seconds of one call of these nodes. inline: the compiler for nodes without a kernel."""
        group = [self.nodes[name] for name in names]
        piece, inputs = self._piece(group)
        key = structural_hash(piece)
        if key not in self.known:
            args = self._inputs(inputs)
            call = (
                inline(piece)
                if inline and not any(record_of(node).kernel for node in group)
                else piece.forward
            )
            sets = [args] + [self._inputs(inputs) for _ in range(self._copies(args) - 1)]
            self.known[key] = time_call(call, sets, self.device, synced=self.load.tokens > 64)
        return self.known[key]

    def _copies(self, args: Sequence[Argument]) -> int:
        size = sum(x.nbytes for x in _tensors(args))
        return min(MAX_COPIES, max(2, math.ceil(ROTATED_BYTES[self.device.type] / max(size, 1))))

    def _piece(self, group: Sequence[Node]) -> tuple[GraphModule, list[Node]]:
        """(a graph of these nodes and of views of inputs, the nodes whose results it reads)."""
        wanted = set(group)
        for node in reversed(self.gm.graph.nodes):
            if node in wanted:
                wanted |= {source for source in node.all_input_nodes if _belongs_to_reader(source)}
        graph, copies, inputs = Graph(), dict[Node, Node](), list[Node]()
        for node in self.gm.graph.nodes:
            if node not in wanted:
                continue
            for source in node.all_input_nodes:
                if source not in copies:
                    copies[source] = graph.placeholder(source.name)
                    copies[source].meta = dict(source.meta)
                    inputs.append(source)
            copy = copies[node] = graph.node_copy(node, copies.__getitem__)
            copy.args, copy.kwargs = torch.fx.node.map_aggregate(
                (copy.args, copy.kwargs), self._moved_here
            )
        graph.output(tuple(copies[node] for node in group))
        return GraphModule(torch.nn.Module(), graph), inputs

    def _moved_here(self, argument: Argument) -> Argument:
        return self.device if isinstance(argument, torch.device) else argument

    # Made-up inputs

    def _symbols(self) -> dict[sympy.Symbol, int]:
        """Symbol of the graph -> its value in this step."""
        load = self.load
        named = {T: load.tokens, S: load.sequences, R: load.sequences, C: load.context}
        values = {
            symbol: int(size.subs(named)) for symbol, size in symbols_of(self.gm.graph).items()
        }
        for node in self.gm.graph.find_nodes(op="placeholder"):
            step_field = step_input(node)
            if step_field is not None and step_field.field == "block_tables":
                values.setdefault(expression(value(node).shape[1]), self.columns)
            elif (spec := self._spec(node)) is not None:
                leading = spec.leading(
                    load.sequences * self.columns, self.block_size, load.sequences
                )
                for size, number in zip(value(node).shape, leading, strict=False):
                    if isinstance(size, torch.SymInt):
                        values.setdefault(expression(size), number)
        return values

    def _spec(self, node: Node) -> StateSpec | None:
        """Of the state that the runtime allocates for this input."""
        match record_of(node).input:
            case StateInput(number, is_scale=False):
                return self.specs[number]
        return None

    def _number(self, size: Size) -> int:
        formula = expression(size)
        if formula not in self.numbers:
            number = formula.subs(self.symbols)
            if number.free_symbols:
                raise ValueError(
                    f"size {number} is unknown in a step: only models compiled for the runtime can "
                    "be timed"
                )
            self.numbers[formula] = int(number)
        return self.numbers[formula]

    def _step(self) -> Step:
        """A step at the end of the context of its sequences, whose blocks are in random order."""
        T, S, C = self.load.tokens, self.load.sequences, self.load.context
        new = [T // S + (s < T % S) for s in range(S)]  # tokens of each sequence
        tables = torch.randperm(S * self.columns, generator=torch.Generator().manual_seed(0)).view(
            S, -1
        )
        positions = [range(C - count, C) for count in new]
        slots = [
            int(tables[s, p // self.block_size]) * self.block_size + p % self.block_size
            for s in range(S)
            for p in positions[s]
        ]
        starts = torch.tensor([0, *new]).cumsum(0)
        here = self.device
        return Step(
            torch.zeros(T, dtype=torch.int64, device=here),
            torch.tensor([p for run in positions for p in run], device=here),
            starts.int().to(here),
            torch.full((S,), C, dtype=torch.int32, device=here),
            (starts[1:] - 1).to(here),
            tuple(
                GroupStep(torch.tensor(slots, device=here), tables.int().to(here))
                for _ in groups_of(self.specs)
            ),
            torch.arange(S, device=here),
        )

    def _inputs(self, nodes: Sequence[Node]) -> list[Argument]:
        return [self._input(node) for node in nodes]

    def _input(self, node: Node) -> Argument:
        if node.op == "placeholder" and (passed := self._step_value(node)) is not None:
            return passed
        if node.op == "get_attr":
            constant: Tensor = operator.attrgetter(str(node.target))(self.gm)
            return self._random(constant) if constant.is_meta else constant.to(self.device)
        return self._like(value(node))

    def _step_value(self, node: Node) -> Argument:
        """An input that the runtime passes; None for other inputs, scales and weights."""
        match record_of(node).input:
            case StepInput() as step_field:
                return step_field.of(self.step)
            case StateInput(number, role, is_scale=False):
                slots = self.load.sequences
                state = self.specs[number].allocate(
                    slots * self.columns, self.block_size, self.device, slots=slots
                )[role]
                return state.copy_(self._random(state))
        if (extra := record_of(node).extra) is not None:
            if extra.kind == "plan":
                plan: tuple[Tensor, ...] = extra.function(self.step, self.specs)
                return plan
            weights = [
                None if weight is None else self._like(value(self.nodes[weight]))
                for weight in extra.weights
            ]
            tensors: tuple[Tensor, ...] = extra.function(*weights).tensors
            return tensors
        return None

    def _like(self, example: Argument) -> Argument:
        if isinstance(example, tuple | list):
            return type(example)(self._like(item) for item in example)
        if isinstance(example, torch.SymInt):
            return self._number(example)
        if not isinstance(example, Tensor):
            return example
        return self._random(example)

    def _random(self, like: Tensor) -> Tensor:
        """Random values of this shape, strides and dtype; zeros for integers, maybe indices."""
        shape, strides = (
            [self._number(size) for size in sizes] for sizes in (like.shape, like.stride())
        )
        tensor = torch.empty_strided(shape, strides, dtype=like.dtype, device=self.device)
        if not like.dtype.is_floating_point:
            return tensor.zero_()
        if like.dtype.itemsize > 1:
            return tensor.normal_(generator=self.generator)
        return tensor.copy_(
            torch.empty(shape, device=self.device).normal_(generator=self.generator)
        )


def _belongs_to_reader(node: Node) -> bool:
    """Whether a node is timed as part of its reader: a view, or a workspace or size that lowering
    added for it.
    """
    return node.op == "call_function" and (
        "val" not in node.meta or (not record_of(node).op and _is_view(node))
    )


def _is_view(node: Node) -> bool:
    return op_of(node.target) is None and name_of(node) in ZERO_COST - {"empty", "lift_fresh_copy"}


def _tensors(argument: Argument) -> Iterable[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, tuple | list):
        for item in argument:
            yield from _tensors(item)


def time_call(
    call: GraphFunction,
    sets: Sequence[Sequence[Argument]],
    device: torch.device,
    synced: bool = False,
) -> float:
    """Median seconds of one call, rotating through the sets of inputs. synced: calls are long, so
    that few suffice.
    """
    with torch.no_grad():
        return (
            _time_on_gpu(call, sets, 8 if synced else 32)
            if device.type == "cuda"
            else _time_on_cpu(call, sets)
        )


def _time_on_cpu(call: GraphFunction, sets: Sequence[Sequence[Argument]]) -> float:
    call(*sets[0])
    times: list[float] = []
    while len(times) < 3 or sum(times) < CPU_SECONDS:
        args = sets[len(times) % len(sets)]
        start = time.perf_counter()
        call(*args)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _time_on_gpu(call: GraphFunction, sets: Sequence[Sequence[Argument]], calls: int) -> float:
    rounds = -(-calls // len(sets))
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(*sets[0])
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                for args in sets:
                    call(*args)
        times = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
    return float(statistics.median(times[1:])) / (rounds * len(sets))


def measure_peaks(platform: Platform, dtype: torch.dtype) -> Platform:
    """The platform with a bandwidth and a peak, measured here if it has no data sheet."""
    if platform.bandwidth and platform.flops:
        return platform
    device = torch.device(platform.device)
    return replace(
        platform,
        bandwidth=platform.bandwidth or copy_bandwidth(device),
        flops=platform.flops or _product_rate(dtype, device),
    )


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of the fastest of a few copies beyond the caches."""
    source = torch.empty(ROTATED_BYTES[device.type] * 2, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copy = min(time_call(target.copy_, [[source]], device, synced=True) for _ in range(PEAKS))
    return 2 * source.nbytes / copy


def _product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of the best of products of square matrices; a large one counts only where it does not
    take long: 1,024 rows in bf16 take 2.4 s on a core of a Zen 3, which has no instructions for it.
    """
    sides = (4096,) if device.type == "cuda" else (256, 1024)
    best = 0.0
    for side in sides:
        flops = 2.0 * side**3
        if best and flops / best > LONGEST_PRODUCT:
            break
        factor = torch.randn(side, side, dtype=dtype, device=device)
        taken = (time_call(torch.mm, [[factor, factor]], device, synced=True) for _ in range(PEAKS))
        best = max(best, flops / min(taken))
    return best
