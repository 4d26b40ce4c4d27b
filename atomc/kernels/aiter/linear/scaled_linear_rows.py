"""Linear layers in fp8 with a scale a token and one an output, by AITER's product over a shuffled
weight.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.library import (
    dense_rows,
    foreign_operands,
    gapped,
    installed,
    product_of_rows,
)
from atomc.kernels.aiter.linear.packing import relaid_weight
from atomc.kernels.aiter.linear.scaled_linear import gemm_a8w8_bpreshuffle, unmultiplied
from atomc.kernels.checks import first_refusal, named
from atomc.ops.op import Refusal

# CK's kernels with a shuffled weight need whole tiles of the weight. Which kernel runs depends on
# the number of rows, too; these are the tiles of all of them: from so many inputs on, a multiple of
# so many outputs by so many inputs.
TILES = ((1536, 64, 128), (512, 128, 128), (192, 256, 64))


def _unfilled(outputs: int, inputs: int) -> Refusal | None:
    for least, n, k in TILES:
        if inputs >= least:
            if outputs % n == 0 and inputs % k == 0:
                return None
            return Refusal(
                "shape",
                f"a weight of {outputs} x {inputs} does not fill CK's tiles of {n} x {k}",
            )
    return Refusal("shape", f"rows of {inputs}: CK's kernels take {TILES[-1][0]} and more")


def _other_scales(x_scale: Tensor, weight_scale: Tensor) -> Refusal | None:
    if x_scale.dim() < 2 or weight_scale.dim() != 2:
        return Refusal(
            "argument", "AITER's kernel takes a scale for each token and for each output"
        )
    return None


@ops.scaled_linear_fp8.kernel(
    "aiter",
    refuses=first_refusal(
        installed(gemm_a8w8_bpreshuffle),
        foreign_operands,
        _other_scales,
        unmultiplied,
        lambda weight: _unfilled(*weight.shape),
        named("weight_scale", gapped),
    ),
    prepare={"weight": relaid_weight},
)
def scaled_linear_fp8(
    x: Tensor,
    weight: tuple[Tensor],
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    [tiles] = weight
    x, x_scale = x.contiguous(), dense_rows(x_scale)
    return product_of_rows(
        gemm_a8w8_bpreshuffle, x, tiles, x_scale, weight_scale, dtype=out_dtype, bias=bias
    )
