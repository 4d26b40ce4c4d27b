"""LoRA adapters of linear layers in Triton: two thin products, of rows that have an adapter only.
Those of few rows are in lora_few.py.

The first kernel multiplies a tile of rows with A of one adapter, and returns at once if no row of
the tile has it; K is divided among programs, whose sums the second kernel adds in a fixed order.
The second kernel adds the product with B to its tile of y. Neither has a size that depends on data,
so that CUDA graphs can hold them, and adapters without rows are not read.

M rows, L adapters, r their rank, P merged layers (R = P * r rows of A), K inputs, N outputs.
"""

from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.checks import gapped, unlike
from atomc.kernels.triton.launch.launch import begin, dot_size, not_nvidia, overlap, unfit
from atomc.kernels.triton.launch.tiles import LORA_FEW
from atomc.kernels.triton.linear import lora_few
from atomc.ops.formats import FLOATS
from atomc.ops.op import Refusal
from atomc.platform import Platform

MAX_PARTS, MAX_THIN = 4, 256
# Chosen by counting bytes, not measured yet: a tile of 16 rows is the smallest of a tensor core,
# and 8 parts of K let a step of few rows read A with as many programs for each adapter.
FEW_ROWS, ROWS_OF_MANY, OUTPUTS, INPUTS, PARTS_OF_FEW = 64, 64, 64, 128, 8
# Tiles of MAX_THIN rows of A have to fit into shared memory, in three stages.
WIDE_INPUTS = 64
FP32_OUTPUTS, FP32_INPUTS = 32, 32


@triton.jit(do_not_specialize=["M"])
def _shrink(
    x_ptr,
    a_ptr,
    rows_ptr,
    thin_ptr,
    M,
    x_stride,
    K: constexpr,
    R: constexpr,
    LENGTH: constexpr,
    BLOCK_M: constexpr,
    BLOCK_R: constexpr,
    BLOCK_K: constexpr,
    PDL: constexpr,
):
    begin(PDL)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    adapter = tl.program_id(1)
    own = tl.load(rows_ptr + m, m < M, -1) == adapter
    if tl.max(own.to(tl.int32), 0) > 0:
        part = tl.program_id(2)
        r, k = tl.arange(0, BLOCK_R), part * LENGTH + tl.arange(0, BLOCK_K)
        x_at = x_ptr + m.to(tl.int64)[:, None] * x_stride
        a_at = a_ptr + (adapter.to(tl.int64) * R + r)[:, None] * K
        sums = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for start in range(0, LENGTH, BLOCK_K):
            inside = (k + start < K)[None, :]
            x = tl.load(x_at + (k + start)[None, :], own[:, None] & inside, 0.0)
            a = tl.load(a_at + (k + start)[None, :], (r < R)[:, None] & inside, 0.0)
            sums = tl.dot(x, tl.trans(a), sums, input_precision="ieee")
        at = thin_ptr + (part.to(tl.int64) * M + m)[:, None] * R + r[None, :]
        tl.store(at, sums, own[:, None] & (r < R)[None, :])


