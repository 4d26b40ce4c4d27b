"""Products of the batched format in Triton: rows of each expert with its weight, in one launch.

L experts, C rows per expert, of which num_tokens[e] are used; K inputs, N outputs.
"""

import math

from torch import Tensor

from atomc.kernels.triton.experts.expert_sort import Routing
from atomc.kernels.triton.experts.grouped import grouped_product
from atomc.kernels.triton.rows.gate import GateConstants

ROWS, OUTPUTS, INPUTS = 16, 64, 64  # of a tile; not measured yet


def batched_product(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    num_tokens: Tensor,
    out: Tensor,
    *,
    block: int = 0,
    gate: GateConstants | None = None,
) -> None:
    """Writes out[e, c] = weight[e] @ x[e, c] + bias[e] for c < num_tokens[e]; other rows keep what
    they have. With a gate, weight has 2 N rows, and out atomc.ops.experts.gated of the products.

    x [L, C, K] and out [L, C, N] contiguous; weight [L, N, K] or [L, 2N, K]; bias [L, N] or
    [L, 2N] contiguous; num_tokens [L] int32
    x_scale, weight_scale  of codes: [L, C, 1], and [L, rows, 1] or [L, 1, 1]; with `block`: [L, C,
                           ceil(K / block)] and [L, ceil(rows / block), ceil(K / block)]
    """
    columns = math.gcd(block, INPUTS) if block else INPUTS  # with one scale
    grouped_product(
        x.flatten(0, 1),
        None if x_scale is None else x_scale.flatten(0, 1),
        weight,
        weight_scale,
        bias,
        Routing(ROWS, num_tokens),
        {"BLOCK_M": ROWS, "BLOCK_N": OUTPUTS, "BLOCK_K": columns, "TALL": 1},
        out.shape[0] * out.shape[1],
        out.dtype,
        block,
        gate,
        out=out,
        capacity=out.shape[1],
    )
