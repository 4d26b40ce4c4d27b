"""Mixtures of experts in MXFP4 by AITER's Triton kernel, with rows in bf16 and weights as they are
(GPT-OSS).

It adds no biases: where there are some, products stay in fp32 until they are added.
"""

from typing import Unpack

import torch
from torch import Tensor
from torch.nn.functional import pad

from atomc import ops
from atomc.kernels.aiter.experts.experts_triton import (
    COLUMNS,
    Choices,
    moe_align_block_size_triton,
    summed,
    triton_dtype,
)
from atomc.kernels.aiter.library import Function, installed, no_mxfp4
from atomc.kernels.checks import first_refusal, named, unlike, wrong_result
from atomc.ops.experts import Gate, gated
from atomc.ops.op import Refusal

fused_moe_mxfp4 = Function("fused_moe_mxfp4", "aiter.ops.triton.moe.moe_op_mxfp4")


def _product(
    choices: Choices, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    """x, a row for each token or for each choice, by its experts [E, N, K/2]: [T, k, N], in fp32 if
    a bias is added.
    """
    tokens, k = choices.ids.shape
    dtype = x.dtype if bias is None else torch.float32
    out = x.new_empty((tokens, k, weight.shape[1]), dtype=dtype)
    ones = x.new_ones(len(weight), dtype=torch.float32)
    fused_moe_mxfp4(
        x,
        weight,
        out,
        ones,
        ones,
        None,
        scale,
        choices.weights,
        choices.ids,
        choices.order,
        choices.experts,
        choices.length,
        False,
        k if len(x) == tokens else 1,
        False,
        False,
        choices.tile,
        triton_dtype(dtype),
    )
    if bias is None:
        return out
    # Choice 0 is an expert of another device.
    return out + pad(bias, (0, 0, 1, 0))[choices.ids]


def _partial_tiles(w13: Tensor, w2: Tensor, x_scale: Tensor | None) -> Refusal | None:
    if x_scale is not None:
        return Refusal("argument", "AITER's Triton kernel gets x in bf16, not in codes with scales")
    hidden, inner = w2.shape[1], w13.shape[1] // 2
    # The kernel masks the last tile of inputs by columns where bytes are meant.
    if hidden % COLUMNS or inner % COLUMNS:
        return Refusal(
            "shape", f"experts of {hidden} x {inner}: AITER's kernel needs multiples of {COLUMNS}"
        )
    return None


@ops.moe_experts_mxfp4.kernel(
    "aiter",
    refuses=first_refusal(
        installed(moe_align_block_size_triton, fused_moe_mxfp4),
        _partial_tiles,
        no_mxfp4,
        named("x", unlike, (torch.bfloat16,)),
        named("out_dtype", wrong_result, (torch.bfloat16,)),
    ),
)
def moe_experts_mxfp4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    out_dtype: torch.dtype,
    **gate: Unpack[Gate],
) -> Tensor:
    if not x.shape[0]:
        return torch.empty_like(x)
    choices = Choices(ids, weights, len(w13))
    h = _product(choices, x, w13, w13_scale, b13).flatten(0, 1).to(out_dtype)
    h = gated(h, **gate)
    results = _product(choices, h, w2, w2_scale, b2).to(out_dtype)
    return summed(results * choices.weights.unsqueeze(-1), out_dtype)
