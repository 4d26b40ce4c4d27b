"""Linear layers on CPUs that convert a quantized weight to fp32 a few rows at a time: codes are
read from memory, fp32 values stay in the caches.

Codes are converted by tables: PyTorch's conversion of fp8 on a CPU is scalar (Zen 4: 3 ns per
number, 0.5 with a table). T rows, N outputs, K inputs.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc.kernels.row_views import as_rows
from atomc.ops.formats import NVFP4_GROUP, e2m1_values, e8m0_values, grouped_columns

# Bytes of fp32 weight per step. Zen 4, 1 MiB of L2, MXFP4 2560x2560, 1 row: 0.5: 8.1 ms, 1: 6.7,
# 1.3: 6.1, 2.6: 6.0.
CHUNK = 5 * 2**18


def multiply(
    x: Tensor, outputs: int, rows_of: Callable[[int, int], Tensor], multiple: int = 16
) -> Tensor:
    """x @ weight.T [T, N] in fp32. x [..., K]; rows_of(a, b) returns rows a to b - 1 of the weight,
    [b - a, K] fp32.

    multiple  every a is a multiple of it
    """
    rows = as_rows(x).to(torch.float32)
    step = max(1, CHUNK // (4 * x.shape[-1]) // multiple) * multiple
    parts = [F.linear(rows, rows_of(a, min(a + step, outputs))) for a in range(0, outputs, step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def fp8_values(codes: Tensor) -> Tensor:
    """fp8 [n, K] as fp32."""
    return (
        _fp8_table(codes.dtype)
        .index_select(0, codes.view(torch.uint8).flatten().to(torch.int32))
        .view(codes.shape)
    )


def e2m1_pairs(packed: Tensor) -> Tensor:
    """uint8 [n, K/2], two codes per byte, as fp32 [n, K]."""
    # A table element is a pair of fp32, so that each byte is looked up once.
    pairs = _e2m1_table().index_select(0, packed.flatten().to(torch.int32))
    return torch.view_as_real(pairs).view(packed.shape[0], 2 * packed.shape[1])


def mxfp4_values(packed: Tensor, scale: Tensor) -> Tensor:
    """fp32 [n, K] of codes [n, K/2] and scales [n, K/32], both uint8."""
    return (
        grouped_columns(e2m1_pairs(packed), 32).mul_(e8m0_values(scale).unsqueeze(-1)).flatten(-2)
    )


def mxfp4_operand(x: Tensor, scale: Tensor | None) -> Tensor:
    """fp32 [n, K] of an x that MXFP4 weights multiply: codes of MXFP4 or of fp8 with their scales,
    or floats without.
    """
    if scale is None:
        return x.to(torch.float32)
    return mxfp4_values(x, scale) if x.dtype == torch.uint8 else fp8_values(x) * scale


def nvfp4_values(packed: Tensor, scale: Tensor) -> Tensor:
    """fp32 [n, K] of codes [n, K/2] and e4m3 scales [n, K/16], without the global scale."""
    groups = grouped_columns(e2m1_pairs(packed), NVFP4_GROUP)
    return groups.mul_(fp8_values(scale).unsqueeze(-1)).flatten(-2)


@functools.cache
def _fp8_table(dtype: torch.dtype) -> Tensor:
    return torch.arange(256).to(torch.uint8).view(dtype).to(torch.float32)


@functools.cache
def _e2m1_table() -> Tensor:
    codes = torch.arange(256)
    return torch.view_as_complex(
        torch.stack((e2m1_values(codes & 15), e2m1_values(codes >> 4)), -1)
    )
