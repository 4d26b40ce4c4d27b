"""Linear layers of one or two rows of bf16 with int4 weights, in Triton for NVIDIA GPUs, with two
products per instruction.

Reading 4-bit weights is so fast that arithmetic is the bottleneck. The eight products of a word are
summed in bf16, words in fp32; the error is that of rounding the result to bf16 twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atomc.kernels.triton.launch import by_fours, let_next_start, num_rows, overlap, wait_for_last

MAX_ROWS = 2

# Codes i and i + 4 of a word are 16 bits apart. In the last bits of a bf16 of 128 a code has units
# of 1. $4 is the word, $5 the addend; $0 to $3 are the pairs (0, 4), (1, 5), (2, 6) and (3, 7).
UNPACK = tl.constexpr("""{
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
# The same pairs of the eight values in $4 to $7.
PAIR = tl.constexpr("""
prmt.b32 $0, $4, $6, 0x5410;
prmt.b32 $1, $4, $6, 0x7632;
prmt.b32 $2, $5, $7, 0x5410;
prmt.b32 $3, $5, $7, 0x7632;
""")
# The sum of the products of the pairs $1 to $4 and $5 to $8, in fp32.
DOT = tl.constexpr("""{
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
def _chunk(
    words_ptr,
    scale_ptr,
    zeros_ptr,
    row,
    word,
    inside,
    WORDS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Words of some rows, their scales, and the offset to add to 128 + code, twice as bf16."""
    # A thread reads one word at a time: see w4a16._row.
    words = tl.load(
        words_ptr + tl.multiple_of(row * WORDS + word, (1, 1)), inside, 0, cache_modifier=".cg"
    )
    group = tl.max_contiguous(
        tl.multiple_of(row * GROUPS + word // (GROUP // 8), (1, 1)), (1, BLOCK_W)
    )
    scale = tl.load(scale_ptr + group, inside, 0.0)
    minus = tl.full((1, 1), -0x3CF73CF8, tl.int32)  # -136 twice
    if zeros_ptr is not None:
        minus = tl.load(zeros_ptr + group, inside, 0).to(tl.int32) * 0x10001 - 0x3CFF3D00
    return words, scale, minus


@triton.jit
def _few(
    x_ptr,
    words_ptr,
    scale_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    UNPACK: tl.constexpr,
    PAIR: tl.constexpr,
    DOT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """x is [ROWS, K/4] int64, four values each. A program takes BLOCK_N rows of the weight, and
    unpacks each word once.
    """
    WORDS: tl.constexpr = K // 8
    GROUPS: tl.constexpr = K // GROUP
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    row = n.to(tl.int64)
    word = tl.arange(0, BLOCK_W)[None, :]
    let_next_start(PDL)
    # Loads of the weight need not wait: no kernel that lets the next one start early writes int4
    # words.
    next_words, next_scale, next_minus = _chunk(
        words_ptr,
        scale_ptr,
        zeros_ptr,
        row,
        word,
        (n < N) & (word < WORDS),
        WORDS,
        GROUPS,
        GROUP,
        BLOCK_W,
    )
    wait_for_last(PDL)
    sums = (tl.zeros((BLOCK_N, BLOCK_W), tl.float32),) * ROWS
    for start in tl.static_range(0, WORDS, BLOCK_W):
        words, scale, minus = next_words, next_scale, next_minus
        here = start + word < WORDS
        if start + BLOCK_W < WORDS:
            following = start + BLOCK_W + word
            inside = (n < N) & (following < WORDS)
            next_words, next_scale, next_minus = _chunk(
                words_ptr,
                scale_ptr,
                zeros_ptr,
                row,
                following,
                inside,
                WORDS,
                GROUPS,
                GROUP,
                BLOCK_W,
            )
        q0, q1, q2, q3 = tl.inline_asm_elementwise(
            UNPACK,
            "=&r,=&r,=&r,=&r,r,r",
            [words, minus],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        for m in tl.static_range(ROWS):
            x = x_ptr + (m * WORDS + start + word) * 2
            low, high = tl.load(x, here, 0), tl.load(x + 1, here, 0)
            x0, x1, x2, x3 = tl.inline_asm_elementwise(
                PAIR,
                "=r,=r,=r,=r,r,r,r,r",
                [
                    low.to(tl.int32),
                    (low >> 32).to(tl.int32),
                    high.to(tl.int32),
                    (high >> 32).to(tl.int32),
                ],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
                is_pure=True,
                pack=1,
            )
            part = tl.inline_asm_elementwise(
                DOT,
                "=f,r,r,r,r,r,r,r,r",
                [q0, q1, q2, q3, x0, x1, x2, x3],
                dtype=tl.float32,
                is_pure=True,
                pack=1,
            )
            sums = sums[:m] + (sums[m] + part * scale.to(tl.float32),) + sums[m + 1 :]  # noqa: RUF005
    for m in tl.static_range(ROWS):
        out = tl.sum(sums[m], 1)[:, None]
        if bias_ptr is not None:
            out += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)
        tl.store(out_ptr + m * N + n, out.to(out_ptr.dtype.element_ty), n < N)


def serves(x: Tensor) -> bool:
    """Whether x is one or two rows of bf16, on a GPU that multiplies pairs of bf16 and has PDL."""
    return x.dtype == torch.bfloat16 and 1 <= num_rows(x) <= MAX_ROWS and overlap(x.device)["PDL"]


def multiply(
    x: Tensor, words: Tensor, scale: Tensor, zeros: Tensor | None, bias: Tensor | None, group: int
) -> Tensor:
    """The op linear_w4a16. words int32 [N, K/8]."""
    n, k = words.shape[0], words.shape[1] * 8
    out = x.new_empty((*x.shape[:-1], n))
    rows = num_rows(x)
    # H200, one and two rows, us: 4096 -> 4096 4.4 5.9, 4096 -> 24576 19 27, 12288 -> 4096 11.6
    # 16.7. Without maxnreg, which changes the order of instructions: 4.8 7.2, 21 27, 11.4 25.
    _few[(triton.cdiv(n, 4),)](
        by_fours(x.reshape(rows, k)),
        words,
        scale,
        zeros,
        bias,
        out,
        n,
        K=k,
        GROUP=group,
        UNPACK=UNPACK,
        PAIR=PAIR,
        DOT=DOT,
        ROWS=rows,
        BLOCK_N=4,
        BLOCK_W=min(triton.next_power_of_2(k // 8), 128),
        num_warps=4,
        maxnreg=64,
        **overlap(x.device),
    )
    return out
