"""Linear layers in Triton with the same tile for any number of rows. M rows of x, N rows of the
weight, K columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atomc import ops
from atomc.kernels.triton.launch import unfit
from atomc.ops.op import Refusal
from atomc.platform import Platform


@triton.jit(do_not_specialize=["M"])
def _multiply(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    x_row,
    weight_row,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + m.to(tl.int64) * x_row + k[None, :]
    weight_at = weight_ptr + n.to(tl.int64) * weight_row + k[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        x = tl.load(x_at + start, (m < M) & (k[None, :] < K - start), 0.0)
        weight = tl.load(weight_at + start, (n < N) & (k[:, None] < K - start), 0.0)
        sums = tl.dot(x, weight, sums, input_precision="ieee")
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)
    tl.store(out_ptr + m.to(tl.int64) * N + n, sums.to(out_ptr.dtype.element_ty), (m < M) & (n < N))


def refuse_linear(
    platform: Platform, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Refusal | None:
    if reason := unfit(platform, x=x, weight=weight, bias=bias):
        return reason
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        return Refusal(
            "dtype", f"x is {x.dtype}, the weight {weight.dtype}: mixed dtypes are not supported"
        )
    return None


@ops.linear.kernel("invariant", refuses=refuse_linear)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows, (n, k) = x.reshape(-1, x.shape[-1]), weight.shape
    out = x.new_empty((*x.shape[:-1], n))
    if rows.shape[0]:
        wide = x.dtype == torch.float32
        block_m, block_n, block_k = (32, 64, 32) if wide else (64, 128, 64)
        _multiply[(triton.cdiv(rows.shape[0], block_m), triton.cdiv(n, block_n))](
            rows,
            weight,
            bias,
            out,
            rows.shape[0],
            n,
            rows.stride(0),
            weight.stride(0),
            K=k,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=4,
            num_stages=2 if wide else 3,
        )
    return out
