"""Linear layers in fp8 with scales by blocks, by AITER's product over a shuffled weight.

It reads the scales of x column by column; the product in scaled_linear.py reads them row by row.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.graph.sizes import same_sizes
from atomc.kernels.aiter.library import (
    foreign_operands,
    gapped,
    installed,
    product_of_rows,
)
from atomc.kernels.aiter.linear.packing import relaid_weight
from atomc.kernels.aiter.linear.scaled_linear import gemm_a8w8_blockscale_bpreshuffle, unmultiplied
from atomc.kernels.checks import first_refusal, named
from atomc.ops.op import Refusal

BLOCK = 128
# CK's kernel for weights that AITER's table does not list has whole tiles of so many outputs.
OUTPUTS = 64


def _partial_tiles(weight: Tensor, x_scale: Tensor, block: int) -> Refusal | None:
    n, k = weight.shape
    if block != BLOCK or n % OUTPUTS or k % BLOCK:
        return Refusal(
            "shape",
            f"blocks of {block} in a weight of {n} x {k}: AITER's kernel takes blocks of {BLOCK}, "
            f"and whole tiles of {OUTPUTS} x {BLOCK}",
        )
    if not same_sizes(x_scale.stride(), (1, x_scale.shape[0])):
        return Refusal("layout", "AITER's kernel reads the scales column by column")
    return None


@ops.scaled_linear_fp8_block.kernel(
    "aiter",
    refuses=first_refusal(
        installed(gemm_a8w8_blockscale_bpreshuffle),
        foreign_operands,
        unmultiplied,
        named("weight_scale", gapped),
        _partial_tiles,
    ),
    prepare={"weight": relaid_weight},
)
def scaled_linear_fp8_block(
    x: Tensor,
    weight: tuple[Tensor],
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    [tiles] = weight
    return product_of_rows(
        gemm_a8w8_blockscale_bpreshuffle,
        x.contiguous(),
        tiles,
        x_scale,
        weight_scale,
        dtype=out_dtype,
        bias=bias,
    )
