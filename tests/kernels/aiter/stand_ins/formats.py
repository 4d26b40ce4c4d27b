"""The number formats of AMD's GPUs, from their specifications: fp8, int8, e2m1 under e8m0 scales,
and the layouts in which AITER's products read weights and scales.
"""

import torch
from torch import Tensor

from stand_ins import ARCH
from stand_ins.memory import check

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def native_fp8() -> torch.dtype:
    return torch.float8_e4m3fnuz if ARCH.get() == "gfx942" else torch.float8_e4m3fn


def largest(dtype: torch.dtype) -> float:
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


def check_codes(dtype: torch.dtype) -> None:
    check(
        dtype in (torch.int8, native_fp8()), f"does not support output type {dtype} on {ARCH.get()}"
    )


def to_codes(x: Tensor, inverse_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x * inverse_scale in codes: fp8 saturates and rounds to nearest even, and NaN becomes the
    smallest number; int8 is truncated toward zero.
    """
    scaled = x.float() * inverse_scale
    if dtype == torch.int8:
        return scaled.trunc().clamp(-128, 127).to(dtype)
    top = largest(dtype)
    return scaled.clamp(-top, top).nan_to_num(-top).to(dtype)


def e8m0_round_up(amax: Tensor) -> Tensor:
    """The exponent byte of the smallest power of two that is at least amax / 6."""
    mantissa, exponent = torch.frexp(amax.float() * (1.0 / 6.0))
    return (exponent - (mantissa == 0.5).to(exponent.dtype) + 127).to(torch.uint8)


def e8m0(byte: Tensor) -> Tensor:
    return torch.exp2(byte.float() - 127)


def e2m1_bytes(x: Tensor) -> Tensor:
    """[..., K] as [..., K/2] bytes, the even index in the low four bits; ties to the even code."""
    size = x.float().abs().clamp(max=6.0).unsqueeze(-1)
    distance = (size - E2M1).abs()
    distance[..., 1::2] *= 1 + 1e-7  # an odd code loses a tie
    code = distance.argmin(-1) + 8 * torch.signbit(x.float())
    return (code[..., ::2] + 16 * code[..., 1::2]).to(torch.uint8)


def mxfp4_even(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [M, K] in e2m1 under e8m0 scales: that of the largest number with two bits of mantissa,
    rounded to nearest, less 2.
    """
    check(x.shape[1] % 32 == 0, "groups of 32")
    groups = x.float().unflatten(1, (-1, 32))
    bits = groups.abs().amax(-1).contiguous().view(torch.int32)
    exponent = ((bits + 0x200000) >> 23) - 127 - E2M1.max().log2().floor().int()
    scale = (exponent.clamp(-127, 127) + 127).to(torch.uint8)
    return e2m1_bytes((groups / e8m0(scale).unsqueeze(-1)).flatten(1)), scale


def e2m1_numbers(packed: Tensor) -> Tensor:
    """[..., K/2] bytes as [..., K] numbers."""
    byte = packed.view(torch.uint8).int()
    code = torch.stack((byte % 16, byte // 16), -1).flatten(-2)
    return E2M1[code % 8] * torch.where(code >= 8, -1.0, 1.0)


def unshuffled_weight(weight: Tensor) -> Tensor:
    """A weight [N, K bytes] in AITER's 16 x 16 layout, back in rows.

    Tiles of 16 rows and 32 bytes, tile behind tile along a row; in a tile the left 16 columns come
    first, and in each half row behind row.
    """
    n_size, k_size = weight.shape
    check(n_size % 16 == 0 and k_size % 32 == 0, f"{n_size} x {k_size} do not fill tiles")
    check(weight.is_contiguous(), "a shuffled weight is contiguous")
    n, k = torch.arange(n_size)[:, None], torch.arange(k_size)
    tile = (n // 16) * (k_size // 32) + k // 32
    inside = (k // 16 % 2) * 256 + (n % 16) * 16 + k % 16
    return weight.view(torch.uint8).flatten()[tile * 512 + inside].view(weight.dtype)


def scale_place(row: Tensor, group: Tensor, groups: int) -> Tensor:
    """Where the e8m0 scale of a row's group is in AITER's layout, of `groups` (a multiple of 8)
    groups a row: tiles of 32 rows and 8 groups, 256 bytes each; in a tile, from the slowest digit
    to the fastest: group modulo 4, row modulo 16, half of the groups, half of the rows.
    """
    tile = (row // 32) * (groups // 8) + group // 8
    digits = ((group % 4, 4), (row % 16, 16), (group % 8 // 4, 2), (row % 32 // 16, 2))
    inside = torch.zeros_like(row + group)
    for digit, base in digits:
        inside = inside * base + digit
    return tile * 256 + inside


def unshuffled_scale(scale: Tensor, rows: int, groups: int) -> Tensor:
    """e8m0 scales in AITER's layout, [rows padded to 32, groups padded to 8] -> [rows, groups]
    numbers.
    """
    check(scale.is_contiguous(), "shuffled scales are contiguous")
    check(
        scale.shape[0] >= -(-rows // 32) * 32 and scale.shape[1] == -(-groups // 8) * 8,
        f"scales {tuple(scale.shape)} are not padded for {rows} x {groups}",
    )
    place = scale_place(torch.arange(rows)[:, None], torch.arange(groups), scale.shape[1])
    return e8m0(scale.view(torch.uint8).flatten()[place])
