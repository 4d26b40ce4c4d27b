"""Linear layers in Triton with the same tile for any number of rows. M rows of x, N rows of the
weight, K columns; of each of H heads, if there are some.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.checks import first_refusal, named, unlike
from atomc.kernels.invariant.adapter import adapted, several
from atomc.kernels.row_views import as_rows, with_lead
from atomc.kernels.triton.launch.launch import rows_of, unfit
from atomc.ops.formats import FLOATS, HALVES
from atomc.ops.op import Refusal
from atomc.platform import Platform


@triton.jit(do_not_specialize=["M"])
def _multiply(
    x,
    weight,
    bias_ptr,
    out,
    M,
    N,
    weight_column,
    K: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    BLOCK_K: constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    k = tl.arange(0, BLOCK_K)
    head = tl.program_id(2).to(tl.int64)
    x_at = x.ptr + head * x.s2 + m.to(tl.int64) * x.s0 + k[None, :]
    weight_at = weight.ptr + head * weight.s0 + n.to(tl.int64) * weight.s2
    weight_at += k[:, None] * weight_column
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        rows = tl.load(x_at + start, (m < M) & (k[None, :] < K - start), 0.0)
        columns = weight_at + start * weight_column
        columns = tl.load(columns, (n < N) & (k[:, None] < K - start), 0.0)
        sums = tl.dot(rows, columns, sums, input_precision="ieee")
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)
    out_at = out.ptr + head * out.s2 + m.to(tl.int64) * out.s0 + n
    tl.store(out_at, sums.to(out.ptr.dtype.element_ty), (m < M) & (n < N))


def refuse_linear(
    platform: Platform, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Refusal | None:
    if reason := unfit(platform, x=x, weight=weight, bias=bias):
        return reason
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        return Refusal(
            "dtype", f"x is {x.dtype}, the weight {weight.dtype}: mixed dtypes are not supported"
        )
    return None


@ops.linear.kernel("invariant", refuses=refuse_linear)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _product(x, weight, bias, x.dtype)


@ops.linear_fp32.kernel(
    "invariant",
    refuses=first_refusal(named("platform x weight", unfit), named("x weight", unlike, HALVES)),
)
def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    return _product(x, weight, None, torch.float32)


@ops.lora_linear.kernel(
    "invariant",
    refuses=first_refusal(named("platform y x a", unfit), named("a b", unlike, FLOATS), several),
)
def lora_linear(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return adapted(linear, y, x, a, b, scale)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [..., K] @ weight.T + bias -> [..., N] in dtype."""
    rows, n = as_rows(x), weight.shape[0]
    out = x.new_empty((rows.shape[0], n), dtype=dtype)
    if rows.shape[0]:
        multiply(rows[:, None], weight[None], out[:, None], bias)
    return with_lead(out, x)


def multiply(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """out [M, H, N] of x [M, H, K] and the weight [H, N, K] of each head. bias [N]."""
    rows, heads, n = out.shape
    wide = x.dtype == torch.float32
    block_m, block_n, block_k = (32, 64, 32) if wide else (64, 128, 64)
    _multiply[(triton.cdiv(rows, block_m), triton.cdiv(n, block_n), heads)](
        *map(rows_of, (x, weight)),
        bias,
        rows_of(out),
        rows,
        n,
        weight.stride(2),
        K=x.shape[-1],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=2 if wide else 3,
    )
