"""Quantizers of activations, HIP."""

import torch
from torch import Tensor

from stand_ins import stands_for
from stand_ins.formats import (
    check_codes,
    e2m1_bytes,
    e8m0,
    e8m0_round_up,
    largest,
    scale_place,
    to_codes,
)
from stand_ins.memory import check, contiguous_view, fp32, spill

HALVES = (torch.bfloat16, torch.float16)
# Rows of these widths are taken for groups.
GROUPS = (32, 64, 128)


@stands_for("aiter")
def static_per_tensor_quant(out: Tensor, input: Tensor, scale: Tensor) -> None:
    check(input.dtype in HALVES, f"no 16-bit type: {input.dtype}")
    check_codes(out.dtype)
    width = input.shape[-1]
    x = contiguous_view(input, input.numel() // width, width)
    codes = contiguous_view(out, *x.shape)
    codes.copy_(to_codes(x, 1.0 / fp32(scale, "scale", 1), out.dtype))
    spill(codes.view(torch.uint8))


@stands_for("aiter")
def dynamic_per_token_scaled_quant(
    out: Tensor,
    input: Tensor,
    scales: Tensor,
    scale_ub: Tensor | None = None,
    shuffle_scale: bool = False,
    num_rows: Tensor | None = None,
    num_rows_factor: int = 1,
) -> None:
    """A scale for each row of the input. Rows of 32, 64 or 128 are groups of the rows of `out`; if
    their scales are shuffled, all rows' scales of one group follow each other.
    """
    check(input.is_contiguous() and out.is_contiguous(), "input and out are contiguous")
    check(scale_ub is None and num_rows is None, "scale_ub and num_rows: not played")
    check(input.dtype in HALVES, f"no 16-bit type: {input.dtype}")
    check_codes(out.dtype)
    width = input.shape[-1]
    x = input.view(-1, width).float()
    grouped = width in GROUPS
    check(grouped or not shuffle_scale, "scales of whole rows are not shuffled")
    amax = x.abs().amax(1, keepdim=True).clamp(min=1e-10 if grouped else 0.0)
    found = amax * (1.0 / largest(out.dtype))
    of_out = found.view(-1, out.shape[-1] // width) if grouped else found
    fp32(scales, "scales", found.numel()).copy_((of_out.t() if shuffle_scale else of_out).flatten())
    codes = contiguous_view(out, *x.shape)
    codes.copy_(to_codes(x, 1.0 / found, out.dtype))
    if not grouped:
        spill(codes.view(torch.uint8))


@stands_for("aiter")
def dynamic_per_group_scaled_quant_fp4(
    out: Tensor,
    input: Tensor,
    scales: Tensor,
    group_size: int = 32,
    shuffle_scale: bool = True,
    num_rows: Tensor | None = None,
    num_rows_factor: int = 1,
) -> None:
    """e2m1 under e8m0 scales that are rounded up."""
    check(out.dtype in (torch.float4_e2m1fn_x2, torch.uint8), "expects fp4x2 / uint8 output")
    check(scales.dtype in (torch.float8_e8m0fnu, torch.uint8), "expects scales in fp8_e8m0 or u8")
    check(group_size in GROUPS, "only support group_size [32, 64 , 128]")
    check(out.is_contiguous(), "out is contiguous")
    check(num_rows is None, "num_rows: not played")
    check(input.dtype in HALVES, f"no 16-bit type: {input.dtype}")
    width = input.shape[-1]
    check(width % group_size == 0, "cols is not divisible by group_size")
    rows = input.numel() // width
    x = input.as_strided((rows, width), (input.stride(-2), 1)).float()
    grouped = (
        x.view(rows, -1, group_size) if x.is_contiguous() else x.unflatten(1, (-1, group_size))
    )
    groups = grouped.shape[1]
    found = e8m0_round_up(grouped.abs().amax(-1).clamp(min=1e-10))
    place = torch.arange(rows * groups).view(rows, groups)
    if shuffle_scale:
        check(group_size == 32, "groups of more columns are transposed: not played")
        place = scale_place(torch.arange(rows)[:, None], torch.arange(groups), -(-groups // 8) * 8)
    scales.view(torch.uint8).view(-1)[place] = found
    codes = e2m1_bytes((grouped / e8m0(found).unsqueeze(-1)).flatten(1))
    out.view(torch.uint8).view(-1).copy_(codes.view(-1))
