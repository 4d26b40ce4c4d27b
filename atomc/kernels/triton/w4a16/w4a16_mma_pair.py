"""Linear layers of one row of bf16 with int4 weights in the order of fragments.py, in
Triton for NVIDIA GPUs, with two products per instruction.

Reading 4-bit weights is so fast that arithmetic is the bottleneck. The eight products of a word are
summed in bf16, words in fp32; the error is that of rounding the result to bf16 twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc.kernels.triton.launch.launch import (
    int32_view,
    let_next_start,
    num_rows,
    overlap,
    wait_for_last,
)
from atomc.kernels.triton.w4a16.fragments import STRIP, strip_offset

# In the last bits of a bf16 of 128 a code has units of 1. $4 is the word, $5 the addend; $0 to $3
# are its pairs.
UNPACK = constexpr("""{
.reg .b32 w1, w2, w3, one;
mov.b32 one, 0x3F803F80;
shr.b32 w1, $4, 4;
shr.b32 w2, $4, 8;
shr.b32 w3, $4, 12;
lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $1, w1, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $2, w2, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $3, w3, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 $0, $0, one, $5;
fma.rn.bf16x2 $1, $1, one, $5;
fma.rn.bf16x2 $2, $2, one, $5;
fma.rn.bf16x2 $3, $3, one, $5;
}""")
# The sum of the products of the pairs $1 to $4 and $5 to $8, in fp32.
DOT = constexpr("""{
.reg .b32 sums, low, high;
mov.b32 sums, 0x80008000;
fma.rn.bf16x2 sums, $1, $5, sums;
fma.rn.bf16x2 sums, $2, $6, sums;
fma.rn.bf16x2 sums, $3, $7, sums;
fma.rn.bf16x2 sums, $4, $8, sums;
shl.b32 low, sums, 16;
and.b32 high, sums, 0xFFFF0000;
add.f32 $0, low, high;
}""")


@triton.jit
def _row(
    x_ptr,
    words_ptr,
    scale_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    K: constexpr,
    GROUP: constexpr,
    BLOCK_N: constexpr,
    BLOCK_W: constexpr,
    PDL: constexpr,
):
    """x is [K/2] int32, two values each. A program takes BLOCK_N rows of a strip."""
    PARTS: constexpr = (K + 127) // 128
    WORDS: constexpr = PARTS * 16
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    word = tl.arange(0, BLOCK_W)[None, :]
    of_row = strip_offset(n, word // 16, PARTS).to(tl.int64)
    # A thread reads one word at a time. By default it would read several adjacent words, and x
    # would be exchanged through shared memory.
    words_at = words_ptr + tl.multiple_of(of_row * 16 + word % 16, (1, 1))
    # Claims that scales of neighbours are contiguous, so that threads go along rows here, too.
    group = of_row * (128 // GROUP) + word % 4 * 32 // GROUP
    group = tl.max_contiguous(tl.multiple_of(group, (1, 1)), (1, BLOCK_W))
    # Word 4q + g of a part has pairs of columns 32g + 8j + 2q.
    pair = tl.multiple_of(word // 16 * 64 + word % 4 * 16 + word % 16 // 4, (1, 1))
    column = word // 16 * 128 + word % 4 * 32
    minus = tl.full((1, 1), -0x3CF73CF8, tl.int32)  # -136 twice
    let_next_start(PDL)
    # Loads of the weight need not wait: no kernel that lets the next one start early writes int4
    # words.
    inside = tl.broadcast_to(word < WORDS, words_at.shape)
    next_words = tl.load(words_at, inside, 0, cache_modifier=".cg")
    next_scale = tl.load(scale_ptr + group, inside, 0.0)
    if zeros_ptr is not None:
        next_zero = tl.load(zeros_ptr + group, inside, 0)
    wait_for_last(PDL)
    sums = tl.zeros((BLOCK_N, BLOCK_W), tl.float32)
    for start in tl.static_range(0, WORDS, BLOCK_W):
        words, scale = next_words, next_scale
        if zeros_ptr is not None:
            minus = next_zero.to(tl.int32) * 0x10001 - 0x3CFF3D00
        here = column + start * 8 < K
        if start + BLOCK_W < WORDS:
            inside = tl.broadcast_to(start + BLOCK_W + word < WORDS, words_at.shape)
            next_words = tl.load(words_at + (start + BLOCK_W) * 16, inside, 0, cache_modifier=".cg")
            following = group + (start + BLOCK_W) * (128 // GROUP)
            next_scale = tl.load(scale_ptr + following, inside, 0.0)
            if zeros_ptr is not None:
                next_zero = tl.load(zeros_ptr + following, inside, 0)
        q0, q1, q2, q3 = tl.inline_asm_elementwise(
            UNPACK,
            "=&r,=&r,=&r,=&r,r,r",
            [words, minus],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        x = x_ptr + start * 4 + pair
        part = tl.inline_asm_elementwise(
            DOT,
            "=f,r,r,r,r,r,r,r,r",
            [
                q0,
                q1,
                q2,
                q3,
                tl.load(x, here, 0),
                tl.load(x + 4, here, 0),
                tl.load(x + 8, here, 0),
                tl.load(x + 12, here, 0),
            ],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        sums += part * scale.to(tl.float32)
    out = tl.sum(sums, 1)[:, None]
    if bias_ptr is not None:
        out += tl.load(bias_ptr + n).to(tl.float32)
    tl.store(out_ptr + n, out.to(out_ptr.dtype.element_ty))


def serves(x: Tensor) -> bool:
    """Whether x is one row of bf16, on a GPU that multiplies pairs of bf16 and has PDL."""
    return x.dtype == torch.bfloat16 and num_rows(x) == 1 and overlap(x.device)["PDL"]


def multiply(
    x: Tensor, words: Tensor, scale: Tensor, zeros: Tensor | None, bias: Tensor | None, group: int
) -> Tensor:
    """The op linear_w4a16, of the weight, scales and zeros that w4a16_mma.py prepares."""
    n, k = len(words) * STRIP.value, x.shape[-1]
    out = x.new_empty((*x.shape[:-1], n))
    _row[(n // 4,)](
        int32_view(x.reshape(k)),
        words,
        scale.view(x.dtype),
        None if zeros is None else zeros.view(torch.uint8),
        bias,
        out,
        K=k,
        GROUP=group,
        BLOCK_N=4,
        BLOCK_W=min(triton.next_power_of_2(-(-k // 128) * 16), 128),
        num_warps=4,
        maxnreg=64,
        **overlap(x.device),
    )
    return out
