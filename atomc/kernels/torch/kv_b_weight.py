"""Forms of a quantized kv_b_proj, computed once instead of in each step, on any device."""

from torch import Tensor

from atomc import ops
from atomc.ops.op import Attribute, Prepared

STORED = ("weight", "weight_scale", "zeros")


def dequantized(
    weight: Tensor, weight_scale: Tensor, zeros: Tensor | None, **attributes: Attribute
) -> Prepared:
    weights: Tensor = ops.kv_b_weight.overload(weight, weight_scale, zeros, **attributes)
    return Prepared((weights,))


def half(
    weight: Tensor, weight_scale: Tensor, zeros: Tensor | None, **attributes: Attribute
) -> Prepared:
    parts: tuple[Tensor, Tensor] = ops.kv_b_half.overload(weight, weight_scale, zeros, **attributes)
    return Prepared(tuple(parts))


@ops.kv_b_weight.kernel(
    "torch", prepare={STORED: dequantized}, attributes=("scheme", "group", "dtype")
)
def kv_b_weight(weight: tuple[Tensor]) -> Tensor:
    return weight[0]


@ops.kv_b_half.kernel(
    "torch",
    prepare={STORED: half},
    attributes=("scheme", "group", "heads", "nope", "part", "product", "codes"),
)
def kv_b_half(weight: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return weight
