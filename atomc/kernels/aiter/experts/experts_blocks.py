"""Mixtures of experts in fp8 with scales by blocks: AITER's sorting and CK's two products, with its
quantizer in between.

Not fused_moe: for some shapes its tables choose kernels that read x in 16 bits, whatever it is.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.experts.experts import (
    ACTIVATIONS,
    ActivationType,
    QuantType,
    foreign_experts,
    numbered,
    relaid_gate_up,
    tiled,
    ungated,
)
from atomc.kernels.aiter.library import Function, gapped, installed
from atomc.kernels.aiter.linear.packing import relaid_weight
from atomc.kernels.aiter.rows.quant import dynamic_per_token_scaled_quant
from atomc.kernels.checks import first_refusal, named, unknown
from atomc.ops.op import Refusal

moe_sorting = Function("moe_sorting", "aiter.fused_moe", takes=["expert_mask"])
ck_moe_stage1_fwd = Function("ck_moe_stage1_fwd", "aiter", takes=["quant_type", "splitk"])
ck_moe_stage2_fwd = Function("ck_moe_stage2_fwd", "aiter", takes=["quant_type"])
PER_BLOCK = 4
BLOCK = 128
# Choices of an expert in a tile, for many tokens and for few.
MANY, FEW = 64, 32
FEW_TOKENS = 32


def _unscaled(block: int) -> Refusal | None:
    return None if block else Refusal("argument", "this kernel takes scales by blocks")


def _partial_blocks(w2: Tensor, block: int) -> Refusal | None:
    hidden, inner = w2.shape[1:]
    if block != BLOCK or hidden % BLOCK or inner % BLOCK:
        return Refusal(
            "shape",
            f"blocks of {block} in experts of {hidden} x {inner}: AITER takes whole blocks of "
            f"{BLOCK}",
        )
    return None


@ops.moe_experts_fp8.kernel(
    "aiter",
    refuses=first_refusal(
        _unscaled,
        installed(moe_sorting, ck_moe_stage1_fwd, ck_moe_stage2_fwd),
        installed(dynamic_per_token_scaled_quant, QuantType, ActivationType),
        foreign_experts,
        ungated,
        named("activation", unknown, tuple(ACTIVATIONS)),
        named("w13_scale w2_scale", gapped),
        _partial_blocks,
    ),
    prepare={"w13": relaid_gate_up, "w2": relaid_weight},
    rounds="once",
)
def moe_experts_fp8(
    x: Tensor,
    x_scale: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: tuple[Tensor, Tensor],
    w13_scale: Tensor,
    w2: tuple[Tensor],
    w2_scale: Tensor,
    out_dtype: torch.dtype,
    activation: str,
) -> Tensor:
    (gate_up, is_expert), [down] = w13, w2
    if not x.shape[0]:
        return torch.empty_like(x, dtype=out_dtype)
    (tokens, k), (hidden, inner) = ids.shape, down.shape[1:]
    rows = MANY if tokens > FEW_TOKENS else FEW
    sorted_choices: tuple[Tensor, ...] = moe_sorting(
        numbered(ids, len(gate_up)),
        weights.to(torch.float32).contiguous(),
        len(is_expert),
        hidden,
        out_dtype,
        rows,
        is_expert,
    )
    places, routed, experts, count, out = sorted_choices
    products = tiled(gate_up), tiled(down), places, experts, count
    how = {
        "block_m": rows,
        "quant_type": QuantType(PER_BLOCK),
        "activation": ActivationType(ACTIVATIONS[activation]),
    }
    gated = x.new_empty((tokens, k, inner), dtype=out_dtype)
    ck_moe_stage1_fwd(
        x.contiguous(),
        *products,
        gated,
        k,
        w1_scale=w13_scale,
        a1_scale=x_scale.contiguous(),
        splitk=0,
        dst_type=out_dtype,
        **how,
    )
    codes = torch.empty_like(gated, dtype=x.dtype)
    scales = gated.new_empty((tokens, k, inner // BLOCK), dtype=torch.float32)
    dynamic_per_token_scaled_quant(codes, gated.view(-1, BLOCK), scales)
    ck_moe_stage2_fwd(
        codes, *products, out, k, w2_scale=w2_scale, a2_scale=scales, sorted_weights=routed, **how
    )
    return out
