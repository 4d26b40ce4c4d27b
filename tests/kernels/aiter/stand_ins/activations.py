"""Gated activations: the gate is the first half of each row, up the second."""

import math

import torch
from torch import Tensor

from stand_ins import stands_for
from stand_ins.formats import e2m1_bytes, e8m0, e8m0_round_up, largest, native_fp8, to_codes
from stand_ins.memory import check, contiguous_view, fp32, spill


def _gated(out: Tensor, input: Tensor, limit: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of out, gate and up in fp32, by sizes alone: strides are not read."""
    check(out.dtype == input.dtype, "output type must match input type")
    check(input.dtype in (torch.bfloat16, torch.float16), f"no 16-bit type: {input.dtype}")
    check(limit == 0.0, "a limit: not played")
    rows, width = input.numel() // input.shape[-1], input.shape[-1] // 2
    halves = contiguous_view(input, rows, 2, width).float()
    return contiguous_view(out, rows, width), halves[:, 0], halves[:, 1]


@stands_for("aiter")
def silu_and_mul(out: Tensor, input: Tensor, limit: float = 0.0) -> None:
    rows, gate, up = _gated(out, input, limit)
    rows.copy_(gate / (1 + (-gate).exp()) * up)
    spill(rows)


@stands_for("aiter")
def gelu_and_mul(out: Tensor, input: Tensor) -> None:
    rows, gate, up = _gated(out, input)
    rows.copy_(gate * 0.5 * (1 + torch.erf(gate * math.sqrt(0.5))) * up)
    spill(rows)


@stands_for("aiter")
def gelu_tanh_and_mul(out: Tensor, input: Tensor) -> None:
    rows, gate, up = _gated(out, input)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    rows.copy_(gate * 0.5 * (1 + inner.tanh()) * up)
    spill(rows)


@stands_for("aiter")
def silu_and_mul_quant(
    out: Tensor,
    input: Tensor,
    scale: Tensor,
    group_size: int,
    limit: float = 0.0,
    shuffle_scale: bool = False,
) -> None:
    """Codes of groups: fp8 under fp32 scales, row by row, or with shuffle_scale group by group;
    e2m1 under e8m0 scales that are rounded up.
    """
    check(input.dtype in (torch.bfloat16, torch.float16), f"no 16-bit type: {input.dtype}")
    check(limit == 0.0, "a limit: not played")
    rows, width = input.numel() // input.shape[-1], input.shape[-1] // 2
    check(group_size > 0 and width % group_size == 0, "d must be divisible by group_size")
    check(group_size & (group_size - 1) == 0, "group_size must be power of 2")
    check(width <= 8192, "d > 8192 not supported")
    per_thread = next(
        n for most, n in ((2048, 8), (4096, 16), (6144, 24), (8192, 32)) if width <= most
    )
    # So many threads reduce together; AITER does not check that they have whole groups.
    check(group_size % per_thread == 0, f"{per_thread} columns a thread in groups of {group_size}")
    check(group_size <= 64 * per_thread, "groups wider than a wave: not played")
    halves = contiguous_view(input, rows, 2, width).float()
    gate, up = halves[:, 0], halves[:, 1]
    grouped = (gate / (1 + (-gate).exp()) * up).view(rows, -1, group_size)
    amax = grouped.abs().amax(-1).clamp(min=1e-10)
    if out.dtype == torch.float4_e2m1fn_x2:
        check(group_size >= 32 and not shuffle_scale, "shuffled scales: not played")
        scales = e8m0_round_up(amax)
        contiguous_view(scale.view(torch.uint8), *scales.shape).copy_(scales)
        codes = e2m1_bytes((grouped / e8m0(scales).unsqueeze(-1)).view(rows, width))
        contiguous_view(out.view(torch.uint8), *codes.shape).copy_(codes)
        return
    check(out.dtype == native_fp8(), "only fp8 and fp4 output types are supported")
    scales = amax * (1.0 / largest(out.dtype))
    fp32(scale, "scale", scales.numel()).copy_((scales.t() if shuffle_scale else scales).flatten())
    codes = to_codes(grouped, 1.0 / scales.unsqueeze(-1), out.dtype).view(rows, width)
    contiguous_view(out, rows, width).copy_(codes)
