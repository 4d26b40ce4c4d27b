"""Let the norm after an add write the zeros that pad its rows.

x -+                                    x -+
   add_rms_norm -+-> pad -> rows   =>      add_rms_norm_pad -+-> rows
r -+             +-> sum                r -+                 +-> sum
"""

import torch.nn.functional as F
from torch import Tensor

from atomc import ops
from atomc.rewriting.example import Example, tensor_example
from atomc.rewriting.rewrite import Rewrite


def _pattern(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, columns: int, style: str
) -> tuple[Tensor, Tensor]:
    y, total = ops.add_rms_norm(x, residual, weight, eps, style)
    return F.pad(y, (0, columns)), total


def _columns_are_added(columns: int, **_: object) -> str | None:
    return None if columns > 0 else f"columns to be added, these are {columns}"


def _example() -> Example:
    return {
        "x": tensor_example(3, 10),
        "residual": tensor_example(3, 10),
        "weight": tensor_example(10),
        "eps": 1e-6,
        "columns": 17,
        "style": "after",
    }


ADD_RMS_NORM_PAD = Rewrite(
    "add_rms_norm_pad", _pattern, ops.add_rms_norm_pad, _example, guard=_columns_are_added
)
