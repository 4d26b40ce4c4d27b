"""The reference of an op as a kernel, for ops where a few torch calls are fast enough."""

import functools
from collections.abc import Callable, Mapping
from types import FunctionType, MappingProxyType
from typing import Any

from atomc.kernels.checks import Refuses
from atomc.ops.op import OpFunction, PreferInductor, Results
from atomc.ops.op_traits import Kind


def eager(
    op: OpFunction[..., Results],
    module: str,
    layouts: Mapping[str, Refuses | None] = MappingProxyType({}),
    syncs: bool = False,
) -> Callable[..., Any]:
    """Register a copy of the op's reference as a kernel, and return it as a function of `module`.

    A lowered graph refers to a kernel by module and name, and the name of the reference in its own
    module is bound to the op.

    layouts  of the state that it reads or writes, with what refuses a call in each
    syncs    the reference waits for values of the device, so that Inductor cannot compile it
    """
    reference = op.reference
    assert isinstance(reference, FunctionType)
    function = FunctionType(
        reference.__code__, reference.__globals__, op.name, reference.__defaults__
    )
    functools.update_wrapper(function, reference)
    function.__kwdefaults__ = reference.__kwdefaults__
    function.__module__ = module
    for layout, refuses in layouts.items():  # it reads slots and lengths on the host
        op.kernel("torch", layout=layout, refuses=refuses, syncs=True)(function)
    if layouts:
        return function
    if syncs:
        return op.kernel("torch", syncs=True)(function)
    # Called directly, a norm rounds where the model does.
    prefer = PreferInductor.FREE_ROUNDING if Kind.NORM in op.kind else PreferInductor.ALWAYS
    return op.kernel("torch", prefer_inductor=prefer)(function)
