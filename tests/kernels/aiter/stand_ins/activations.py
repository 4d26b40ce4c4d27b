"""Gated activations: the gate is the first half of each row, up the second."""

import math

import torch
from torch import Tensor

from stand_ins import stands_for
from stand_ins.memory import check, contiguous_view, spill


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
