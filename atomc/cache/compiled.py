"""A compiled graph as it runs: found in the cache or just made, what is appended to its calls, and by what it is chosen.

Nothing here traces or compiles; a start that finds everything in the cache imports no more than this.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from atomc.cache.artifact import Plain, made_of, resolved
from atomc.op import Extra
from atomc.ops.inputs import StateInput, StepInput
from atomc.ops.state import StateSpec
from atomc.profiler_ranges import profiled
from atomc.weight_inputs import Wanted, WeightInputs


@dataclass
class Compiled:
    """One graph after all stages. `call` takes the graph's inputs, then `packed`, then the state inputs, then `extras`.

    inputs   the names of all of these but the extras
    step_inputs   name -> what of a step the runtime passes
    state_inputs  name -> what of the state the runtime passes
    read     those of them that some range reads itself, not only in what a kernel prepared
    packed   name -> the names of the parameters that the caller packs
    plain    how to make plain data of it
    """

    call: Callable[..., Any]
    inputs: list[str]
    packed: dict[str, tuple[str, ...]]
    step_inputs: dict[str, StepInput] = field(default_factory=dict)
    state_inputs: dict[str, StateInput] = field(default_factory=dict)
    state: list[StateSpec] = field(default_factory=list)
    extras: list[Extra] = field(default_factory=list)
    syncing: list[str] = field(default_factory=list)  # kernels that no CUDA graph can hold
    read: list[str] = field(default_factory=list)
    plain: Callable[[], Plain] | None = None


@dataclass(frozen=True)
class Dispatch:
    """How a call's number of tokens is told from its arguments, and where each range begins.

    where   per symbol: the number of an argument, and the dimension of it; None for the argument itself
    count   the number of tokens, as a Python expression of the symbols
    """

    starts: tuple[int, ...]
    symbols: tuple[str, ...]
    where: tuple[tuple[int, int | None], ...]
    count: str

    def over(self, callables: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        """One callable that looks at the number of tokens and calls the one that was lowered for it."""
        count = eval(f"lambda {', '.join(self.symbols)}: {self.count}", {"__builtins__": {}})

        def call(*args: Any) -> Any:
            number = count(*[args[i] if dim is None else args[i].shape[dim] for i, dim in self.where])
            chosen = max((k for k, start in enumerate(self.starts) if start <= number), default=0)
            return callables[chosen](*args)

        return call


def restored(plain: Plain) -> Compiled:
    """A graph that was made plain data, after all stages again."""
    chosen_by = Dispatch(**plain["dispatch"]) if plain["dispatch"] else None

    def made(named: bool) -> Callable[..., Any]:
        parts = [made_of(part, named) for part in plain["functions"]]
        return assembled(parts, plain["extras_of"], chosen_by, plain["device"])

    call = profiled(made(named=False), lambda: made(named=True))
    extras = [Extra(**{**extra, "function": resolved(extra["function"])}) for extra in plain["extras"]]
    state = [StateSpec(**spec) for spec in plain["state"]]
    step_inputs = {name: StepInput(**given) for name, given in plain["step_inputs"].items()}
    state_inputs = {name: StateInput(**given) for name, given in plain["state_inputs"].items()}
    return Compiled(call, plain["inputs"], plain["packed"], step_inputs, state_inputs, state, extras, plain["syncing"],
                    plain["read"])  # fmt: skip


def assembled(
    calls: Sequence[Callable[..., Any]], extras_of: Sequence[tuple[int, int, int]], chosen_by: Dispatch | None,
    device: str | None,
) -> Callable[..., Any]:  # fmt: skip
    """One callable of those for each range, run on the device. extras_of: (number of inputs, first extra, number)."""
    if chosen_by is not None:
        calls = [_taking(call, *where) for call, where in zip(calls, extras_of, strict=True)]
    call = chosen_by.over(calls) if chosen_by is not None else calls[0]
    return _on_its_device(device, call)


def _on_its_device(device: str | None, call: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current GPU: make it the one that the graph's tensors lie on."""
    if device is None or torch.cuda.device_count() < 2:
        return call

    def guarded(*args: Any) -> Any:
        with torch.cuda.device(device):
            return call(*args)

    return guarded


def _taking(call: Callable[..., Any], inputs: int, start: int, count: int) -> Callable[..., Any]:
    """The callable of one range sees only its own extras."""
    return lambda *args: call(*args[:inputs], *args[inputs + start:inputs + start + count])


def with_weights(
    compiled: Compiled, weights: WeightInputs, example_inputs: Sequence[Any], notes: list[str]
) -> Callable[..., Any]:
    """Append what the graph reads of weights beside its inputs to each call, whoever changed them since the last one."""
    plans = [extra for extra in compiled.extras if extra.kind != "prepared"]
    if plans:
        raise ValueError(f"a kernel's {plans[0].kind} exists in the runtime only")
    if not weights.groups and not weights.wanted:
        return compiled.call
    if weights.wanted:
        weights.take(example_inputs)
        notes.append(weights.note())
    return lambda *args: compiled.call(*args, *weights.follow(args))


def weight_inputs(compiled: Compiled, notes: list[str]) -> WeightInputs:
    """What the graph reads of weights beside its inputs, by numbers of these."""
    number = {name: i for i, name in enumerate(compiled.inputs)}
    wanted = []
    for extra in (extra for extra in compiled.extras if extra.kind == "prepared"):
        given = tuple(None if name is None else number[name] for name in extra.weights)
        names = [name for name in extra.weights if name is not None]
        parts = tuple(number[part] for name in names for part in compiled.packed.get(name, (name,)))
        wanted.append(Wanted(given, parts, extra.function))
    groups = {number[name]: [number[part] for part in parts] for name, parts in compiled.packed.items()}
    return WeightInputs(groups, wanted, {number[name] for name in compiled.read}, notes)
