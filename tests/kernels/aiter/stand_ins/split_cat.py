"""Products in Triton over a shuffled weight, seen as rows of tiles [N/16, 16 K bytes], whose result
is split by head: [M, D, S1 + S2] -> the first S1 columns joined to y [M, D, S3], and the last S2.
"""

import torch
from torch import Tensor

from stand_ins import ARCH, stands_for
from stand_ins.formats import (
    e2m1_numbers,
    e8m0,
    native_fp8,
    unshuffled_scale,
    unshuffled_weight,
)
from stand_ins.memory import check

FUSED = "aiter.ops.triton.gemm.fused."
TILE = 256  # outputs of the widest tile


def rows_of(w: Tensor, x: Tensor) -> Tensor:
    """The weight [N, K bytes], whose tiles are read as a whole."""
    n, k = 16 * w.shape[0], w.shape[1] // 16
    assert x.shape[1] == k, "Incompatible dimensions!!!"
    check(n % TILE == 0, "it reads tiles behind the weight")
    check(k % 128 == 0, "a part of a tile of inputs")
    return unshuffled_weight(w.reshape(n, k))


def joined(
    product: Tensor, y: Tensor, first: int, second: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    heads = y.shape[1]
    assert product.shape[1] == heads * (first + second), "N is not D * (S1 + S2)"
    c1, c2 = product.to(dtype).unflatten(1, (heads, first + second)).split([first, second], -1)
    return torch.cat((c1, y.to(dtype)), -1), c2.contiguous()


@stands_for(f"{FUSED}fused_gemm_a8w8_blockscale_split_cat")
def fused_gemm_a8w8_blockscale_preshuffle_split_cat(
    x: Tensor,
    w: Tensor,
    y: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    S1: int,
    S2: int,
    dtype: torch.dtype = torch.bfloat16,
    config: dict[str, int] | None = None,
    is_x_scale_transposed: bool = True,
) -> tuple[Tensor, Tensor]:
    """x [M, K] and w in fp8; scales of 128 inputs [M, K/128], of squares [N/128, K/128]. By default
    the memory of x_scale is that of its transpose.
    """
    check(x.dtype == w.dtype == native_fp8(), "codes of another machine")
    weight = rows_of(w, x).float()
    if is_x_scale_transposed:
        groups = x_scale.shape[1]
        x_scale = x_scale.reshape(-1).view(groups, len(x)).T
    left = x.float() * x_scale.repeat_interleave(128, 1)
    squares = w_scale.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)
    return joined(left @ (weight * squares).T, y, S1, S2, dtype)


@stands_for(f"{FUSED}fused_gemm_afp4wfp4_split_cat")
def fused_gemm_afp4wfp4_preshuffle_split_cat(
    x: Tensor,
    w: Tensor,
    y: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    S1: int,
    S2: int,
    dtype: torch.dtype = torch.bfloat16,
    config: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Bytes of e2m1 codes; shuffled e8m0 scales as rows of tiles [N/32, K], of x from 32 rows on,
    and [M, K/32] below.
    """
    assert ARCH.get() == "gfx950", "MXFP4 is not available on your device"
    weight = e2m1_numbers(rows_of(w, x))
    groups = weight.shape[1] // 32
    at_once = min(1024, 1 << (weight.shape[1] - 1).bit_length())
    check(weight.shape[1] % at_once == 0, "it reads scales behind the last row")

    def scaled(numbers: Tensor, scales: Tensor) -> Tensor:
        return (numbers.unflatten(1, (-1, 32)) * scales[..., None]).flatten(1)

    def untiled(scales: Tensor, rows: int) -> Tensor:
        check(scales.shape[1] == 32 * groups, "rows of tiles of scales")
        return unshuffled_scale(scales.reshape(-1, groups), rows, groups)

    if len(x) < 32:
        check(x_scale.shape == (len(x), groups), "plain scales of few rows")
        of_x = e8m0(x_scale)
    else:
        of_x = untiled(x_scale, len(x))
    left = scaled(e2m1_numbers(x), of_x)
    return joined(left @ scaled(weight, untiled(w_scale, len(weight))).T, y, S1, S2, dtype)


@stands_for(f"{FUSED}fused_gemm_a8w8_blockscale_split_cat")
def fused_gemm_a8w8_blockscale_split_cat(
    x: Tensor,
    w: Tensor,
    y: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    S1: int,
    S2: int,
    dtype: torch.dtype = torch.bfloat16,
    config: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """A weight [N, K] as it is; the size of a block is the power of two above K over the number of
    scales, and has to be 128.
    """
    check(x.dtype == w.dtype == native_fp8(), "codes of another machine")
    k = x.shape[1]
    assert k == w.shape[1], "Incompatible dimensions!!!"
    block = 1 << (-(-k // w_scale.shape[1]) - 1).bit_length()
    assert block == 128, "GROUP_K must equal BLOCK_SIZE_K"
    left = x.float() * x_scale.repeat_interleave(128, 1)[:, :k]
    squares = w_scale.repeat_interleave(128, 0)[: len(w)].repeat_interleave(128, 1)[:, :k]
    return joined(left @ (w.float() * squares).T, y, S1, S2, dtype)


@stands_for(f"{FUSED}fused_gemm_afp4wfp4_split_cat")
def fused_gemm_afp4wfp4_split_cat(
    x: Tensor,
    w: Tensor,
    y: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    S1: int,
    S2: int,
    dtype: torch.dtype = torch.bfloat16,
    config: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Bytes of e2m1 codes under e8m0 scales, as they are. Scales of 1024 inputs at a time are read,
    or of a smaller power of two; what is behind the last row may be NaN.
    """
    assert ARCH.get() == "gfx950", "MXFP4 is not available on your device"
    width = 2 * x.shape[1]
    at_once = min(1024, 1 << (width - 1).bit_length())
    left, right = (
        (e2m1_numbers(codes).unflatten(1, (-1, 32)) * e8m0(scale)[..., None]).flatten(1)
        for codes, scale in ((x, x_scale), (w, w_scale))
    )
    if width % at_once:
        left[-1] = torch.nan
    return joined(left @ right.T, y, S1, S2, dtype)
