"""A model compiled for the runtime: state bound to a paged cache, called directly past Dynamo's
guards.

The program binds the parameters that Dynamo found by their source, or the cache by their path, and
takes a Step per call. Weights that it owns are looked at once; of a user's model `check` finds out
what the guards would have: whether they still lie where they lay. A model that the cache knows is
not traced, and nothing that traces is imported.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from atomc.cache.compiled import Compiled, weight_inputs
from atomc.cache.model_cache import ModelCache
from atomc.errors import OURS, RunError
from atomc.ops.inputs import StateInput
from atomc.ops.state import StateSpec, Step
from atomc.options import Options
from atomc.platform import Platform
from atomc.report import contract
from atomc.report.render.page import publish
from atomc.report.report import Report, keep
from atomc.weights.inputs import WeightInputs

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from atomc.compiler.trace_model import TracedModel


class Program:
    """model(input_ids [T], positions [T], logits_rows [R]) -> logits [R, V], as one callable of a
    Step.

    inputs  of each input of Dynamo's graph the tensor of the model, None for one of the step
    made    what the graph reads of weights beside them: packed ones, then prepared ones (none of a
            model on meta)
    follow  how `made` follows weights that a user may write; None if the program owns them

    specs   one StateSpec per layer with state, in graph order
    report  what the compiler did
    syncing kernels in it that no CUDA graph can hold
    key     what the cache calls the graph of a traced model; None where it was not asked
    copied_bytes  of the weights that kernels keep a copy of in a layout of their own
    replaced_bytes  of those among them that the program itself does not read: an owner may free
                    them
    """

    key: str | None = None
    copied_bytes: int = 0
    replaced_bytes: int = 0

    def __init__(
        self,
        compiled: Compiled,
        inputs: Sequence[Any],
        made: Sequence[Any],
        follow: Callable[[Sequence[Any]], list[Any]] | None,
        report: Report,
        device: torch.device,
        model: nn.Module,
    ):
        self.specs = tuple(compiled.state)
        self.report, self.device = report, device
        self.syncing = tuple(dict.fromkeys(compiled.syncing))
        self._call = compiled.call
        number = {name: i for i, name in enumerate(compiled.inputs)}
        self._inputs = list(inputs)
        self._addresses = (
            [x.data_ptr() if isinstance(x, nn.Parameter) else 0 for x in self._inputs]
            if follow
            else []
        )
        self._arguments: list[Any] = [*inputs, *[None] * (len(number) - len(inputs))]
        self._step_inputs = [(number[name], given) for name, given in compiled.step_inputs.items()]
        self._state_inputs = {given: number[name] for name, given in compiled.state_inputs.items()}
        for given, i in self._state_inputs.items():
            if given.is_scale:
                self._arguments[i] = _scale(model, self.specs[given.spec], given.role, device)
        self._plans: dict[Callable[..., Any], list[int]] = {}
        self._follow = follow
        self._made = [number[name] for name in compiled.packed]
        for extra in compiled.extras:
            self._arguments.append(None)
            if extra.kind == "plan":
                self._plans.setdefault(extra.function, []).append(len(self._arguments) - 1)
            else:
                self._made.append(len(self._arguments) - 1)
        self._take(made)
        self._bound = not self.specs

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the state, which is the model's; of several the one with the fewest bits."""
        dtypes = [tensor.dtype for spec in self.specs for tensor in spec.tensors]
        return min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.get_default_dtype())

    def bind(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Use these tensors from now on: by role, for each of `specs` in their order.

        Raises ValueError if their number, shape or dtype is not what the specs say.
        """
        if len(states) != len(self.specs):
            raise ValueError(
                f"bind: the state of {len(states)} layers came, the program has "
                f"{len(self.specs)} with state"
            )
        for layer, (spec, tensors) in enumerate(zip(self.specs, states, strict=True)):
            spec.check(tensors)
            for role in spec.roles:
                self._arguments[self._state_inputs[StateInput(layer, role, spec.per_sequence)]] = (
                    tensors[role]
                )
        self._bound = True

    def __call__(self, step: Step) -> Tensor:
        """Logits [R, V] of the rows step.logits_rows. Raises RunError before `bind`, or if weights
        have moved.
        """
        if not self._bound:
            raise RunError("the program has state but no tensors for it: call bind() first")
        arguments = list(self._arguments)
        for i, given in self._step_inputs:
            arguments[i] = given.of(step)
        for plan, numbers in self._plans.items():
            made = plan(step, self.specs)
            for i in numbers:
                arguments[i] = made
        out = self._call(*arguments)
        logits = out[0] if isinstance(out, list | tuple) else out
        assert isinstance(logits, Tensor)
        return logits

    def check(self) -> None:
        """Follow what a user wrote into the weights; there is nothing to follow in those that the
        program owns.

        Raises RunError if a parameter's storage was replaced since compiling: the program would
        read stale weights.
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

    def _take(self, made: Sequence[Any]) -> None:
        for i, weight in zip(self._made, made, strict=False):
            self._arguments[i] = weight


def _scale(model: nn.Module, spec: StateSpec, role: str, device: torch.device) -> Tensor:
    """What the layer's codes are multiplied by, [1] fp32: its own buffer named like the role, 1 if
    it has none.

    Scales are made for e4m3fn; the largest number of e4m3fnuz is about half as large.
    """
    given = model.get_submodule(spec.name)._buffers.get(role)
    if given is None:
        return torch.ones(1, device=device)
    return given.to(device, torch.float32) * (
        2.0 if spec.tensors[0].dtype == torch.float8_e4m3fnuz else 1.0
    )


def compile_model(
    model: nn.Module,
    options: Mapping[str, Any] | Options | None = None,
    platform: Platform | None = None,
    observers: "Sequence[Callable[[str, GraphModule], None]]" = (),
    keep_texts: bool = False,
    *,
    owned: bool = False,
) -> Program:
    """Compile a model for the runtime, or find it in the cache. Its parameters may move into packs.

    model   forward(input_ids [T], positions [T], logits_rows [R]) -> logits [R, V], whose attention
            calls ops.attention with a state handle (atomc.models; atomc.models.wrap_stock for a
            transformers model)
    observers  shown the graph after each pass that changed it
    keep_texts  the report gets the graph after each of these passes, as with options={"report":
                FILE}
    owned  nobody else writes or moves the weights from now on: the program never looks for changes
           of them
    Raises OptionsError for wrong options, ValueError for a model that cannot be served: it says why
    and in which line. With ATOMC_STRICT the trace comes with it, else at log level debug.
    """
    chosen = Options.of(options)
    device = next(model.parameters()).device
    where = platform or Platform.detect("cpu" if device.type == "meta" else device.type)
    cache = ModelCache(model, chosen, where, observed=bool(observers) or keep_texts)
    found = cache.load()
    if found is not None:
        report = keep(found.report)
        compiled, inputs, key = found.compiled, found.inputs, None
    else:
        compiled, sources, inputs, report, entry, key = _traced(
            model, chosen, where, observers, keep_texts
        )
        cache.store(report, entry, sources, inputs)
    report.treated = True
    contract.check(report, chosen)
    with torch.no_grad():
        weights = weight_inputs(compiled, report.notes)
        made = _made(weights, inputs, device, report)
        program = Program(
            compiled, inputs, made, None if owned else weights.refresh, report, device, model
        )
    program.key, program.copied_bytes = key, weights.copied_bytes(inputs)
    replaced = [inputs[i] for i in weights.replaced_inputs()]
    program.replaced_bytes = sum(weight.nbytes for weight in replaced if weight is not None)
    report.notes += _notes_of(model)
    publish(report, chosen)
    return program


def _traced(
    model: nn.Module,
    options: Options,
    platform: Platform,
    observers: "Sequence[Callable[[str, GraphModule], None]]",
    keep_texts: bool,
) -> "TracedModel":
    from atomc.compiler.trace_model import trace_model  # and with it Dynamo
    from atomc.refusal import refusal
    from atomc.torch_compat.tracing import TracingError

    try:
        return trace_model(model, options, platform, observers, keep_texts)
    except OURS:
        raise
    except TracingError as error:
        raise refusal(model, error) from (error if options.strict else None)


def _made(
    weights: WeightInputs, inputs: Sequence[Any], device: torch.device, report: Report
) -> list[Any]:
    """Pack the parameters, and prepare what kernels want of them: nothing on meta."""
    if device.type == "meta":
        return weights.refresh_packed(inputs)
    made = weights.materialize(inputs)
    if weights.prepared_inputs:
        report.notes.append(weights.note())
    return made


def _notes_of(model: nn.Module) -> list[str]:
    """What its quantized layers do otherwise than their checkpoint says."""
    methods = [getattr(layer, "method", None) for layer in model.modules()]
    return list(dict.fromkeys(note for method in methods for note in getattr(method, "notes", ())))
