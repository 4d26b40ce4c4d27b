"""Private API of torch itself. Imports neither Dynamo nor Inductor nor sympy.

Tested, like atomc.torch_compat.tracing and atomc.torch_compat.inductor, with torch 2.11 and 2.13.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import DisableTorchFunction as without_torch_functions
from torch._C._autograd import _profiler_enabled as profiler_is_on
from torch._C._dynamo.guards import _reinterpret_tensor as strided  # type: ignore[attr-defined]
from torch._guards import tracing
from torch._logging._internal import trace_log, trace_structured
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd import forward_ad
from torch.utils._config_module import _UNSET_SENTINEL as NOT_SET
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import TensorWeakRef as WeakTensor

# Names of torch that other modules import from here, besides those defined below.
__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "WeakTensor",
    "profiler_is_on",
    "strided",
    "without_torch_functions",
]


F = TypeVar("F", bound=Callable[..., object])
# An input of a graph; while the graph is traced, tensors are fake ones.
Input = Tensor | int | float | torch.SymInt | None
# A compiled graph: takes the inputs one by one; returns the outputs, or the only one.
Outputs = Input | Sequence["Outputs"]
GraphFunction = Callable[..., Outputs]
# Whether a function that is constant in traces may take a module.
CONSTANTS_OF_MODULES = torch.__version__ >= "2.13"


def storage_use_count(tensor: Tensor) -> int:
    """How many tensors share this tensor's storage."""
    return (
        int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1
    )  # minus the storage object created here


def addresses(inputs: Sequence[Input]) -> list[int | None]:
    """Where the first elements of tensors lie; None of other inputs."""
    return [x.data_ptr() if isinstance(x, Tensor) else None for x in inputs]


# In torch built for CUDA: (inputs as a list, addresses, numbers of inputs) -> whether those inputs
# lie there.
_ARE_AT = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def are_at(inputs: list[Input], expected: list[int | None], numbers: list[int]) -> bool:
    """Whether the inputs with these numbers, tensors, lie where expected."""
    if _ARE_AT is not None:
        return bool(_ARE_AT(inputs, expected, numbers))
    return addresses([inputs[i] for i in numbers]) == [expected[i] for i in numbers]


def torch_modes_active() -> bool:
    """Whether a torch function or dispatch mode is active, such as a default device or a fake
    mode.
    """
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hooks_of(module: torch.nn.Module) -> list[tuple[str, object]]:
    """The hooks that a call of this module runs, each with its kind."""
    return [(name.strip("_"), hook) for name in _HOOKS for hook in getattr(module, name).values()]


def hooks_on_all_modules() -> bool:
    return any(getattr(torch.nn.modules.module, f"_global{name}") for name in _HOOKS)


# Prefixes of environment variables that torch's compilers read; the location of their caches is
# irrelevant.
_VARIABLES = (
    "TORCHINDUCTOR_",
    "TORCHDYNAMO_",
    "TORCH_COMPILE",
    "INDUCTOR_",
    "AOTINDUCTOR_",
    "AOT_INDUCTOR_",
    "CUTLASS_",
    "CUTEDSL_",
    "ENABLE_",
    "CXX",
)
_IRRELEVANT_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR",)


def changed_settings(name: str) -> list[str]:
    """The non-default values of a config module of torch, such as torch._inductor.config, as text.

    A module that was not imported has its defaults, which depend on the environment
    (`compiler_variables`).
    """
    module = sys.modules.get(name)
    if module is None:
        return []
    changed = []
    for key, value in module.save_config_portable().items():
        entry = module._config[key]
        usual = next(
            x
            for x in (entry.env_value_force, entry.env_value_default, entry.default)
            if x is not NOT_SET
        )
        if value != usual:
            changed.append(f"{key}={value!r}")
    return sorted(changed)


def compiler_variables() -> list[str]:
    """The environment variables that torch's compilers read."""
    return sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith(_VARIABLES) and name not in _IRRELEVANT_VARIABLES
    )


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """A context without autocast, as when AOTAutograd calls its compiler."""
    context: contextlib.AbstractContextManager[None] = torch._C._DisableAutocast()
    return context


