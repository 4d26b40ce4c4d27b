"""Mixtures of experts in Triton: choices in blocks of one expert, and the products of these.

The kernels take the strides of rows, weights and scales; ids and weights of choices follow each
other.
"""

import torch
from torch import Tensor

from stand_ins import ARCH, stands_for
from stand_ins.formats import e2m1_numbers, e8m0
from stand_ins.memory import check, contiguous_view


@stands_for("aiter.ops.triton.moe.moe_align_block_size")
def moe_align_block_size_triton(
    topk_ids: Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_pad: Tensor,
) -> None:
    """The numbers of choices expert by expert, each expert's up to whole blocks with a number that is
    none; the expert of each block; how many there are.
    """
    ids = contiguous_view(topk_ids, topk_ids.numel()).long()
    check(bool(((ids >= 0) & (ids < num_experts)).all()), "an id of no expert")
    start = 0
    for expert in range(num_experts):
        chosen = (ids == expert).nonzero().flatten()
        blocks = -(-len(chosen) // block_size)
        sorted_token_ids[start : start + len(chosen)] = chosen.to(sorted_token_ids.dtype)
        expert_ids[start // block_size : start // block_size + blocks] = expert
        start += blocks * block_size
    num_tokens_post_pad.fill_(start)


def _multiply(
    rows: Tensor,
    weights: Tensor,
    out: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    length: Tensor,
    block: int,
    top_k: int,
    factors: Tensor | None,
) -> None:
    """Into out [T, k, N], of each choice its row by its expert; zeros for expert -1."""
    choices = out.flatten(0, 1)
    count = len(choices)
    for i in range(int(length) // block):
        chosen = sorted_token_ids[i * block : (i + 1) * block].long()
        chosen = chosen[chosen < count]
        expert = int(expert_ids[i])
        if expert < 0:
            choices[chosen] = 0
            continue
        product = rows[chosen // top_k].float() @ weights[expert].t()
        if factors is not None:
            product = product * factors[chosen][:, None]
        choices[chosen] = product.to(out.dtype)


@stands_for("aiter.ops.triton.moe.moe_op")
def fused_moe(
    A: Tensor,
    B: Tensor,
    C: Tensor,
    A_scale: Tensor | None,
    B_scale: Tensor | None,
    B_zp: Tensor | None,
    topk_weights: Tensor,
    topk_ids: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    mul_routed_weight: bool,
    top_k: int,
    compute_type: object,
    use_fp8_w8a8: bool,
    use_int8_w8a16: bool,
    use_int4_w4a16: bool,
    block_shape: list[int] | None = None,
    config: dict[str, int] | None = None,
) -> None:
    """A [T, K], or a row for each choice, by B [E, N, K]; int4 are the low and the high halves of
    bytes [E, N, K/2], less 8 or the zeros of two outputs a byte [E, N/2, groups], times their
    scales [E, N, groups], rounded to the dtype of A.
    """
    check(A_scale is None and not use_fp8_w8a8 and not use_int8_w8a16, "not played")
    check(str(compute_type).removeprefix("torch.") in ("bf16", "fp16", "fp32"), f"{compute_type}")
    assert config is not None
    weights = B.float()
    if use_int4_w4a16:
        assert B_scale is not None and block_shape is not None and block_shape[0] == 0
        check(B.dtype == torch.uint8, "int4 is in uint8")
        numbers = torch.stack((B & 15, B >> 4), -1).flatten(-2).float()
        zeros: Tensor | float = 8.0
        if B_zp is not None:
            zeros = torch.stack((B_zp & 15, B_zp >> 4), 2).flatten(1, 2).float()
            zeros = zeros.repeat_interleave(block_shape[1], -1)
        scales = B_scale.float().repeat_interleave(block_shape[1], -1)
        weights = ((numbers - zeros) * scales).to(A.dtype).float()
    else:
        check(A.dtype == B.dtype == C.dtype, "both operands of a dot have one dtype")
    factors = contiguous_view(topk_weights, topk_ids.numel()) if mul_routed_weight else None
    places = sorted_token_ids, expert_ids, num_tokens_post_padded
    _multiply(A, weights, C, *places, config["BLOCK_SIZE_M"], top_k, factors)


@stands_for("aiter.ops.triton.moe.moe_op_mxfp4")
def fused_moe_mxfp4(
    A: Tensor,
    B: Tensor,
    C: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    A_mx_scale: Tensor | None,
    B_mx_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    mul_routed_weight: bool,
    top_k: int,
    swizzle_mx_a: bool,
    swizzle_mx_b: bool,
    config: dict[str, int],
    compute_type: object,
) -> None:
    """A [T, K] in bf16 by e2m1 in bytes [E, N, K/2] under e8m0 scales [E, N, K/32]. A last tile of
    inputs that is not whole is masked as if a byte were one.
    """
    check(A_mx_scale is None and not swizzle_mx_a and not swizzle_mx_b, "not played")
    check(ARCH.get() == "gfx950", "its Triton does not compile this product for gfx942")
    check(A.dtype == torch.bfloat16 and B.dtype == torch.uint8, "bf16 by e2m1")
    weights = e2m1_numbers(B) * e8m0(B_mx_scale).repeat_interleave(32, -1)
    seen = A.shape[1] - A.shape[1] % config["BLOCK_SIZE_K"]
    weights[..., seen:] = 0.0
    check(bool((A_scale == 1).all() and (B_scale == 1).all()), "scales of tensors: not played")
    factors = contiguous_view(topk_weights, topk_ids.numel()) if mul_routed_weight else None
    places = sorted_token_ids, expert_ids, num_tokens_post_padded
    _multiply(A, weights, C, *places, config["BLOCK_SIZE_M"], top_k, factors)
