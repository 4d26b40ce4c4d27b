"""Fuse the sum over a process group with the norm that reads it: the sum is not written to memory
and read again.

x > all_reduce -+                        x -+
                add_rms_norm -+-> y  =>     allreduce_add_rms_norm -+-> y
r --------------+             +-> sum    r -+                       +-> sum

x > all_reduce -+- rms_norm -> y     =>  x > allreduce_rms_norm -+-> y
                +-> sum                                         +-> sum
"""

from torch import Tensor

from atomc import ops
from atomc.rewriting.example import Example, norm_example, tensor_example
from atomc.rewriting.rewrite import Case, Rewrite


def _pattern(
    x: Tensor, weight: Tensor, eps: float, process_group: str, style: str
) -> tuple[Tensor, Tensor]:
    summed = ops.all_reduce(x, process_group)
    return ops.rms_norm(summed, weight, eps, style), summed


def _example() -> Example:
    return {**norm_example(), "process_group": "a group"}


def _add_pattern(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    process_group: str,
    style: str,
    swapped: bool,
    last: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    summed = ops.all_reduce(x, process_group)
    first, second = (residual, summed) if swapped else (summed, residual)
    y, total = ops.add_rms_norm(first, second, weight, eps, style)
    return y if last else (y, total)


def _add_replacement(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    process_group: str,
    style: str,
    swapped: bool,
    last: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    y, total = ops.allreduce_add_rms_norm(x, residual, weight, eps, process_group, style)
    return y if last else (y, total)


def _add_example(swapped: bool, last: bool) -> Example:
    return {**_example(), "residual": tensor_example(3, 10), "swapped": swapped, "last": last}


_NEEDS: dict[str, Example] = {"all_reduce": {}}
ALLREDUCE_RMS_NORM = Rewrite(
    "allreduce_rms_norm", _pattern, ops.allreduce_rms_norm, _example, needs=_NEEDS
)
ALLREDUCE_ADD_RMS_NORM = Rewrite(
    "allreduce_add_rms_norm",
    _add_pattern,
    _add_replacement,
    _add_example,
    needs=_NEEDS,
    cases=[
        Case("", {"swapped": False, "last": False}),
        Case("operands exchanged", {"swapped": True, "last": False}),
        # Nothing reads the sum before the last norm of a decoder.
        Case("last norm", {"swapped": False, "last": True}),
        Case("last norm, operands exchanged", {"swapped": True, "last": True}),
    ],
)
