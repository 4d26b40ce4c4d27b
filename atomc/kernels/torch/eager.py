"""The reference of an op as a kernel, for ops where a few torch calls are fast enough."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

from atomc.ops import Op, Refusal
from atomc.ops.op import PreferInductor
from atomc.ops.op_traits import Kind


def eager(
    op: Op,
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
    function.__kwdefaults__ = reference.__kwdefaults__
    function.__annotations__ = reference.__annotations__
    function.__doc__ = reference.__doc__
    function.__module__ = module
    if layout is not None or syncs:  # with a layout it reads slots and lengths on the host
        return op.kernel("torch", layout=layout, refuses=refuses, syncs=True)(function)
    # Called directly, a norm rounds where the model does.
    prefer = PreferInductor.FREE_ROUNDING if Kind.NORM in op.kind else PreferInductor.ALWAYS
    return op.kernel("torch", refuses=refuses, prefer_inductor=prefer)(function)