@triton.jit(do_not_specialize=["M"])
def _expand(
    y_ptr,
    b_ptr,
    rows_ptr,
    thin_ptr,
    out_ptr,
    M,
    y_stride,
    ENDS: constexpr,
    N: constexpr,
    R: constexpr,
    RANK: constexpr,
    ADAPTERS: constexpr,
    PARTS: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    BLOCK_R: constexpr,
    PDL: constexpr,
):
    begin(PDL)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_R)
    rows = tl.load(rows_ptr + m, m < M, -1)
    inside = (m < M)[:, None] & (n < N)[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Columns of a merged layer are multiplied with its own rows of A.
    layer = lora_few.layer_of(n, ENDS)
    belongs = (layer[None, :] == (r // RANK)[:, None]) & (r < R)[:, None] & (n < ENDS[3])[None, :]
    thin = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for part in tl.static_range(PARTS):
        at = thin_ptr + (part * M + m).to(tl.int64)[:, None] * R + r[None, :]
        thin += tl.load(at, (rows >= 0)[:, None] & (r < R)[None, :], 0.0)
    # Without a branch, so that the loads of several adapters are in flight.
    for adapter in range(ADAPTERS):
        own = rows == adapter
        b_at = b_ptr + (adapter * RANK + r % RANK).to(tl.int64)[:, None] * N + n[None, :]
        b = tl.load(b_at, belongs & (tl.max(own.to(tl.int32), 0) > 0), 0.0)
        of_own = tl.where(own[:, None], thin, 0.0).to(b.dtype)
        sums = tl.dot(of_own, b, sums, input_precision="ieee")
    y = tl.load(y_ptr + m.to(tl.int64)[:, None] * y_stride + n[None, :], inside, 0.0)
    # As the reference rounds: the product, then the sum.
    total = y.to(tl.float32) + sums.to(y.dtype).to(tl.float32)
    out_at = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), inside)


def refuse_lora_linear(
    platform: Platform,
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    rows: Tensor | None,
    widths: list[int] | None,
    scale: float,
) -> Refusal | None:
    if rows is None or widths is None or scale != 1.0:
        return Refusal("argument", "written for adapters of rows, with the scale in b")
    if reason := (
        unfit(platform, y=y, x=x, a=a, b=b)
        or not_nvidia(platform)
        or unlike(FLOATS, y=y, x=x, a=a, b=b)
    ):
        return reason
    if len(widths) > MAX_PARTS:
        return Refusal("shape", f"{len(widths)} merged layers: written for up to {MAX_PARTS}")
    if a.shape[1] > MAX_THIN:
        return Refusal("shape", f"A has {a.shape[1]} rows: written for up to {MAX_THIN}")
    return gapped(a=a, b=b)


def ends(widths: list[int], outputs: int) -> tuple[int, ...]:
    """Where each of the merged layers but the last ends in y, as MAX_PARTS - 1 numbers, and where
    the last one does.
    """
    bounds = list(accumulate(widths))
    return *bounds[:-1], *[outputs] * (MAX_PARTS - len(bounds)), bounds[-1]


def _tile(thin_block: int, dtype: torch.dtype) -> tuple[int, int]:
    """Inputs per step of the first product, and outputs of a program of the second."""
    if dtype == torch.float32:
        return FP32_INPUTS, FP32_OUTPUTS
    wide = thin_block > 128
    return (WIDE_INPUTS if wide else INPUTS), OUTPUTS


@ops.lora_linear.kernel("triton", refuses=refuse_lora_linear, tuned_for=LORA_FEW.archs)
def lora_linear(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, rows: Tensor | None, widths: list[int] | None
) -> Tensor:
    assert rows is not None and widths is not None, "refuse_lora_linear"
    (adapters, thin_size, depth), (rank, outputs) = a.shape, b.shape[1:]
    y_rows, x_rows = y.flatten(0, -2), x.flatten(0, -2)
    count = len(x_rows)
    out = y.new_empty(y.shape)
    if not count or not outputs:
        return out
    of_layers = ends(widths, outputs)
    if count <= lora_few.MAX_ROWS:
        tile = LORA_FEW.choose(x.device, count)
        return lora_few.lora_linear(y_rows, x_rows, a, b, rows, of_layers, tile).view(y.shape)
    thin_block = dot_size(thin_size)
    block_k, block_n = _tile(thin_block, x.dtype)
    warps = {"num_warps": 8 if thin_block > 128 else 4, **overlap(x.device)}
    block, parts = ROWS_OF_MANY, 1
    if count <= FEW_ROWS:
        block, parts = 16, min(PARTS_OF_FEW, triton.cdiv(depth, block_k))
    thin = x.new_empty((parts, count, thin_size), dtype=torch.float32)
    tiles = triton.cdiv(count, block)
    _shrink[(tiles, adapters, parts)](
        x_rows,
        a,
        rows,
        thin,
        count,
        x_rows.stride(0),
        K=depth,
        R=thin_size,
        LENGTH=triton.cdiv(triton.cdiv(depth, parts), block_k) * block_k,
        BLOCK_M=block,
        BLOCK_R=thin_block,
        BLOCK_K=block_k,
        **warps,
    )
    _expand[(tiles, triton.cdiv(outputs, block_n))](
        y_rows,
        b,
        rows,
        thin,
        out,
        count,
        y_rows.stride(0),
        ENDS=of_layers,
        N=outputs,
        R=thin_size,
        RANK=rank,
        ADAPTERS=adapters,
        PARTS=parts,
        BLOCK_M=block,
        BLOCK_N=block_n,
        BLOCK_R=thin_block,
        **warps,
    )
    return out
