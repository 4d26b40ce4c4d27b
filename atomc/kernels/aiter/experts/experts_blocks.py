"""Mixtures of experts in fp8 with scales by blocks: AITER's sorting and CK's two products, with its
quantizer in between.

Not fused_moe: for some shapes its tables choose kernels that read x in 16 bits, whatever it is.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.experts.experts import (
    ACTIVATIONS,
    foreign_experts,
    relaid_gate_up,
    ungated,
)
from atomc.kernels.aiter.experts.stages import Stages, installed_stages
from atomc.kernels.aiter.library import gapped, installed
from atomc.kernels.aiter.linear.packing import relaid_weight
from atomc.kernels.aiter.rows.quant import dynamic_per_token_scaled_quant
from atomc.kernels.checks import first_refusal, named, unknown
from atomc.ops.op import Refusal

PER_BLOCK = 4
BLOCK = 128


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
        installed_stages,
        installed(dynamic_per_token_scaled_quant),
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
    stages = Stages(ids, weights, gate_up, down, is_expert, PER_BLOCK, activation, out_dtype)
    gated = stages.gated(x.contiguous(), x_scale.contiguous(), w13_scale)
    codes = torch.empty_like(gated, dtype=x.dtype)
    scales = x_scale.new_empty((*gated.shape[:2], gated.shape[2] // BLOCK))
    dynamic_per_token_scaled_quant(codes, gated.view(-1, BLOCK), scales)
    return stages.summed(codes, scales, w2_scale)
