"""What is not public of torch itself. Needs neither Dynamo nor Inductor nor sympy, and imports none of them.

Tested, as atomc.torch_tracing and atomc.torch_inductor are, with torch 2.11 and 2.13.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled as profiler_is_on
from torch._guards import tracing
from torch._logging._internal import trace_log, trace_structured
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils.weak import TensorWeakRef as WeakTensor

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "WeakTensor",
    "autocast_is_on",
    "is_static_input",
    "num_owners",
    "outside_of_tracing",
    "profiler_is_on",
    "structured_trace",
    "traces_structured",
]


def num_owners(tensor: Tensor) -> int:
    """How many tensors share this tensor's storage."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1  # one is the storage just asked for


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
