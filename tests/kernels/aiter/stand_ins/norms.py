"""Norms: HIP kernels for up to 8192 columns of 16 bits, CK for LayerNorm."""

import torch
from torch import Tensor

from stand_ins import stands_for
from stand_ins.formats import (
    check_codes,
    e2m1_bytes,
    e8m0,
    e8m0_round_up,
    largest,
    native_fp8,
    scale_place,
    to_codes,
)
from stand_ins.memory import check, contiguous_view, row_view, spill

HALVES = (torch.bfloat16, torch.float16)


def _check_rms(x: Tensor, weight: Tensor, *others: Tensor) -> None:
    check(x.dim() == 2, "rows are counted by size(1)")
    check(x.dtype in HALVES, f"no 16-bit type: {x.dtype}")
    check(x.shape[1] <= 8192, f"does not support n: {x.shape[1]}")
    for other in (weight, *others):
        check(other.dtype == x.dtype, f"{other.dtype} would be read as {x.dtype}")


def _rms(total: Tensor, weight: Tensor, epsilon: float, gemma_norm: bool) -> Tensor:
    """fp32 from the unrounded sum on."""
    width = total.shape[1]
    factor = contiguous_view(weight, width).float() + (1.0 if gemma_norm else 0.0)
    return total * torch.rsqrt(total.square().sum(1, keepdim=True) / width + epsilon) * factor


def _sum(x: Tensor, residual_in: Tensor, residual_out: Tensor) -> Tensor:
    size = row_view(x).shape
    total = row_view(x).float() + residual_in.as_strided(size, (residual_in.stride(0), 1)).float()
    row_view(residual_out).copy_(total)
    spill(row_view(residual_out))
    return total


@stands_for("aiter")
def rmsnorm(
    out: Tensor, input: Tensor, weight: Tensor, epsilon: float, gemma_norm: bool = False
) -> None:
    _check_rms(input, weight, out)
    row_view(out).copy_(_rms(row_view(input).float(), weight, epsilon, gemma_norm))
    spill(row_view(out))


@stands_for("aiter")
def rmsnorm2d_fwd(
    input: Tensor, weight: Tensor, epsilon: float, use_model_sensitive_rmsnorm: int = 0
) -> Tensor:
    check(use_model_sensitive_rmsnorm == 0, "T5's norm rounds in between")
    out = torch.empty_like(input)
    rmsnorm(out, input, weight, epsilon)
    return out


@stands_for("aiter")
def rmsnorm2d_fwd_with_add(
    out: Tensor,
    input: Tensor,
    residual_in: Tensor,
    residual_out: Tensor,
    weight: Tensor,
    epsilon: float,
    gemma_norm: bool = False,
    use_model_sensitive_rmsnorm: int = 0,
) -> None:
    check(use_model_sensitive_rmsnorm == 0, "T5's norm rounds in between")
    _check_rms(input, weight, out, residual_in, residual_out)
    total = _sum(input, residual_in, residual_out)
    row_view(out).copy_(_rms(total, weight, epsilon, gemma_norm))
    spill(row_view(out))


def _columns_per_thread(width: int, group: int, residual: bool) -> int:
    """Of the kernel that is launched for rows of this width (on a GPU of 160 units or more)."""
    for most, columns in ((2048, 8), (4096, 16), (6144, 24)):
        if width <= most:
            return columns
    return 8 if residual and group else 32


