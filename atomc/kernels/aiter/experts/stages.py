"""AITER's sorting of choices and CK's two products over them, for experts whose kernels quantize
between the products themselves.
"""

import torch
from torch import Tensor

from atomc.kernels.aiter.experts.experts import (
    ACTIVATIONS,
    ActivationType,
    QuantType,
    numbered,
    tiled,
)
from atomc.kernels.aiter.library import Function, installed

moe_sorting = Function("moe_sorting", "aiter.fused_moe", takes=["expert_mask"])
ck_moe_stage1_fwd = Function("ck_moe_stage1_fwd", "aiter", takes=["quant_type", "splitk"])
ck_moe_stage2_fwd = Function("ck_moe_stage2_fwd", "aiter", takes=["quant_type"])
installed_stages = installed(
    moe_sorting, ck_moe_stage1_fwd, ck_moe_stage2_fwd, QuantType, ActivationType
)
# Choices of an expert in a tile, for many tokens and for few.
MANY, FEW = 64, 32
FEW_TOKENS = 32


class Stages:
    """Both products of the choices ids [T, k]; weights in tiles, w13 [E, 2I, H] and w2 [E, H, I].

    is_expert  which ids of `numbered` are experts
    kind       the number of AITER's QuantType
    places     the choices in the order of their experts, each expert's in whole tiles
    count      how many places there are
    """

    def __init__(
        self,
        ids: Tensor,
        weights: Tensor,
        w13: Tensor,
        w2: Tensor,
        is_expert: Tensor,
        kind: int,
        activation: str,
        out_dtype: torch.dtype,
    ):
        (self.tokens, self.k), (hidden, self.inner) = ids.shape, (w2.shape[1], w13.shape[1] // 2)
        rows = MANY if self.tokens > FEW_TOKENS else FEW
        sorted_choices: tuple[Tensor, ...] = moe_sorting(
            numbered(ids, len(w13)),
            weights.to(torch.float32).contiguous(),
            len(is_expert),
            hidden,
            out_dtype,
            rows,
            is_expert,
        )
        self.places, self.routed, experts, self.count, self.out = sorted_choices
        self.products = tiled(w13), tiled(w2), self.places, experts, self.count
        self.how = {
            "block_m": rows,
            "quant_type": QuantType(kind),
            "activation": ActivationType(ACTIVATIONS[activation]),
        }

    def gated(self, x: Tensor, x_scale: Tensor, w13_scale: Tensor) -> Tensor:
        """x [T, H] by gate and up, and their activation: [T, k, I] in out_dtype."""
        out = self.out.new_empty((self.tokens, self.k, self.inner))
        ck_moe_stage1_fwd(
            x,
            *self.products,
            out,
            self.k,
            w1_scale=w13_scale,
            a1_scale=x_scale,
            splitk=0,
            dst_type=out.dtype,
            **self.how,
        )
        return out

    def summed(self, h: Tensor, h_scale: Tensor, w2_scale: Tensor) -> Tensor:
        """h [T, k, I] by down, weighted and summed over the choices: [T, H] in out_dtype."""
        ck_moe_stage2_fwd(
            h,
            *self.products,
            self.out,
            self.k,
            w2_scale=w2_scale,
            a2_scale=h_scale,
            sorted_weights=self.routed,
            **self.how,
        )
        return self.out
