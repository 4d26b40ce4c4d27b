"""Triton kernels of rows: norms, gated activations and quantizers. A kernel takes the strides of its
rows, and none of a weight; it computes in fp32 and rounds once, where nothing else is said.
"""

import torch
from torch import Tensor

from stand_ins import stands_for
from stand_ins.formats import check_codes, largest, mxfp4_even, to_codes
from stand_ins.memory import check, contiguous_view, row_view

FP8_QUANT = ("aiter.ops.triton.quant.fused_fp8_quant", "aiter.ops.triton.fused_fp8_quant")
MXFP4_QUANT = ("aiter.ops.triton.quant.fused_mxfp4_quant", "aiter.ops.triton.fused_mxfp4_quant")
RMS_NORM = ("aiter.ops.triton.normalization.rmsnorm", "aiter.ops.triton.rmsnorm")
LAYER_NORM = ("aiter.ops.triton.normalization.norm", "aiter.ops.triton.norm")
PAD = (
    "aiter.ops.triton.normalization.fused_add_rmsnorm_pad",
    "aiter.ops.triton.fused_add_rmsnorm_pad",
)
QUANT = ("aiter.ops.triton.quant.quant", "aiter.ops.triton.quant")


def _rms(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    width = rows.shape[1]
    normed = rows * torch.rsqrt(rows.square().mean(1, keepdim=True) + epsilon)
    return normed * contiguous_view(weight, width).float()


def _layer(rows: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    width = rows.shape[1]
    centered = rows - rows.mean(1, keepdim=True)
    normed = centered * torch.rsqrt(centered.square().mean(1, keepdim=True) + epsilon)
    return normed * contiguous_view(weight, width).float() + contiguous_view(bias, width).float()


@stands_for(*RMS_NORM)
def rms_norm(input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    check(input.dim() == 2, "not enough values to unpack")
    out = torch.empty_like(input)
    row_view(out).copy_(_rms(row_view(input).float(), weight, epsilon))
    return out


@stands_for(*PAD)
def fused_add_rmsnorm_pad(
    x: Tensor,
    weight: Tensor,
    epsilon: float,
    res: Tensor | None = None,
    x_pad_to_multiple: int = 0,
) -> tuple[Tensor, Tensor] | Tensor:
    """The norm of the sum, with zeros behind up to the multiple, and the sum."""
    rows, width = x.shape
    check(res is None or res.shape == x.shape, "Shape error!")
    total = x.float() if res is None else x.float() + res.float()
    most = -(-width // x_pad_to_multiple) * x_pad_to_multiple if x_pad_to_multiple else width
    out = x.new_zeros(rows, most)
    out[:, :width] = _rms(total, weight, epsilon).to(x.dtype)
    return out if res is None else (out, total.to(res.dtype))


@stands_for(*LAYER_NORM)
def layer_norm(
    input: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, x_bias: Tensor | None = None
) -> Tensor:
    check(x_bias is None, "x_bias: not played")
    out = torch.empty_like(input)
    row_view(out).copy_(_layer(row_view(input).float(), weight, bias, eps))
    return out


@stands_for(*LAYER_NORM)
def layernorm2d_fwd_with_add(
    out: Tensor,
    input: Tensor,
    residual_in: Tensor,
    residual_out: Tensor,
    weight: Tensor,
    bias: Tensor,
    epsilon: float,
    x_bias: Tensor | None = None,
) -> Tensor:
    """The strides of input and out are those of the residuals, too."""
    check(x_bias is None, "x_bias: not played")
    size, strides = tuple(input.shape), (input.stride(0), 1)
    total = row_view(input).float() + residual_in.as_strided(size, strides).float()
    residual_out.as_strided(size, strides).copy_(total)
    row_view(out).copy_(_layer(total, weight, bias, epsilon))
    return out


def _silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    return gate / (1 + (-gate).exp()) * up


def _power_of_two(group: int) -> None:
    check(group > 0 and group & (group - 1) == 0, f"arange's range must be a power of 2: {group}")


def _static(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    check_codes(dtype)
    return to_codes(x, 1.0 / scale, dtype)


def _grouped(x: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of rows in fp32, and scales [rows, groups]; the last group may be smaller."""
    _power_of_two(group)
    check_codes(dtype)
    width = x.shape[1]
    padded = torch.nn.functional.pad(x, (0, -width % group)).unflatten(1, (-1, group))
    scale = padded.abs().amax(-1).clamp(min=1e-10) / largest(dtype)
    codes = to_codes(padded, 1.0 / scale.unsqueeze(-1), dtype)
    return codes.flatten(1)[:, :width].contiguous(), scale


@stands_for(*FP8_QUANT)
def fused_rms_fp8_per_tensor_static_quant(
    inp1: Tensor,
    inp1_weight: Tensor,
    inp1_epsilon: float,
    inp1_scale: Tensor,
    inp2: Tensor | None = None,
    inp2_weight: Tensor | None = None,
    inp2_epsilon: float | None = None,
    dtype_quant: torch.dtype = torch.float8_e4m3fn,
    res1: Tensor | None = None,
    output_unquantized_inp1: bool = False,
    rmsnorm_convert_to_inp1_type: bool = False,
) -> tuple[Tensor, Tensor | None, None, Tensor | None]:
    """Codes, the norm if asked for, and the sum. The norm is rounded before it is quantized where
    rmsnorm_convert_to_inp1_type says so.
    """
    check(inp2 is None, "a second input: not played")
    total = inp1.float() if res1 is None else inp1.float() + res1.float()
    normed = _rms(total, inp1_weight, inp1_epsilon)
    rounded = normed.to(inp1.dtype)
    codes = _static(
        rounded if rmsnorm_convert_to_inp1_type else normed,
        contiguous_view(inp1_scale, 1),
        dtype_quant,
    )
    return (
        codes,
        rounded if output_unquantized_inp1 else None,
        None,
        None if res1 is None else total.to(inp1.dtype),
    )


@stands_for(*FP8_QUANT)
def fused_rms_fp8_group_quant(
    inp1: Tensor,
    inp1_weight: Tensor,
    inp1_epsilon: float,
    inp2: Tensor | None = None,
    inp2_weight: Tensor | None = None,
    inp2_epsilon: float | None = None,
    group_size: int = 128,
    dtype_quant: torch.dtype = torch.float8_e4m3fn,
    res1: Tensor | None = None,
    output_unquantized_inp1: bool = False,
    transpose_scale: bool = False,
    is_x_scale_strided: bool = False,
) -> tuple[tuple[Tensor, Tensor], Tensor | None, None, Tensor | None]:
    """Scales [rows, groups]; transposed: the bytes of [groups, rows] in that shape."""
    check(inp2 is None and not is_x_scale_strided, "not played")
    total = inp1.float() if res1 is None else inp1.float() + res1.float()
    normed = _rms(total, inp1_weight, inp1_epsilon)
    codes, scale = _grouped(normed, group_size, dtype_quant)
    return (
        (codes, scale.t().contiguous().view(scale.shape) if transpose_scale else scale),
        normed.to(inp1.dtype) if output_unquantized_inp1 else None,
        None,
        None if res1 is None else total.to(inp1.dtype),
    )


@stands_for(*MXFP4_QUANT)
def fused_rms_mxfp4_quant(
    x1: Tensor,
    x1_weight: Tensor,
    x1_epsilon: float,
    x2: Tensor | None = None,
    x2_weight: Tensor | None = None,
    x2_epsilon: float = 0.0,
    res1: Tensor | None = None,
    shuffle: bool | None = False,
    scale_shuffle_padding: bool | None = False,
    output_unquantized_inp1: bool = False,
    inargs: str = "auto",
) -> tuple[tuple[Tensor, Tensor], Tensor | None, None, Tensor | None]:
    check(x2 is None and not shuffle and not scale_shuffle_padding, "not played")
    total = x1.float() if res1 is None else x1.float() + res1.float()
    normed = _rms(total, x1_weight, x1_epsilon)
    return (
        mxfp4_even(normed),
        normed.to(x1.dtype) if output_unquantized_inp1 else None,
        None,
        None if res1 is None else total.to(x1.dtype),
    )


@stands_for(*FP8_QUANT)
def fused_silu_mul_fp8_per_tensor_static_quant(
    inp: Tensor,
    inp_scale: Tensor,
    dtype_quant: torch.dtype = torch.float8_e4m3fn,
    silu_convert_to_inp_type: bool = False,
) -> Tensor:
    product = _silu_and_mul(inp)
    rounded = product.to(inp.dtype) if silu_convert_to_inp_type else product
    return _static(rounded, contiguous_view(inp_scale, 1), dtype_quant)


@stands_for("aiter.ops.triton.activation")
def act_mul_and_fp8_group_quant(
    x: Tensor, activation: str, group_size: int, dtype_quant: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    check(activation == "silu", "other activations: not played")
    return _grouped(_silu_and_mul(x), group_size, dtype_quant)


@stands_for(*MXFP4_QUANT)
def fused_reduce_act_mul_and_mxfp4_quant(
    x: Tensor,
    activation: str,
    x2: Tensor | None = None,
    scaling_mode: str = "even",
    shuffle: bool = False,
    scale_shuffle_padding: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[tuple[Tensor, Tensor], None]:
    check(activation == "silu" and x2 is None and scaling_mode == "even", "not played")
    check(not shuffle and not scale_shuffle_padding, "shuffled scales: not played")
    return mxfp4_even(_silu_and_mul(x)), None


@stands_for(*QUANT)
def dynamic_mxfp4_quant(x: Tensor, scaling_mode: str = "even") -> tuple[Tensor, Tensor]:
    check(x.dim() == 2 and scaling_mode == "even", "not played")
    return mxfp4_even(x)


@stands_for(*FP8_QUANT)
def fused_flatten_fp8_group_quant(
    x: Tensor,
    group_size: int,
    dtype_quant: torch.dtype = torch.float8_e4m3fn,
    transpose_scale: bool = False,
) -> tuple[Tensor, Tensor]:
    """x [rows, N1, N2] as rows of N1 * N2 columns; each N2 begins a group."""
    check(not transpose_scale, "not played")
    check(x.shape[1] == 1, "several parts: not played")
    return _grouped(x.float().flatten(1), group_size, dtype_quant)
