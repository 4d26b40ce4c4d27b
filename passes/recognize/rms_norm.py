"""RMSNorm written out becomes one op; the op's own meaning, traced once per style, is the pattern.

    x > to fp32 > square > mean > + eps > rsqrt > * x > (styles: round, * weight)    =>    rms_norm(x, weight)
"""

from typing import Any

import torch
from torch import Tensor

from atomc import ops
from atomc.ops.norm import RMS_NORM_STYLES
from atomc.rewrite import Rewrite, tensor_example


def _variant(style: str, weight_dtype: torch.dtype) -> Rewrite:
    def pattern(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return ops.rms_norm.reference(x, weight, eps, style)  # type: ignore[no-any-return]

    def replacement(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return ops.rms_norm(x, weight, eps, style)  # type: ignore[no-any-return]

    def example() -> dict[str, Any]:
        return {"x": tensor_example(3, 10), "weight": tensor_example(10, dtype=weight_dtype), "eps": 1e-6}

    wide = weight_dtype == torch.float32
    return Rewrite("rms_norm", pattern, replacement, example, variant=style + " fp32 weight" * wide,
                   attrs={"style": style, "weight": "fp32" if wide else "as x"})  # fmt: skip


# Most specific first: in fp32 the later styles also fit what the earlier ones mean. A weight wider than x is another
# variant, because "after" then promotes the result.
RMS_NORM: list[Rewrite] = [_variant(style, dtype) for dtype in (torch.bfloat16, torch.float32) for style in RMS_NORM_STYLES]