def autocast_is_on() -> bool:
    """Whether autocast is enabled for any device."""
    return bool(torch._C._is_any_autocast_enabled())


@contextlib.contextmanager
def outside_of_tracing() -> Iterator[None]:
    """A context with real tensors and without tracing context, also during a compile."""
    with tracing(None), unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
        yield


@contextlib.contextmanager
def outside_of_modes() -> Iterator[None]:
    """As outside_of_tracing, also during torch.export and make_fx, whose modes see every call."""
    with without_torch_functions(), _disable_current_modes(), outside_of_tracing():
        yield


def traces_structured() -> bool:
    """Whether torch's structured trace is enabled. (Its handler removes itself at the first line if
    it is not.)
    """
    return bool(trace_log.handlers)


def structured_trace(name: str, text: Callable[[], str]) -> None:
    """Write a text to torch's structured trace, as an artifact of the current compile."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,
    )


def derivatives_recorded(values: Iterable[object]) -> bool:
    """Whether an operation on these values is differentiated: by autograd, by forward-mode AD, or
    by a transform of torch.func.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for value in values
    )


def redispatch_below_autograd(
    op: torch._ops.OpOverload,
    keys: torch._C.DispatchKeySet,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> Any:
    """Call the kernel of the op that comes after autograd's."""
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keys & torch._C._after_autograd_keyset, *args, **kwargs)


def _leave_transforms(depth: int) -> None:
    """Leave the transforms of torch.func that were entered beyond this depth, the last first.
    torch's own function for it leaves one too many in torch 2.11.
    """
    functorch = torch._C._functorch
    leave = {
        functorch.TransformType.Vmap: functorch._vmap_decrement_nesting,
        functorch.TransformType.Grad: functorch._grad_decrement_nesting,
        functorch.TransformType.Jvp: functorch._jvp_decrement_nesting,
        functorch.TransformType.Functionalize: functorch._func_decrement_nesting,
    }
    while functorch.get_dynamic_layer_stack_depth() > depth:
        leave[functorch.peek_interpreter_stack().key()]()


@contextlib.contextmanager
def modes_restored() -> Iterator[None]:
    """A context after which torch's modes are those before it, also if a trace inside fails half
    way: transforms of torch.func, forward-mode AD, grad mode, inference mode and autocast.
    """
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    in_place = torch._C._functorch.get_inplace_requires_grad_allowed()
    hooks = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    dual, records = forward_ad._current_level >= 0, torch.is_grad_enabled()
    casts = [
        (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        for device in ("cpu", "cuda")
    ]
    with torch.inference_mode(torch.is_inference_mode_enabled()), torch.set_grad_enabled(records):
        try:
            yield
        except BaseException as error:  # whatever ended the trace, its modes are left
            traceback.clear_frames(error.__traceback__)  # which own inference modes
            _leave_transforms(depth)
            torch._C._functorch.set_inplace_requires_grad_allowed(in_place)
            if hooks:
                torch._C._autograd._saved_tensors_hooks_enable()
            if not dual:
                with contextlib.suppress(RuntimeError):  # the trace entered no level
                    torch._C._exit_dual_level(level=0)
            for device, dtype, enabled in casts:
                torch.set_autocast_dtype(device, dtype)
                torch.set_autocast_enabled(device, enabled)
            raise


def is_transformed(x: object) -> bool:
    """Whether x is a tensor inside a transform of torch.func: it has a batch dimension that is
    hidden, or a derivative that is recorded.
    """
    return isinstance(x, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_static_input(x: Tensor) -> bool:
    """Whether a graph input has a static address: a parameter, a buffer, or a tensor of
    mark_static_address.
    """
    return (
        isinstance(x, torch.nn.Parameter)
        or getattr(x, "_dynamo_static_input_type", None) is not None
    )


def constant_in_traces(function: F) -> F:
    """torch.compiler.assume_constant_result, which imports Dynamo: Dynamo calls the function while
    it traces, and takes its result as a constant. Not where that cannot take a module.
    """
    function._dynamo_marked_constant = CONSTANTS_OF_MODULES  # type: ignore[attr-defined]
    return function
