"""A compiled graph at run time: its callable, the arguments appended to each call, and the choice
of a token range.

This module neither traces nor compiles: a start that finds everything in the cache imports nothing
that does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import TypedDict

import torch
from torch import Tensor

from atomc.cache.artifact import (
    Fields,
    FunctionData,
    deserialize,
    reference,
    resolve,
)
from atomc.graph.profiler_ranges import profiled
from atomc.ops.inputs import ExpertCounts, GraphInput, LoraWeights, StateInput, StepInput
from atomc.ops.op import Extra
from atomc.ops.state import StateSpec
from atomc.torch_compat.core import GraphFunction, Input, Outputs
from atomc.weights.inputs import PreparedInput, WeightInputs
from atomc.weights.packed import PackedInput

_INPUTS: dict[str, Callable[..., GraphInput]] = {
    kind.__name__: kind for kind in (StepInput, StateInput, ExpertCounts, LoraWeights)
}


@dataclass(frozen=True)
class Dispatch:
    """How the number of tokens of a call is computed from its arguments.

    starts  the first number of tokens of each range
    where   per symbol: the number of an argument and the dimension whose size it is; None for the
            argument itself
    count   the number of tokens, as a Python expression of the symbols
    """

    starts: tuple[int, ...]
    symbols: tuple[str, ...]
    where: tuple[tuple[int, int | None], ...]
    count: str

    def select_from(self, callables: Sequence[GraphFunction]) -> GraphFunction:
        """A callable that computes the number of tokens and calls the function of that range."""
        count = eval(f"lambda {', '.join(self.symbols)}: {self.count}", {"__builtins__": {}})

        def size(argument: Input, dim: int | None) -> Input:
            return (
                argument.shape[dim]
                if isinstance(argument, Tensor) and dim is not None
                else argument
            )

        def call(*args: Input) -> Outputs:
            number = count(*[size(args[i], dim) for i, dim in self.where])
            number_of_range = max(
                (k for k, start in enumerate(self.starts) if start <= number), default=0
            )
            return callables[number_of_range](*args)

        return call


@dataclass(frozen=True)
class Ranges:
    """How the functions of all ranges of token counts become one callable.

    num_inputs  of the graph, which all functions take; their extras follow, range after range
    num_extras  of each range
    dispatch    chooses the range; None: there is one
    device      the GPU of the graph's inputs, None on the CPU
    """

    num_inputs: int
    num_extras: tuple[int, ...]
    dispatch: Dispatch | None
    device: str | None

    def combine(self, calls: Sequence[GraphFunction]) -> GraphFunction:
        """One callable of those for each range, run on the device."""
        call = calls[0]
        if self.dispatch is not None:
            bounds = pairwise(accumulate(self.num_extras, initial=self.num_inputs))
            pairs = zip(calls, bounds, strict=True)
            call = self.dispatch.select_from([self._with_extras(*pair) for pair in pairs])
        return _guard_device(self.device, call)

    def _with_extras(self, call: GraphFunction, bounds: tuple[int, int]) -> GraphFunction:
        """Pass only the extras of its own range to a callable."""
        return lambda *args: call(*args[: self.num_inputs], *args[slice(*bounds)])


class CompiledData(TypedDict):
    """Plain data of a compiled graph: its fields, and a function per range."""

    inputs: list[str]
    packed: dict[str, tuple[tuple[str, ...], int]]
    syncing: list[str]
    read: list[str]
    state: list[Fields]
    runtime_inputs: dict[str, tuple[str, Fields]]
    extras: list[Fields]
    functions: Sequence[FunctionData]
    ranges: Fields


@dataclass
class Compiled:
    """One graph after all stages. `call` takes the graph's inputs, then `packed`, then the state
    inputs, then `extras`.

    inputs   the names of all of these except the extras
    packed   name -> the parameters that the caller packs
    runtime_inputs  name -> what the runtime passes, or holds for the graph
    syncing  kernels that cannot be captured in a CUDA graph
    read     the inputs that some range reads directly, not only through a prepared weight
    ranges   of token counts
    plain    converts the function of each range to plain data; None: it is of the cache
    """

    call: GraphFunction
    inputs: list[str]
    packed: dict[str, PackedInput]
    runtime_inputs: dict[str, GraphInput]
    state: list[StateSpec]
    extras: list[Extra]
    syncing: list[str]
    read: list[str]
    ranges: Ranges
    plain: Callable[[], Sequence[FunctionData]] | None = None


def serialize_compiled(compiled: Compiled, functions: Sequence[FunctionData]) -> CompiledData:
    """Raises Uncacheable if a function of an extra cannot be found again by name."""
    return {
        "inputs": compiled.inputs,
        "packed": {name: (each.parts, each.zero_rows) for name, each in compiled.packed.items()},
        "syncing": compiled.syncing,
        "read": compiled.read,
        "state": [spec.to_plain() for spec in compiled.state],
        "runtime_inputs": {
            name: (type(x).__name__, asdict(x)) for name, x in compiled.runtime_inputs.items()
        },
        "extras": [
            {**vars(extra), "function": reference(extra.function)} for extra in compiled.extras
        ],
        "functions": functions,
        "ranges": asdict(compiled.ranges),
    }


def deserialize_compiled(plain: CompiledData) -> Compiled:
    """The compiled graph of its plain data."""
    dispatch = plain["ranges"]["dispatch"]
    ranges = Ranges(**plain["ranges"] | {"dispatch": dispatch and Dispatch(**dispatch)})

    def made(named: bool) -> GraphFunction:
        return ranges.combine([deserialize(part, named) for part in plain["functions"]])

    extras = [
        Extra(**{**extra, "function": resolve(extra["function"])}) for extra in plain["extras"]
    ]
    return Compiled(
        profiled(made(named=False), lambda: made(named=True)),
        plain["inputs"],
        {name: PackedInput(*packed) for name, packed in plain["packed"].items()},
        {name: _INPUTS[kind](**x) for name, (kind, x) in plain["runtime_inputs"].items()},
        [StateSpec.of_plain(spec) for spec in plain["state"]],
        extras,
        plain["syncing"],
        plain["read"],
        ranges,
    )


def _guard_device(device: str | None, call: GraphFunction) -> GraphFunction:
    """Make the GPU of the graph's tensors the current one, because Triton launches on the current
    GPU.
    """
    if device is None or torch.cuda.device_count() < 2:
        return call

    def guarded(*args: Input) -> Outputs:
        with torch.cuda.device(device):
            return call(*args)

    return guarded


def append_weights(
    compiled: Compiled, weights: WeightInputs, example_inputs: Sequence[Input], notes: list[str]
) -> GraphFunction:
    """Append the packed and prepared weights to each call, refreshed if the user changed a weight
    since the last call.
    """
    plans = [extra for extra in compiled.extras if extra.kind != "prepared"]
    if plans:
        raise ValueError(f"a kernel needs a {plans[0].kind}, which exists only in the runtime")
    if not weights.groups and not weights.prepared_inputs:
        return compiled.call
    if weights.prepared_inputs:
        weights.materialize(example_inputs)
        notes.append(weights.note())
    return lambda *args: compiled.call(*args, *weights.refresh(args))


def _prepared_input(
    extra: Extra, number: Mapping[str, int], packed: Mapping[str, PackedInput]
) -> PreparedInput:
    """A prepared weight, of inputs and packed weights of these numbers."""
    weights = tuple(None if name is None else number[name] for name in extra.weights)
    names = [name for name in extra.weights if name is not None]
    consists_of = [packed.get(name, PackedInput((name,))) for name in names]
    parts = tuple(number[part] for one in consists_of for part in one.parts)
    return PreparedInput(
        weights, parts, extra.function, extra.attributes, extra.bytes, extra.keeps_original
    )


def weight_inputs(compiled: Compiled, notes: list[str]) -> WeightInputs:
    """The packed and prepared weights that the graph reads in addition to its inputs."""
    number = {name: i for i, name in enumerate(compiled.inputs)}
    wanted = [
        _prepared_input(extra, number, compiled.packed)
        for extra in compiled.extras
        if extra.kind == "prepared"
    ]
    groups = {
        number[name]: [number[part] for part in packed.parts]
        for name, packed in compiled.packed.items()
    }
    zero_rows = {number[name]: packed.zero_rows for name, packed in compiled.packed.items()}
    read = {number[name] for name in compiled.read}
    return WeightInputs(groups, wanted, read, notes, zero_rows)
