"""An op's meaning as a kernel of its own, for ops where a few torch calls in a row are good
enough.
"""

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
) -> Callable[..., Any]:
    """The op's meaning, registered under the name that `module` gives it.

    A copy of the function, because a lowered graph names its target by module and name, and under
    those of the meaning lies the op itself.
    """
    meaning = op.reference
    assert isinstance(meaning, FunctionType)
    function = FunctionType(meaning.__code__, meaning.__globals__, op.name, meaning.__defaults__)
    function.__kwdefaults__ = meaning.__kwdefaults__
    function.__annotations__ = meaning.__annotations__
    function.__doc__ = meaning.__doc__
    function.__module__ = module
    if layout is not None:  # it looks at the numbers of slots and lengths
        return op.kernel("torch", layout=layout, refuses=refuses, syncs=True)(function)
    # A norm run on its own rounds where the model does.
    prefer = PreferInductor.FREE_ROUNDING if Kind.NORM in op.kind else PreferInductor.ALWAYS
    return op.kernel("torch", refuses=refuses, prefer_inductor=prefer)(function)
