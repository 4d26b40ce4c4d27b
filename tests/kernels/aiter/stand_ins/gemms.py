"""Products: hipBLASLt and small kernels behind one function in 16 bits, CK and assembly in 8 and 4.

Weights are [N, K]; results are computed in fp32 and rounded once.
"""

import torch
from torch import Tensor

from stand_ins import ARCH, stands_for
from stand_ins.formats import e2m1_numbers, native_fp8, unshuffled_scale, unshuffled_weight
from stand_ins.memory import check, contiguous_view, fp32, row_view

HALVES = (torch.bfloat16, torch.float16)
UNITS = {"gfx942": 304, "gfx950": 256}


def _is_skinny(m: int, n: int, k: int) -> bool:
    """Whether few rows go to the kernel that reads x and weight by their sizes alone."""
    units = UNITS[ARCH.get()]
    widest = 9216 if m <= 4 else 5120 if m <= 8 else 256 if m <= 16 else 0
    return k % 8 == 0 and k <= widest and n <= (2 * units if m == 1 else units)


@stands_for("aiter.tuned_gemm")
def gemm_a16w16(
    A: Tensor,
    B: Tensor,
    bias: Tensor | None = None,
    otype: torch.dtype | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    scale_c: Tensor | None = None,
) -> Tensor:
    """16 bits, or fp8 under one scale a tensor; a weight with the attribute is_shuffled is not
    played.
    """
    check(scale_c is None and not hasattr(B, "is_shuffled"), "not played")
    check(A.dtype == B.dtype and A.dtype in (*HALVES, native_fp8()), f"{A.dtype} by {B.dtype}")
    x = A.reshape(-1, A.shape[-1])
    (m, k), n = x.shape, B.shape[0]
    out_dtype = otype or A.dtype
    if A.dtype in HALVES:
        check(scale_a is None and scale_b is None, "scales belong to fp8")
        check(bias is None or bias.dtype == A.dtype, "bias in another dtype")
        if _is_skinny(m, n, k):
            product = contiguous_view(x, m, k).float() @ contiguous_view(B, n, k).float().t()
            out = product.to(A.dtype)
            return (out if bias is None else out + bias).view(*A.shape[:-1], n).to(out_dtype)
        product = x.float() @ B.float().t() + (0 if bias is None else bias.float())
        return product.to(A.dtype).to(out_dtype).view(*A.shape[:-1], n)
    check(k % 16 == 0 and n % 16 == 0, "an fp8 product takes multiples of 16")
    product = x.float() @ B.float().t()
    for scale in (scale_a, scale_b):
        product = product if scale is None else product * fp32(scale, "scale", 1)
    return (product if bias is None else product + bias.float()).to(out_dtype)


def _out(product: Tensor, dtype: torch.dtype) -> Tensor:
    check(dtype in HALVES, f"Output {dtype} is currently not supported")
    return product.to(dtype)


@stands_for("aiter")
def gemm_a8w8(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    splitK: int | None = None,
) -> Tensor:
    """A scale for each row of x [M, 1] and of the weight [N, 1]; the strides of none are read."""
    check(XQ.dtype == WQ.dtype, "Weights and activations should have the same dtype!")
    check(XQ.dtype in (torch.int8, native_fp8()), "should both be int8/fp8!")
    check(bias is None or bias.dtype == dtype, "Out and bias should have the same dtype!")
    (m, k), n = XQ.shape, WQ.shape[0]
    check(k % 16 == 0 and n % 8 == 0, "This GEMM is not supported!")
    product = contiguous_view(XQ, m, k).double() @ contiguous_view(WQ, n, k).double().t()
    scaled = product.float() * fp32(x_scale, "x_scale", m, 1) * fp32(w_scale, "w_scale", 1, n)
    return _out(scaled if bias is None else scaled + bias.float(), dtype)


def _tile_of_any_rows(n: int, k: int) -> bool:
    """Whether CK's kernels for every number of rows have tiles that divide N and K, which they must
    in spite of their padding; those of a tuned table do.
    """
    if k >= 1536:
        return n % 64 == 0 and k % 128 == 0
    if k >= 512:
        return n % 128 == 0 and k % 128 == 0
    return k >= 192 and k % 64 == 0 and n % 256 == 0


