"""Mixtures of experts by AITER's fused_moe: it sorts the choices by expert and runs CK's or
assembly's kernels, which its tables choose for a shape.

Its weights lie in tiles (packing). It takes codes with their scales as it takes 16 bits, where no
kernel of its tables reads x in 16 bits: not by blocks (experts_blocks.py), nor in MXFP4
(experts_mxfp4.py).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from atomc import ops
from atomc.kernels.aiter.library import Function, foreign_fp8, installed
from atomc.kernels.aiter.linear.packing import relaid_weight, shuffled_weight
from atomc.kernels.checks import first_refusal, named, unknown, unlike, unsupported, wrong_result
from atomc.ops.formats import HALVES
from atomc.ops.op import Prepared, Refusal
from atomc.platform import Platform

fused_moe = Function(
    "fused_moe",
    "aiter.fused_moe",
    takes=["expert_mask", "doweight_stage1", "a1_scale", "a2_scale", "dtype"],
)
# Enums: a number -> the member.
QuantType = Function("QuantType", "aiter")
ActivationType = Function("ActivationType", "aiter")
UNQUANTIZED, PER_TENSOR, PER_TOKEN = 0, 1, 2
ACTIVATIONS = {"silu": 0, "gelu": 1}
# Up to this inner width, CK's kernels have narrower tiles.
NARROW = 192


def relaid_gate_up(weight: Tensor) -> Prepared:
    """And which ids of `numbered` are experts: [E + 2] int32, 0 for the first and the last."""
    experts = torch.ones(len(weight), dtype=torch.int32, device=weight.device)
    return Prepared((shuffled_weight(weight), pad(experts, (1, 1))))


def numbered(ids: Tensor, experts: int) -> Tensor:
    """Expert e as e + 1, and experts of other devices as 0 or experts + 1; contiguous int32."""
    return (ids.clamp(-1, experts) + 1).to(torch.int32).contiguous()


def tiled(weight: Tensor) -> Tensor:
    """Says on the tensor itself that it lies in tiles: AITER looks there."""
    vars(weight)["is_shuffled"] = True
    return weight


def _computed(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: tuple[Tensor, Tensor],
    w2: tuple[Tensor],
    activation: str,
    kind: int,
    **how: object,
) -> Tensor:
    """fused_moe of prepared weights. AITER's tables count one choice more, of no expert, wherever
    experts are masked.
    """
    (gate_up, is_expert), [down] = w13, w2
    out: Tensor = fused_moe(
        x.contiguous(),
        tiled(gate_up),
        tiled(down),
        pad(weights.to(torch.float32), (0, 1)),
        pad(numbered(ids, len(gate_up)), (0, 1)),
        is_expert,
        ActivationType(ACTIVATIONS[activation]),
        QuantType(kind),
        **how,
    )
    return out


# What its kernels do not add to the products, or do with a gate.
ungated = named("b13 b2 interleaved limit", unsupported, "AITER's kernel")


def unfilled(platform: Platform, w2: Tensor) -> Refusal | None:
    """Why these do not fill the tiles of CK's kernels for each number of tokens, or None."""
    hidden, inner = w2.shape[1:]
    columns = 64 if inner <= NARROW else 128
    if w2.dtype.itemsize == 1 and platform.arch == "gfx950":
        columns = 256
    if hidden % 128 or inner % columns:
        return Refusal(
            "shape",
            f"experts of {hidden} x {inner} do not fill CK's tiles of 128 x {columns}",
        )
    return None


@ops.moe_experts.kernel(
    "aiter",
    refuses=first_refusal(
        installed(fused_moe, QuantType, ActivationType),
        named("x", unlike, HALVES),
        ungated,
        named("activation", unknown, tuple(ACTIVATIONS)),
        unfilled,
    ),
    prepare={"w13": relaid_gate_up, "w2": relaid_weight},
    rounds="once",
)
def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: tuple[Tensor, Tensor],
    w2: tuple[Tensor],
    activation: str,
    weight_on_input: bool,
) -> Tensor:
    if not x.shape[0]:
        return torch.empty_like(x)
    return _computed(
        x, ids, weights, w13, w2, activation, UNQUANTIZED, doweight_stage1=weight_on_input
    )


def _other_scales(
    x_scale: Tensor, w13_scale: Tensor, w2_scale: Tensor, act_scale: Tensor | None, block: int
) -> Refusal | None:
    if block:
        return Refusal("argument", "AITER's tables have kernels by blocks that read x in 16 bits")
    of_rows = act_scale is None or w13_scale.shape[1] > 1 or w2_scale.shape[1] > 1
    if x_scale.dim() == 1 and of_rows:
        return Refusal(
            "argument",
            "under one scale for x, AITER takes one for the gated activation and for each expert",
        )
    if x_scale.dim() > 1 and act_scale is not None:
        return Refusal(
            "argument", "under a scale for each token, AITER finds those of the gated activation"
        )
    return None


def foreign_experts(
    platform: Platform, x: Tensor, w13: Tensor, w2: Tensor, out_dtype: torch.dtype
) -> Refusal | None:
    """Unless the codes are the machine's, and the result has 16 bits."""
    return foreign_fp8(platform, x.dtype, w13.dtype, w2.dtype) or wrong_result(HALVES, out_dtype)


def _other_activation(x_scale: Tensor, activation: str) -> Refusal | None:
    # The assembly of rows under scales of their own: which GELU it has, is not known.
    return unknown(tuple(ACTIVATIONS) if x_scale.dim() == 1 else ("silu",), activation=activation)


@ops.moe_experts_fp8.kernel(
    "aiter",
    refuses=first_refusal(
        installed(fused_moe, QuantType, ActivationType),
        _other_scales,
        foreign_experts,
        ungated,
        _other_activation,
        unfilled,
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
    act_scale: Tensor | None,
    out_dtype: torch.dtype,
    activation: str,
) -> Tensor:
    if not x.shape[0]:
        return torch.empty_like(x, dtype=out_dtype)
    per_tensor = x_scale.dim() == 1
    if not per_tensor:  # one scale of an expert is one for each of its outputs
        w13_scale = w13_scale.expand(*w13[0].shape[:2], 1)
        w2_scale = w2_scale.expand(*w2[0].shape[:2], 1)
    return _computed(
        x,
        ids,
        weights,
        w13,
        w2,
        activation,
        PER_TENSOR if per_tensor else PER_TOKEN,
        w1_scale=w13_scale.contiguous(),
        w2_scale=w2_scale.contiguous(),
        a1_scale=x_scale.contiguous(),
        a2_scale=act_scale,
        dtype=out_dtype,
    )
