"""Rotary positions in HIP: in fp32, rounded once."""

import torch
from torch import Tensor

from stand_ins import stands_for

NEOX, GPTJ = 0, 1


def table(x: Tensor, positions: int) -> Tensor:
    """A table [positions, 1, 1, columns] as the kernel reads it: row after row from its first
    element.
    """
    return x.as_strided((positions, x.shape[-1]), (x.shape[-1], 1), x.storage_offset()).float()


def rotated(
    x: Tensor, cos: Tensor, sin: Tensor, rotate_style: int, half_tables: bool, nope_first: bool
) -> Tensor:
    """x [S, B, H, D], cos and sin [S, columns] fp32."""
    if rotate_style not in (NEOX, GPTJ):
        raise RuntimeError(f"rotate_style {rotate_style} is not known")
    columns = cos.shape[-1] * 2 if half_tables else cos.shape[-1]
    start = x.shape[-1] - columns if nope_first else 0
    part = x[..., start : start + columns].float()
    if rotate_style == NEOX:
        first, second = list(range(columns // 2)), list(range(columns // 2, columns))
    else:
        first, second = list(range(0, columns, 2)), list(range(1, columns, 2))
    # Which column of the tables each element of a pair reads.
    if half_tables:
        of_first = of_second = list(range(columns // 2))
    else:
        of_first, of_second = first, second
    cos, sin = cos[:, None, None, :], sin[:, None, None, :]
    turned = torch.empty_like(part)
    turned[..., first] = (
        part[..., first] * cos[..., of_first] - part[..., second] * sin[..., of_first]
    )
    turned[..., second] = (
        part[..., second] * cos[..., of_second] + part[..., first] * sin[..., of_second]
    )
    out = x.clone()
    out[..., start : start + columns] = turned.to(x.dtype)
    return out


@stands_for("aiter")
def rope_cached_fwd_impl(
    output: Tensor,
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
) -> None:
    """input [S, B, H, D] into output, tables [S, 1, 1, D/2] (reuse_freqs_front_part) or [S, 1, 1,
    D]; narrower tables rotate fewer columns, the last ones if nope_first.
    """
    if input.stride(3) != 1 or output.stride(3) != 1:
        raise RuntimeError("rope_cached_fwd_impl requires all stride_d to be 1")
    if output.dtype != input.dtype or cos.dtype != sin.dtype:
        raise RuntimeError("the output is written as input.dtype, sin is read as cos.dtype")
    tables = (table(x, input.shape[0]) for x in (cos, sin))
    output.copy_(rotated(input, *tables, rotate_style, reuse_freqs_front_part, nope_first))
