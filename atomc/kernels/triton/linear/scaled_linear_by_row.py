"""Linear layers in fp8 with a scale a row, of 17 to 128 rows, in Triton: cuBLAS multiplies so few
rows twice as fast with one scale for all of them as with a scale a row.
"""

from typing import Unpack

from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal
from atomc.kernels.triton.launch.launch import more_rows
from atomc.kernels.triton.launch.tiles import SCALED_LINEAR_TILES
from atomc.kernels.triton.linear.scaled_linear import MAX_ROWS, refuse_scaled_linear
from atomc.kernels.triton.linear.scaled_linear_tiles import multiply
from atomc.ops.op import Refusal
from atomc.ops.scaled_linear import ScaledOperands

# H200, us with 64 rows, a scale a row: 4096 -> 4096 8.7, cuBLAS 15.4; 4096 -> 24576 28.0, 41.5;
# 12288 -> 4096 18.7, 33.3. With 128 rows 10.2, 16.2; 38.9, 36.7; 23.0, 33.8.
MANY_ROWS = 128


def refuse_rows(x: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Refusal | None:
    if x_scale.dim() <= 1 and weight_scale.dim() <= 1:
        return Refusal("slower", "one scale for all rows, which cuBLAS takes as fast")
    return more_rows(x, MANY_ROWS, "which are left to cuBLAS")


@ops.scaled_linear_fp8.kernel(
    "triton",
    tokens=ops.Tokens(MAX_ROWS + 1, MANY_ROWS),
    refuses=first_refusal(refuse_scaled_linear, refuse_rows),
    tuned_for=SCALED_LINEAR_TILES.archs,
)
def scaled_linear_fp8(**operands: Unpack[ScaledOperands]) -> Tensor:
    return multiply(**operands)
