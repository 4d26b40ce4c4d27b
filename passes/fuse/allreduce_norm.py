"""The sum over a process group joins the norm behind it, so that what was summed is not written and read again.

    x > all_reduce -+                        x -+
                    add_rms_norm -+-> y  =>     allreduce_add_rms_norm -+-> y
    r --------------+             +-> sum    r -+                       +-> sum

    x > all_reduce > rms_norm -> y       =>  x > allreduce_rms_norm -> y
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from atomc import ops
from atomc.rewrite import Rewrite, tensor_example


def _pattern(x: Tensor, weight: Tensor, eps: float, group: str, style: str) -> Any:
    return ops.rms_norm(ops.all_reduce(x, group), weight, eps, style)


def _replacement(x: Tensor, weight: Tensor, eps: float, group: str, style: str) -> Any:
    return ops.allreduce_rms_norm(x, weight, eps, group, style)


def _add_pattern(x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: str, style: str) -> Any:
    return ops.add_rms_norm(ops.all_reduce(x, group), residual, weight, eps, style)


def _add_replacement(x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: str, style: str) -> Any:
    return ops.allreduce_add_rms_norm(x, residual, weight, eps, group, style)


def _swapped_pattern(x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: str, style: str) -> Any:
    return ops.add_rms_norm(residual, ops.all_reduce(x, group), weight, eps, style)


def _rewrites(name: str, variant: str, pattern: Any, replacement: Any, **more: Any) -> list[Rewrite]:
    """For a weight in the model's dtype, one in fp32, and one in fp32 with a result in the model's dtype."""
    found = []
    for dtype, style in ((torch.bfloat16, "after"), (torch.float32, "after"), (torch.float32, "before")):
        example = {"x": tensor_example(3, 10), "weight": tensor_example(10, dtype=dtype), "eps": 1e-6,
                   "group": "a group", "style": style, **more}  # fmt: skip
        found.append(Rewrite(name, pattern, replacement, partial(dict, example),
                             variant=f"{variant}{dtype} weight, {style}", needs={"all_reduce": {}}))  # fmt: skip
    return found


_RESIDUAL = {"residual": tensor_example(3, 10)}
ALLREDUCE_RMS_NORM = _rewrites("allreduce_rms_norm", "", _pattern, _replacement)
ALLREDUCE_ADD_RMS_NORM = [
    *_rewrites("allreduce_add_rms_norm", "", _add_pattern, _add_replacement, **_RESIDUAL),
    *_rewrites("allreduce_add_rms_norm", "added the other way round, ", _swapped_pattern, _add_replacement, **_RESIDUAL),
]
