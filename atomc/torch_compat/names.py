"""What is not public of torch itself. Needs neither Dynamo nor Inductor nor sympy, and imports none of them.

Tested, as atomc.torch_compat.tracing and atomc.torch_compat.inductor are, with torch 2.11 and 2.13.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled as profiler_is_on
from torch._guards import tracing
from torch._logging._internal import trace_log, trace_structured
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._config_module import _UNSET_SENTINEL as NOT_SET
from torch.utils.weak import TensorWeakRef as WeakTensor

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "WeakTensor",
    "autocast_is_on",
    "changed_settings",
    "compiler_variables",
    "hooks_of",
    "hooks_on_all_modules",
    "is_static_input",
    "modes_are_on",
    "num_owners",
    "outside_of_tracing",
    "profiler_is_on",
    "structured_trace",
    "traces_structured",
    "without_autocast",
]


def num_owners(tensor: Tensor) -> int:
    """How many tensors share this tensor's storage."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1  # one is the storage just asked for


def modes_are_on() -> bool:
    """Whether something stands between a program and torch's ops: a default device, a fake mode, somebody's own."""
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hooks_of(module: torch.nn.Module) -> str | None:
    """The kind of hook that a call of this module runs, or None."""
    return next((name.strip("_") for name in _HOOKS if getattr(module, name)), None)


def hooks_on_all_modules() -> bool:
    return any(getattr(torch.nn.modules.module, f"_global{name}") for name in _HOOKS)


# Variables of the environment that torch's compilers read; where their own caches lie changes nothing.
_VARIABLES = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE", "INDUCTOR_", "AOTINDUCTOR_", "AOT_INDUCTOR_", "CUTLASS_",
              "CUTEDSL_", "ENABLE_", "CXX")  # fmt: skip
_SAYING_NOTHING = ("TORCHINDUCTOR_CACHE_DIR",)


def changed_settings(name: str) -> list[str]:
    """What this process has set in a module of settings of torch's, such as torch._inductor.config; equal for equal ones.

    A module that was not imported has its defaults. They depend on the environment (`compiler_variables`).
    """
    module = sys.modules.get(name)
    if module is None:
        return []
    changed = []
    for key, value in module.save_config_portable().items():
        entry = module._config[key]
        usual = next(x for x in (entry.env_value_force, entry.env_value_default, entry.default) if x is not NOT_SET)
        if value != usual:
            changed.append(f"{key}={value!r}")
    return sorted(changed)


def compiler_variables() -> list[str]:
    """What the environment tells torch's compilers."""
    return sorted(f"{name}={value}" for name, value in os.environ.items()
                  if name.startswith(_VARIABLES) and name not in _SAYING_NOTHING)  # fmt: skip


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """Autocast is off within, as where AOTAutograd calls its compiler."""
    found: contextlib.AbstractContextManager[None] = torch._C._DisableAutocast()
    return found


def autocast_is_on() -> bool:
    """Whether ops convert their arguments, on whatever device."""
    return bool(torch._C._is_any_autocast_enabled())


@contextlib.contextmanager
def outside_of_tracing() -> Iterator[None]:
    """Real tensors and no tracing context, whatever is being compiled around this call."""
    with tracing(None), unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
        yield


def traces_structured() -> bool:
    """Whether somebody listens to torch's structured trace. (Its own handler leaves at the first line if nobody does.)"""
    return bool(trace_log.handlers)


def structured_trace(name: str, text: Callable[[], str]) -> None:
    """Write a text to torch's structured trace, under the compile that is going on."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text,
                     expect_trace_id=False)  # fmt: skip


def is_static_input(x: Tensor) -> bool:
    """Whether a graph input stays where it is: a parameter, a buffer, or what mark_static_address marked."""
    return isinstance(x, torch.nn.Parameter) or getattr(x, "_dynamo_static_input_type", None) is not None