def _quantized(
    out: Tensor, scale: Tensor, normed: Tensor, group: int, shuffle: bool, residual: bool
) -> None:
    rows, width = normed.shape
    per_thread = _columns_per_thread(width, group, residual)
    check(group % per_thread == 0 and group <= 64 * per_thread, f"group_size not support: {group}")
    threads = group // per_thread
    check(threads & (threads - 1) == 0, "reduce_thread_size is not power of 2")
    bytes_as_scales = scale.element_size() == 1
    check(not bytes_as_scales or group != 0, "e8m0 byte scale requires group_size != 0")
    fp4 = out.dtype == torch.float4_e2m1fn_x2
    if fp4:
        check(group != 0, "fused quant fp4x2 not support per token quant")
        check(scale.element_size() == 1, "the scales of fp4 are bytes")
    else:
        check_codes(out.dtype)
        check(not bytes_as_scales or out.dtype == native_fp8(), "i8 does not support e8m0")
        check(not bytes_as_scales, "fp8 under e8m0 scales: not played")
    grouped = normed.view(rows, -1, group or width)
    amax = grouped.abs().amax(-1).clamp(min=1e-10)
    groups = amax.shape[1]
    if fp4:
        found = e8m0_round_up(amax)
        place = torch.arange(rows * groups).view(rows, groups)
        if shuffle:
            place = scale_place(
                torch.arange(rows)[:, None], torch.arange(groups), -(-groups // 8) * 8
            )
        scale.view(torch.uint8).view(-1)[place] = found
        codes = e2m1_bytes((grouped / e8m0(found).unsqueeze(-1)).view(rows, width))
        row_view(out.view(torch.uint8)).copy_(codes)
        return
    check(scale.dtype == torch.float32, "scales are written as float")
    found = amax * (1.0 / largest(out.dtype))
    contiguous_view(scale, rows * groups).copy_((found.t() if shuffle else found).flatten())
    codes = to_codes(grouped, 1.0 / found.unsqueeze(-1), out.dtype).view(rows, width)
    row_view(out).copy_(codes)
    spill(row_view(out).view(torch.uint8))


@stands_for("aiter")
def rmsnorm_quant(
    out: Tensor,
    input: Tensor,
    scale: Tensor,
    weight: Tensor,
    epsilon: float,
    group_size: int = 0,
    shuffle_scale: bool = False,
    gemma_norm: bool = False,
) -> None:
    _check_rms(input, weight)
    normed = _rms(row_view(input).float(), weight, epsilon, gemma_norm)
    _quantized(out, scale, normed, group_size, shuffle_scale, residual=False)


@stands_for("aiter")
def add_rmsnorm_quant(
    out: Tensor,
    input: Tensor,
    residual_in: Tensor,
    residual_out: Tensor,
    scale: Tensor,
    weight: Tensor,
    epsilon: float,
    group_size: int = 0,
    shuffle_scale: bool = False,
    gemma_norm: bool = False,
) -> None:
    _check_rms(input, weight, residual_in, residual_out)
    total = _sum(input, residual_in, residual_out)
    normed = _rms(total, weight, epsilon, gemma_norm)
    _quantized(out, scale, normed, group_size, shuffle_scale, residual=True)


def _check_pair(**tensors: Tensor | None) -> None:
    """What the kernel for two norms asks of rows [M, N], by their own stride, and of weights [N]."""
    for name, x in tensors.items():
        if x is not None:
            check(x.stride(-1) == 1, f"{name} must have stride(1)==1")
            check(x.dim() == 1 or x.stride(0) >= x.shape[1], f"{name} has invalid stride(0)")


def _pair(
    q: Tensor,
    q_weight: Tensor,
    q_epsilon: float,
    q_out_unquantized: Tensor | None,
    k_out: Tensor | None,
    k: Tensor | None,
    k_weight: Tensor | None,
    k_epsilon: float | None,
    gemma_norm: bool,
) -> tuple[Tensor, int]:
    """The norm of q in fp32, and the larger of the two widths; that of k is written."""
    if k is None or k_weight is None or k_out is None or k_epsilon is None:
        raise NotImplementedError("q alone is not played")
    check(q.dim() == k.dim() == 2 and q.shape[0] == k.shape[0], "the same leading dim")
    check(q_weight.shape == q.shape[1:] and k_weight.shape == k.shape[1:], "weight shape mismatch")
    check(q.dtype in HALVES, f"q only supports fp16/bf16, got: {q.dtype}")
    outs = [x for x in (q_out_unquantized, k_out) if x is not None]
    check(
        {x.dtype for x in (k, q_weight, k_weight, *outs)} == {q.dtype}, "must have the same dtype"
    )
    _check_pair(q=q, q_weight=q_weight, q_out_unquantized=q_out_unquantized)
    _check_pair(k=k, k_weight=k_weight, k_out=k_out)
    width = max(q.shape[1], k.shape[1])
    check(width <= 8192, "fused kernel only supports n1/n2 <= 8192")
    normed = _rms(row_view(q).float(), q_weight, q_epsilon, gemma_norm)
    for out, norm in (
        (q_out_unquantized, normed),
        (k_out, _rms(row_view(k).float(), k_weight, k_epsilon, gemma_norm)),
    ):
        if out is not None:
            row_view(out).copy_(norm)
            spill(row_view(out))
    return normed, width


@stands_for("aiter")
def fused_qk_rmsnorm_group_quant(
    q_out_quantized: Tensor | None = None,
    q_out_scale: Tensor | None = None,
    q: Tensor | None = None,
    q_weight: Tensor | None = None,
    q_epsilon: float = 1e-6,
    q_out_unquantized: Tensor | None = None,
    k_out: Tensor | None = None,
    q_res_out: Tensor | None = None,
    k: Tensor | None = None,
    k_weight: Tensor | None = None,
    k_epsilon: float | None = None,
    q_residual: Tensor | None = None,
    group_size: int = 128,
    transpose_scale: bool = False,
    gemma_norm: bool = False,
) -> None:
    """The norms of q [M, N1] and k [M, N2], that of q in codes under scales [M, groups] in the
    strides of the scales. Without scales only the norms are written.
    """
    if q is None or q_weight is None or q_residual is not None or q_res_out is not None:
        raise NotImplementedError("a residual is not played")
    parts = (q_out_unquantized, k_out, k, k_weight, k_epsilon)
    normed, widest = _pair(q, q_weight, q_epsilon, *parts, gemma_norm)
    if q_out_scale is None:
        check(q_out_unquantized is not None, "q_out_unquantized must be provided")
        return
    check(q_out_quantized is not None, "q_out_quantized must be provided")
    assert q_out_quantized is not None
    (rows, width), codes, scale = normed.shape, q_out_quantized, q_out_scale
    fp4 = codes.dtype == torch.float4_e2m1fn_x2
    check(fp4 or codes.dtype == native_fp8(), f"supports fp8/fp4x2 output only; got {codes.dtype}")
    check(group_size > 0 and width % group_size == 0, "must be divisible by group_size")
    per_thread = 8 if widest <= 1024 else 16
    if not fp4 and widest <= 128:
        per_thread = 4
    check(group_size in (32, 64, 128), f"unsupported group_size={group_size}")
    check(group_size % per_thread == 0, f"group_size must be divisible by {per_thread}")
    groups = width // group_size
    check(scale.shape == (rows, groups), "q_out_scale shape mismatch")
    check(not (fp4 and transpose_scale), "fp4x2 does not support transpose_scale=True")
    check(
        scale.stride() == (1, rows) if transpose_scale else scale.stride(1) == 1,
        "the strides of q_out_scale",
    )
    check(scale.dtype == (torch.uint8 if fp4 else torch.float32), "q_out_scale dtype")
    grouped = normed.view(rows, groups, group_size)
    amax = grouped.abs().amax(-1).clamp(min=1e-10)
    if fp4:
        scale.copy_(e8m0_round_up(amax))
        codes_of = e2m1_bytes((grouped / e8m0(scale).unsqueeze(-1)).view(rows, width))
        row_view(codes.view(torch.uint8)).copy_(codes_of)
        return
    scale.copy_(amax * (1.0 / largest(codes.dtype)))
    row_view(codes).copy_(to_codes(grouped, 1.0 / scale.unsqueeze(-1), codes.dtype).flatten(1))


@stands_for("aiter")
def fused_qk_rmsnorm_per_token_quant(
    q_out_quantized: Tensor,
    q_out_scale: Tensor,
    q: Tensor,
    q_weight: Tensor,
    q_epsilon: float,
    q_out_unquantized: Tensor | None = None,
    k_out: Tensor | None = None,
    q_res_out: Tensor | None = None,
    k: Tensor | None = None,
    k_weight: Tensor | None = None,
    k_epsilon: float | None = None,
    q_residual: Tensor | None = None,
    gemma_norm: bool = False,
) -> None:
    """As fused_qk_rmsnorm_group_quant, with scales [M, 1] in fp8."""
    if q_residual is not None or q_res_out is not None:
        raise NotImplementedError("a residual is not played")
    check(q_out_quantized.dtype == native_fp8(), "supports fp8 output quant only")
    parts = (q_out_unquantized, k_out, k, k_weight, k_epsilon)
    normed, _ = _pair(q, q_weight, q_epsilon, *parts, gemma_norm)
    check(q_out_scale.shape == (len(normed), 1), "expects q_out_scale with shape [m, 1]")
    check(q_out_scale.dtype == torch.float32, "q_out_scale dtype must be float32")
    q_out_scale.copy_(normed.abs().amax(1, keepdim=True).clamp(min=1e-10) / largest(native_fp8()))
    row_view(q_out_quantized).copy_(to_codes(normed, 1.0 / q_out_scale, q_out_quantized.dtype))
    spill(row_view(q_out_quantized).view(torch.uint8))


def _check_layer(x: Tensor, weight: Tensor, bias: Tensor) -> None:
    check(x.dtype in HALVES, "ck layernorm2d only support fp16 and bf16 data type")
    check(weight is not None and bias is not None, "both are read")
    check(weight.dtype == x.dtype and bias.dtype == x.dtype, "weight/bias dtype match input dtype")


def _layer(total: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    width = total.shape[1]
    centered = total - total.mean(1, keepdim=True)
    normed = centered * torch.rsqrt(centered.square().mean(1, keepdim=True) + epsilon)
    return normed * contiguous_view(weight, width).float() + contiguous_view(bias, width).float()


@stands_for("aiter")
def layernorm2d_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    epsilon: float = 1e-5,
    x_bias: Tensor | None = None,
) -> Tensor:
    check(x_bias is None, "x_bias: not played")
    _check_layer(input, weight, bias)
    out = torch.empty_like(input)
    row_view(out).copy_(_layer(row_view(input).float(), weight, bias, epsilon))
    return out


@stands_for("aiter")
def layernorm2d_fwd_with_add(
    out: Tensor,
    input: Tensor,
    residual_in: Tensor,
    residual_out: Tensor,
    weight: Tensor,
    bias: Tensor,
    epsilon: float,
    x_bias: Tensor | None = None,
) -> None:
    check(x_bias is None, "x_bias: not played")
    _check_layer(input, weight, bias)
    total = row_view(input).float() + row_view(residual_in).float()
    row_view(residual_out).copy_(total)
    row_view(out).copy_(_layer(total, weight, bias, epsilon))
