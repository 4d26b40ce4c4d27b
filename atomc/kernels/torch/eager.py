"""The reference of an op as a kernel, for ops where a few torch calls are fast enough."""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

from atomc.ops import Refusal
from atomc.ops.op import OpFunction, PreferInductor, Results
from atomc.ops.op_traits import Kind


def eager(
    op: OpFunction[..., Results],
    module: str,
    layout: str | None = None,
    refuses: Callable[..., Refusal | None] | None = None,
    syncs: bool = False,
) -> Callable[..., Any]:
    """Register a copy of the op's reference as a kernel, and return it as a function of `module`.

    A lowered graph refers to a kernel by module and name, and the name of the reference in its own
    module is bound to the op.

    syncs  the reference waits for values of the device, so that Inductor cannot compile it
    """
    reference = op.reference
    assert isinstance(reference, FunctionType)
    function = FunctionType(
        reference.__code__, reference.__globals__, op.name, reference.__defaults__
    )
    functools.update_wrapper(function, reference)
    function.__kwdefaults__ = reference.__kwdefaults__
    function.__module__ = module
    if layout is not None or syncs:  # with a layout it reads slots and lengths on the host
        return op.kernel("torch", layout=layout, refuses=refuses, syncs=True)(function)
    # Called directly, a norm rounds where the model does.
    prefer = PreferInductor.FREE_ROUNDING if Kind.NORM in op.kind else PreferInductor.ALWAYS
    return op.kernel("torch", refuses=refuses, prefer_inductor=prefer)(function)
