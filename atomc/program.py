"""A model compiled for the runtime: state is in a paged cache, and calls bypass Dynamo's guards.

The program takes a Step per call and holds the parameters, which Dynamo names by their source and
the cache by their path. Weights that it owns are read once. For a user's model, `check` replaces
the guards: it compares the addresses of parameters. A cached model is not traced, and no module for
tracing is imported.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from atomc.cache.compiled import weight_inputs
from atomc.cache.model_cache import CompiledModel, ModelCache
from atomc.errors import RunError
from atomc.files.json_types import JSONMapping
from atomc.ops.inputs import (
    TEXT,
    ExpertCounts,
    LoraWeights,
    ModelInputs,
    StateInput,
    StepInput,
)
from atomc.ops.state import StateSpec, Step
from atomc.options import Options
from atomc.platform import Platform
from atomc.replay.repeatable import repeats_steps
from atomc.replay.repeated import Repeated
from atomc.report import contract
from atomc.report.page_file import publish
from atomc.report.report import Report, keep
from atomc.torch_compat.core import GraphFunction, Input
from atomc.weights.freed import with_freed_parameters
from atomc.weights.inputs import WeightInputs, bytes_of
from atomc.weights.lora import LoraLayers

if TYPE_CHECKING:
    from torch.fx import GraphModule


# A weight that the graph reads besides parameters: packed, or prepared by a kernel.
Weight = Tensor | tuple[Tensor, ...]
Plan = Callable[[Step, Sequence[StateSpec]], tuple[Tensor, ...]]


class Program:
    """model(input_ids [T], positions [T], logits_rows [R]) -> logits [R, V], as one callable of a
    Step.

    extra_weights  packed weights, then prepared weights (none for a model on meta)
    follow  updates them after a user wrote weights; None if the program owns the weights

    specs   one StateSpec per layer with state, in graph order
    lora    the adapters' weights of its linear layers, if it was compiled with room for them
    report  the report of the compiler
    syncing kernels that cannot be captured in a CUDA graph
    takes   the inputs of the model
    key     the cache key of the graph of a traced model; None if the cache was not used
    may_repeat  steps may be repeated without their Python, see `outputs`
    prepared_bytes  size of the weights that kernels prepare
    replaced_bytes  size of those of them whose original is freed: the runtime owns it, and no
                    kernel reads it
    """

    takes = TEXT
    may_repeat: bool = False
    prepared_bytes: int = 0
    replaced_bytes: int = 0

    def __init__(
        self,
        model: nn.Module,
        loaded: CompiledModel,
        extra_weights: Sequence[Weight],
        follow: Callable[[Sequence[Input | None]], list[Weight]] | None,
    ):
        compiled, inputs, self.report, self.key = (
            loaded.compiled,
            loaded.inputs,
            loaded.report,
            loaded.key,
        )
        self.specs = tuple(compiled.state)
        self.device = device = next(model.parameters()).device
        self.syncing = tuple(dict.fromkeys(compiled.syncing))
        self._call = compiled.call
        self._repeated: Repeated | None = None
        number = {name: i for i, name in enumerate(compiled.inputs)}
        self._inputs = list(inputs)
        self._addresses = (
            [x.data_ptr() if isinstance(x, nn.Parameter) else 0 for x in self._inputs]
            if follow
            else []
        )
        missing = len(number) - len(inputs)
        self._arguments: list[Input | Weight | None] = [*inputs, *[None] * missing]
        self._step_inputs: list[tuple[int, StepInput]] = []
        self._state_inputs: dict[StateInput, int] = {}
        self._expert_counts: dict[str, Tensor] = {}
        self.lora = LoraLayers()
        for name, runtime_input in compiled.runtime_inputs.items():
            i = number[name]
            match runtime_input:
                case StepInput():
                    self._step_inputs.append((i, runtime_input))
                case StateInput(spec, role):
                    self._state_inputs[runtime_input] = i
                    if runtime_input.is_scale:
                        self._arguments[i] = _scale(model, self.specs[spec], role, device)
                case ExpertCounts(module_path=path, experts=count):
                    counts = torch.zeros(count, dtype=torch.int64, device=device)
                    self._arguments[i] = self._expert_counts[path] = counts
                case LoraWeights():
                    self._arguments[i] = self.lora.allocate(runtime_input, device)
        self._plans: dict[Plan, list[int]] = {}
        self._follow = follow
        self._made = [number[name] for name in compiled.packed]
        for extra in compiled.extras:
            self._arguments.append(None)
            if extra.kind == "plan":
                self._plans.setdefault(extra.function, []).append(len(self._arguments) - 1)
            else:
                self._made.append(len(self._arguments) - 1)
        self._take(extra_weights)
        self._bound = not self.specs

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the state; of several, the one with the fewest bits."""
        return state_dtype(self.specs)

    def bind(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Use these tensors as state: by role, for each of `specs` in order.

        Raises ValueError if their number, shape or dtype differs from the specs.
        """
        if len(states) != len(self.specs):
            raise ValueError(
                f"bind: got the state of {len(states)} layers, the program has "
                f"{len(self.specs)} with state"
            )
        self._forget_steps()
        for layer, (spec, tensors) in enumerate(zip(self.specs, states, strict=True)):
            spec.check(tensors)
            for role in spec.roles:
                self._arguments[self._state_inputs[StateInput(layer, role, spec.per_sequence)]] = (
                    tensors[role]
                )
        self._bound = True

    def unbind(self) -> None:
        """Hold no tensors of state; `bind` gives it others."""
        self._forget_steps()
        for state_input, i in self._state_inputs.items():
            if not state_input.is_scale:
                self._arguments[i] = None
        self._bound = not self.specs

    def __call__(self, step: Step) -> Tensor:
        """Logits [R, V] of the rows step.logits_rows. Raises RunError before `bind`."""
        return self.outputs(step)[0]

    def outputs(self, step: Step, *, repeat: bool = False) -> Sequence[Tensor]:
        """All that the model returns: logits first. Raises RunError before `bind`.

        repeat  if the program `repeats`, launch what earlier steps of the same sizes launched. Not
                for steps that are captured
        """
        if not self._bound:
            raise RunError("the program has state but no tensors for it: call bind() first")
        arguments = list(self._arguments)
        for i, step_input in self._step_inputs:
            arguments[i] = step_input.of(step)
        for plan, numbers in self._plans.items():
            planned = plan(step, self.specs)
            for i in numbers:
                arguments[i] = planned
        call: GraphFunction = self._repeating() if repeat and self.repeats else self._call
        out = call(*arguments)
        results = out if isinstance(out, list | tuple) else [out]
        return [x for x in results if isinstance(x, Tensor)]

    @property
    def repeats(self) -> bool:
        """Whether steps that come again are repeated: not if those that did could not be."""
        if self._repeated is None:
            return self.may_repeat
        tapes = self._repeated.tapes.values()
        return not self._repeated.never and (not tapes or any(tapes))

    def _repeating(self) -> Repeated:
        """What repeats steps with the tensors of state that the program has now."""
        if self._repeated is None:
            report, varying = self.report, {i for i, _ in self._step_inputs}
            self._repeated = Repeated(
                self._call,
                self.device,
                True,
                report.notes,
                report.repeated,
                strict=False,
                fixed=set(range(len(self._arguments))) - varying,
            )
        return self._repeated

    def _forget_steps(self) -> None:
        self._repeated = None
        self.report.repeated.clear()

    def expert_load(self) -> dict[str, list[int]]:
        """How many tokens each expert got, by the path of the layer's experts; waits for the
        device. {} without the option expert_load, or without experts.
        """
        if not self._expert_counts:
            return {}
        copied = iter(torch.cat(list(self._expert_counts.values())).tolist())
        return {
            path: list(islice(copied, len(counts))) for path, counts in self._expert_counts.items()
        }

    @property
    def has_plans(self) -> bool:
        """Whether kernels get tensors that are made for each step."""
        return bool(self._plans)

    @property
    def counts_experts(self) -> bool:
        """Whether it counts the tokens of experts."""
        return bool(self._expert_counts)

    def forget_expert_load(self) -> None:
        """Set all counts to zero."""
        for counts in self._expert_counts.values():
            counts.zero_()

    def check(self) -> None:
        """Update packed and prepared weights after a user wrote parameters; does nothing if the
        program owns the weights.

        Raises RunError if the storage of a parameter was replaced after compilation: the program
        would read stale weights.
        """
        if self._follow is None:
            return
        for weight, address in zip(self._inputs, self._addresses, strict=True):
            if isinstance(weight, nn.Parameter) and weight.data_ptr() != address:
                raise RunError(
                    "a parameter was given new storage after compiling (.data =, .to()): "
                    "compile again"
                )
        self._take(self._follow(self._inputs))

    def _take(self, weights: Sequence[Weight]) -> None:
        for i, weight in zip(self._made, weights, strict=False):
            self._arguments[i] = weight


def state_dtype(specs: Sequence[StateSpec]) -> torch.dtype:
    """The dtype of the state of these layers; of several, the one with the fewest bits."""
    dtypes = [tensor.dtype for spec in specs for tensor in spec.tensors]
    return min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.get_default_dtype())


def _scale(model: nn.Module, spec: StateSpec, role: str, device: torch.device) -> Tensor:
    """The scale of a layer's state, [1] fp32: the buffer with the name of the role, or 1.

    Buffers are scales for e4m3fn; the largest number of e4m3fnuz is about half as large.
    """
    scale = model.get_submodule(spec.name)._buffers.get(role)
    if scale is None:
        return torch.ones(1, device=device)
    return scale.to(device, torch.float32) * (
        2.0 if spec.tensors[0].dtype == torch.float8_e4m3fnuz else 1.0
    )


@with_freed_parameters
def compile_model(
    model: nn.Module,
    options: JSONMapping | Options | None = None,
    platform: Platform | None = None,
    observers: "Sequence[Callable[[str, GraphModule], None]]" = (),
    keep_texts: bool = False,
    *,
    owned: bool = False,
    before_free: Callable[[str | None, Sequence[StateSpec], Report], None] | None = None,
    takes: ModelInputs = TEXT,
) -> Program:
    """Compile a model for the runtime, or load it from the cache. Its parameters may become views
    of packed weights.

    model   forward(input_ids [T], positions [T], logits_rows [R]) -> logits [R, V], whose attention
            calls ops.attention with a state handle (atomc.models; for a transformers
            model, atomc.stock.adapter.wrap_stock)
    observers   called with the graph after each pass that changed it
    keep_texts  the report gets the graph after each of these passes, as with options={"report":
                FILE}
    owned       no other code reads, writes or moves the weights: the program does not check them,
                and those that its kernels read only as prepared weights are freed
    before_free called with the program's key, specs and report before weights are freed, if any
                are
    takes       what the model takes besides the arguments above: hidden states
                (atomc.models.mtp.DraftModel), embeddings of images, positions [3, T]
    Raises OptionsError for wrong options, and ValueError with the reason and the line for a model
    that cannot be served. ATOMC_STRICT adds the traceback, else it is logged at level debug.
    """
    parsed = Options.of(options)
    # An audit and a recording also run the graph before the passes, which reads originals.
    frees = owned and not (parsed.audit or parsed.record)
    device = next(model.parameters()).device
    platform = platform or Platform.detect("cpu" if device.type == "meta" else device.type)

    def trace(platform: Platform) -> CompiledModel:
        from atomc.compiler.trace_model import trace_model  # and with it Dynamo

        return trace_model(model, parsed, platform, observers, keep_texts, takes, owned=owned)

    observed = bool(observers) or keep_texts
    loaded = load_or_trace(model, parsed, platform, takes, trace, owned=owned, observed=observed)
    compiled, inputs, report = loaded.compiled, loaded.inputs, loaded.report
    with torch.no_grad():
        weights = weight_inputs(compiled, report.notes)
        freed = bytes_of(weights.replaced_groups(inputs), inputs) if frees else 0
        if freed and before_free is not None and device.type != "meta":
            before_free(loaded.key, compiled.state, report)
        extra_weights = _made(weights, inputs, device, frees=frees)
        if weights.prepared_inputs and device.type != "meta":
            report.notes.append(weights.note(freed))
        program = Program(model, loaded, extra_weights, None if owned else weights.refresh)
    program.prepared_bytes = weights.prepared_bytes(inputs)
    program.replaced_bytes, program.takes = freed, takes
    program.may_repeat = not program.has_plans and repeats_steps(
        parsed, platform, report, program.syncing
    )
    report.notes += _notes_of(model)
    publish(report, parsed)
    return program


def load_or_trace(
    model: nn.Module,
    options: Options,
    platform: Platform | None,
    takes: ModelInputs | str,
    trace: Callable[[Platform], CompiledModel],
    *,
    owned: bool,
    observed: bool,
) -> CompiledModel:
    """The model from the cache, or as `trace` compiles it for the platform, by default that of its
    parameters; with a report that meets its contract.

    takes, owned, observed  as in ModelCache
    """
    kind = next(model.parameters()).device.type
    platform = platform or Platform.detect("cpu" if kind == "meta" else kind)
    cache = ModelCache(model, options, platform, takes, owned=owned, observed=observed)
    loaded = cache.load()
    if loaded is None:
        loaded = trace(platform)
        cache.store(loaded)
    else:
        keep(loaded.report)
    loaded.report.treated = True
    contract.check(loaded.report, options)
    return loaded


def _made(
    weights: WeightInputs, inputs: Sequence[Input | None], device: torch.device, *, frees: bool
) -> Sequence[Weight]:
    """Packed weights, and prepared weights unless on meta."""
    if device.type == "meta":
        return weights.refresh_packed(inputs)
    return weights.materialize_and_free(inputs) if frees else weights.materialize(inputs)


def _notes_of(model: nn.Module) -> list[str]:
    """Where quantized layers deviate from their checkpoint."""
    methods = [getattr(layer, "method", None) for layer in model.modules()]
    return list(dict.fromkeys(note for method in methods for note in getattr(method, "notes", ())))
