"""The sums over the experts of each token, in a fixed order, in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc.kernels.triton.launch.launch import TRITON_DTYPE, begin, overlap


@triton.jit
def _weigh(
    products_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    E,
    H,
    CHOICES: constexpr,
    BLOCK: constexpr,
    PROMOTED: constexpr,
    PDL: constexpr,
):
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin(PDL)
    sums = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = token.to(tl.int64) * CHOICES + choice
        expert = tl.load(ids_ptr + pair)
        valid = (expert >= 0) & (expert < E)
        value = tl.load(products_ptr + pair * H + column, (column < H) & valid, 0.0)
        value = value.to(tl.float32)
        if weights_ptr is not None:
            value = (value * tl.load(weights_ptr + pair).to(tl.float32)).to(PROMOTED)
        sums += tl.where(valid, value.to(tl.float32), 0.0)
    tl.store(
        out_ptr + token.to(tl.int64) * H + column, sums.to(out_ptr.dtype.element_ty), column < H
    )


def weighted_sum(products: Tensor, ids: Tensor, weights: Tensor | None, num_experts: int) -> Tensor:
    """The sums over the choices [T, H] of products [P, H] times weights [T, k] (None: 1), in rising
    order of choices. ids [T, k]; products of unknown experts are not read.
    """
    hidden = products.shape[1]
    out = products.new_empty((len(ids), hidden))
    if len(ids):
        promoted = products.dtype
        if weights is not None:
            promoted = torch.promote_types(promoted, weights.dtype)
        block = min(1024, triton.next_power_of_2(hidden))
        _weigh[(len(ids), triton.cdiv(hidden, block))](
            products,
            ids.contiguous(),
            None if weights is None else weights.contiguous(),
            out,
            num_experts,
            hidden,
            CHOICES=ids.shape[1],
            BLOCK=block,
            PROMOTED=TRITON_DTYPE[promoted],
            **overlap(products.device),
        )
    return out
