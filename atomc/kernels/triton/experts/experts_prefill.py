"""Experts for many tokens, in Triton: pairs sorted by expert, a product with gate and up, a product
with down, and a sum over the choices.
"""

from collections.abc import Callable
from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal, named, unlike
from atomc.kernels.triton.experts.expert_checks import unfit, unreadable
from atomc.kernels.triton.experts.expert_sort import expert_blocks, pairs_per_expert
from atomc.kernels.triton.experts.grouped import grouped_product
from atomc.kernels.triton.experts.weighted_sum import weighted_sum
from atomc.kernels.triton.launch.tile_table import Launch, TileTable
from atomc.kernels.triton.launch.tiles import MOE_EXPERTS
from atomc.kernels.triton.rows.gate import GateConstants
from atomc.ops.experts import Gate
from atomc.ops.formats import FLOATS

# On CUDA cores; operands are twice as large.
FP32_TILE = dict(BLOCK_M=16, BLOCK_N=64, BLOCK_K=32, TALL=1, num_warps=4, num_stages=2)


def tile_for(table: TileTable[Launch], dtype: torch.dtype, ids: Tensor, experts: int) -> Launch:
    """The tile for ids [T, k] and rows of x in this dtype."""
    if dtype == torch.float32:
        return FP32_TILE
    return table.choose(ids.device, pairs_per_expert(ids.numel(), experts))


def sum_of_experts(
    table: TileTable[Launch],
    quantize: Callable[[Tensor], tuple[Tensor, Tensor | None]],
    x: Tensor,
    ids: Tensor,
    weights: Tensor | None,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
    square: int = 0,
    **gate: Unpack[Gate],
) -> Tensor:
    """The weighted sums of the experts of each row of x, [T, H]; `quantize` is between their
    products. Other arguments as in the ops, grouped_product and weighted_sum.
    """
    experts, pairs = len(w13), ids.numel()
    tile = tile_for(table, x.dtype, ids, experts)
    routing = expert_blocks(ids, experts, tile["BLOCK_M"])
    product = partial(
        grouped_product, routing=routing, tile=tile, pairs=pairs, out_dtype=out_dtype, square=square
    )
    act = product(x, x_scale, w13, w13_scale, b13, gate=GateConstants(**gate))
    products = product(*quantize(act), w2, w2_scale, b2)
    return weighted_sum(products, ids, weights, experts)


refuse_moe_experts = first_refusal(unfit, named("x w13 w2", unlike, FLOATS), unreadable)


@ops.moe_experts.kernel("triton", refuses=refuse_moe_experts, tuned_for=MOE_EXPERTS.archs)
def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    weight_on_input: bool,
    **gate: Unpack[Gate],
) -> Tensor:
    if weight_on_input:
        x = (x.unsqueeze(1) * weights.unsqueeze(-1)).to(x.dtype).flatten(0, 1)
    factors = None if weight_on_input else weights
    operands = x, ids, factors, w13, w2, b13, b2
    return sum_of_experts(
        MOE_EXPERTS, lambda act: (act, None), *operands, out_dtype=x.dtype, **gate
    )