@stands_for("aiter")
def gemm_a8w8_bpreshuffle(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    check: bool = False,
) -> Tensor:
    """fp8 by a shuffled weight; a scale for each row of x [M, 1] and of the weight [N, 1]."""
    _require(WQ.dtype == native_fp8() and XQ.dtype == WQ.dtype, "only support fp8 now")
    _require(bias is None, "does not support bias now")
    (m, k), n = XQ.shape, WQ.shape[0]
    _require(WQ.shape[1] == k, "a weight of more columns: not played")
    _require(_tile_of_any_rows(n, k), f"This GEMM is not supported! N={n}, K={k}")
    product = row_view(XQ).float() @ unshuffled_weight(WQ).float().t()
    return _out(product * fp32(x_scale, "x_scale", m, 1) * fp32(w_scale, "w_scale", 1, n), dtype)


_require = check  # a parameter of AITER's has that name


def _by_blocks(x: Tensor, weight: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor:
    """x [M, K] under [M, K/128], weight [N, K] under [ceil(N/128), K/128]."""
    k, n = x.shape[1], weight.shape[0]
    scaled_x = x.float() * x_scale.repeat_interleave(128, 1)[:, :k]
    scales = w_scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return scaled_x @ (weight.float() * scales).t()


@stands_for("aiter")
def gemm_a8w8_blockscale(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    isBpreshuffled: bool = False,
) -> Tensor:
    """A scale for 128 columns of a row of x, row by row, and one for 128 x 128 of the weight."""
    check(not isBpreshuffled, "the assembly kernel of a shuffled weight: not played")
    check(XQ.dtype == WQ.dtype == native_fp8(), "should have the same dtype!")
    (m, k), n = XQ.shape, WQ.shape[0]
    check(k % 128 == 0 and n % 8 == 0, "This GEMM is not supported!")
    x_scales = fp32(x_scale, "x_scale", m, k // 128)
    w_scales = fp32(w_scale, "w_scale", -(-n // 128), k // 128)
    weight = WQ.as_strided(WQ.shape, (WQ.stride(-2), 1))
    return _out(_by_blocks(row_view(XQ), weight, x_scales, w_scales), dtype)


@stands_for("aiter")
def gemm_a8w8_blockscale_bpreshuffle(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """As gemm_a8w8_blockscale, by a shuffled weight; the scales of x lie column by column."""
    check(out is None, "out: not played")
    check(XQ.dtype == WQ.dtype == native_fp8(), "should have the same dtype!")
    (m, k), n = XQ.shape, WQ.shape[0]
    check(k % 128 == 0 and n % 64 == 0, "This GEMM is not supported!")
    x_scales = fp32(x_scale, "x_scale", k // 128, m).t()
    w_scales = fp32(w_scale, "w_scale", -(-n // 128), k // 128)
    return _out(_by_blocks(row_view(XQ), unshuffled_weight(WQ), x_scales, w_scales), dtype)


@stands_for("aiter")
def gemm_a4w4(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    alpha: float | None = 1.0,
    beta: float | None = 0.0,
    bpreshuffle: bool | None = True,
    apreshuffle: bool | None = False,
    global_A_scale: Tensor | None = None,
    global_B_scale: Tensor | None = None,
) -> Tensor:
    """MXFP4 [M, K/2] by MXFP4 [N, K/2], shuffled; the scales of both are shuffled."""
    check(ARCH.get() == "gfx950", f"A4W4 GEMM kernel is not supported on {ARCH.get()}")
    check(bias is None and alpha == 1.0 and beta == 0.0, "bias, alpha and beta: not played")
    check(bool(bpreshuffle), "the kernels for K in steps of 256 take a shuffled weight")
    check(A.dtype == B.dtype == torch.float4_e2m1fn_x2, "Unsupported input_type")
    check(dtype == torch.bfloat16, "only support BFloat16 output now!")
    (m, packed), n = A.shape, B.shape[0]
    check(packed % 128 == 0, "K is read in steps of 256")
    x = e2m1_numbers(A.view(torch.uint8))
    weight = e2m1_numbers(unshuffled_weight(B.view(torch.uint8)))
    scales = (
        unshuffled_scale(scale, rows, packed // 16).repeat_interleave(32, 1)
        for scale, rows in ((A_scale, m), (B_scale, n))
    )
    x_scale, w_scale = scales
    return ((x * x_scale) @ (weight * w_scale).t()).to(dtype)
