"""A norm behind an add writes the zeros that its row is padded with.

x -+                                    x -+
   add_rms_norm -+-> pad -> rows   =>      add_rms_norm_pad -+-> rows
r -+             +-> sum                r -+                 +-> sum
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from atomc import ops
from atomc.rewriting.rewrite import Rewrite, tensor_example


def _pattern(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, columns: int, style: str
) -> Any:
    y, total = ops.add_rms_norm(x, residual, weight, eps, style)
    return F.pad(y, (0, columns)), total


def _replacement(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, columns: int, style: str
) -> Any:
    return ops.add_rms_norm_pad(x, residual, weight, eps, columns, style)


def _columns_are_added(columns: int, **_: Any) -> str | None:
    return None if columns > 0 else f"columns to be added, these are {columns}"


def _example() -> dict[str, Any]:
    return {
        "x": tensor_example(3, 10),
        "residual": tensor_example(3, 10),
        "weight": tensor_example(10),
        "eps": 1e-6,
        "columns": 17,
        "style": "after",
    }


ADD_RMS_NORM_PAD = Rewrite(
    "add_rms_norm_pad", _pattern, _replacement, _example, guard=_columns_are_added
)
