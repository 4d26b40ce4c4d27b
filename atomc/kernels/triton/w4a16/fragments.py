"""4-bit weights in the order in which tensor cores hold a tile in their registers.

An instruction multiplies 16 rows by 16 columns, of which thread 4r + q of a warp has columns 2q,
2q + 1, 2q + 8 and 2q + 9 of rows r and r + 8 ("Matrix Fragments for mma.m16n8k16", PTX ISA). The
codes of two instructions, 32 columns, are one word of 32 bits a row and thread; the four words of
PART columns are next to each other. A thread thus reads 16 bytes and unpacks them where they are
multiplied: nothing goes through shared memory.

Word (q, g) of a part has, for j = 0..3 and h = 0..1, the code of column 32g + 8j + 2q + h: pair j
of the word, one code in its lower half (h = 0), one in the upper. Words are in the order 4q + g.

A part of STRIP rows is contiguous, 1 KB, and the parts of a strip follow each other; so do their
scales. A program thus reads as many bytes as it needs, and memory in its order.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc.ops.op import Prepared

PART = 128  # columns whose words are together
STRIP = constexpr(16)  # rows; a weight has a multiple of them, as of the groups of scales
# Of the exponents of e8m0 scales, so that 2^-126 times a code and its scale is a normal bf16.
RAISED = 100
# What RAISED and the subnormal codes leave to the sums.
E2M1_UNIT = constexpr(2.0**26)
_CHUNK = 2**22  # words that are reordered at a time, which takes some 60 bytes for each
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def _expert_strips(weight: Tensor) -> Tensor:
    """[E, N, ...]; of a matrix [N, ...] each strip is an expert of its own."""
    return weight.view(-1, STRIP.value, weight.shape[1]) if weight.dim() == 2 else weight


def _packed_parts(codes: Tensor, pair: Callable[[Tensor, Tensor, int], Tensor]) -> Tensor:
    """int32 [E, strips, parts, STRIP, 16] of codes [E, N, K], 0..15; `pair` places two of them in a
    word.
    """
    codes = F.pad(codes.int(), (0, -codes.shape[-1] % PART))
    experts, rows, columns = codes.shape
    each = codes.view(experts, rows, columns // PART, 4, 4, 4, 2)  # part, g, j, q, h
    words = codes.new_zeros(experts, rows, columns // PART, 4, 4)  # part, g, q
    for j in range(4):
        words |= pair(each[..., j, :, 0], each[..., j, :, 1], j)
    return _strip_order(words.transpose(-1, -2).flatten(-2))


def _strip_order(by_part: Tensor) -> Tensor:
    """[E, strips, parts, STRIP, ...] of what each row [E, N, parts, ...] has by part."""
    experts, rows, *rest = by_part.shape
    strips = by_part.view(experts, rows // STRIP.value, STRIP.value, *rest)
    return strips.transpose(2, 3).contiguous()


def _reordered(
    packed: Tensor,
    unpack: Callable[[Tensor], Tensor],
    pair: Callable[[Tensor, Tensor, int], Tensor],
) -> Prepared:
    """Some experts at a time: their codes take many times the memory of their words."""
    packed = _expert_strips(packed)
    experts = max(1, _CHUNK // max(1, packed[0].numel()))
    starts = range(0, len(packed), experts)
    parts = [_packed_parts(unpack(packed[start : start + experts]), pair) for start in starts]
    return Prepared((torch.cat(parts),))


def _turned_right(words: Tensor, by: int) -> Tensor:
    """int32 words whose last bits become the first ones, for 0 < by < 32."""
    return (words << (32 - by)) | ((words >> by) & ((1 << (32 - by)) - 1))


def _e2m1_words(low: Tensor, high: Tensor, j: int) -> Tensor:
    """Signs and magnitudes of pair j where _e2m1_pair moves them to those of two bf16, bits 15 and
    8 to 6. No four places for these bits fill half a word; the last pair is in two pieces.
    """
    bits = ((low >> 3) << 15) | ((low & 7) << 6) | ((high >> 3) << 31) | ((high & 7) << 22)
    if j == 0:
        return bits
    if j < 3:
        return _turned_right(bits, (4, 10)[j - 1])
    return _turned_right(bits & ~0x00400040, 14) | _turned_right(bits & 0x00400040, 6)


def e2m1_fragments(packed: Tensor) -> Prepared:
    """int32 [E, strips, parts, STRIP, 16] of e2m1 codes, uint8 [E, N, K/2], the lower four bits
    first.
    """

    def unpack(some: Tensor) -> Tensor:
        return torch.stack((some & 15, some >> 4), -1).flatten(-2)

    return _reordered(packed, unpack, _e2m1_words)


def int4_fragments(words: Tensor, group: int = PART) -> Prepared:
    """int32 [E, strips, parts, STRIP, 16] of int4 codes, int32 [E, N, K/8]: the same for each size
    of the group of columns that shares a scale.
    """
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)

    def unpack(some: Tensor) -> Tensor:
        return ((some[..., None] >> shifts) & 15).flatten(-2)

    def pair(low: Tensor, high: Tensor, j: int) -> Tensor:
        return (low | (high << 16)) << (4 * j)

    return _reordered(words, unpack, pair)


def packed_groups(values: Tensor, group: int = 32) -> Prepared:
    """Integers [E, strips, parts, STRIP] of scales of 16 bits or codes of 8 [E, N, K/group]: those
    of a row and part, one to four, are one integer, the first in its lowest bits.
    """
    groups, values = PART // group, _expert_strips(values)
    padded = F.pad(values, (0, -values.shape[-1] % groups)).contiguous()
    return Prepared((_strip_order(padded.view(_INTEGERS[groups * values.itemsize])),))


def raised_exponents(scale: Tensor) -> Prepared:
    """packed_groups of the exponents of bf16 numbers that are 2^RAISED times the e8m0 scales, uint8
    [E, N, K/32]. Scales above 2^27 become infinity.
    """
    return packed_groups((scale.int() + RAISED).clamp(max=255).to(torch.uint8))


@triton.jit
def fragment_row(place, WARPS: constexpr):
    """The row of a tile that is at this place where warps read rows in groups of eight."""
    # A warp multiplies 16 rows. It reads 8 of them, and 8 that are 8 * WARPS places further.
    return (
        place // (16 * WARPS) * (16 * WARPS)
        + place // 8 % WARPS * 16
        + place // (8 * WARPS) % 2 * 8
        + place % 8
    )


@triton.jit
def strip_offset(row, part, PARTS: constexpr):
    """Where packed_groups() has this part of a row."""
    return (row // STRIP * PARTS + part) * STRIP + row % STRIP


@triton.jit
def group_values(packed, GROUP: constexpr, BITS: constexpr):
    """int32 [BLOCK_N, 4, 4] of packed integers [BLOCK_N, 4]: for each of four times 32 columns the
    BITS of their group.
    """
    shift = tl.arange(0, 4) * 32 // GROUP * BITS
    return (packed[:, :, None] >> shift[None, None, :]).to(tl.int32) & ((1 << BITS) - 1)


@triton.jit
def _turned_left(words, BY: constexpr):
    return (words << BY) | (words.to(tl.uint32, bitcast=True) >> (32 - BY)).to(
        tl.int32, bitcast=True
    )


@triton.jit
def _e2m1_pair(words, j: constexpr):
    """Pair j as two bf16, times 2^-126."""
    # Exponent and mantissa are adjacent, as in bf16; 0.5 is a subnormal.
    if j == 0:
        return words & -0x7E3F7E40
    elif j == 1:
        return (words << 4) & -0x7E3F7E40
    elif j == 2:
        return _turned_left(words, 10) & -0x7E3F7E40
    else:
        return (_turned_left(words, 14) & -0x7E7F7E80) | ((words << 6) & 0x00400040)


@triton.jit
def _int4_pair(words, j: constexpr, SIXTEEN: constexpr):
    """Pair j as two 16-bit numbers, plus 128 (bf16) or 1024 (fp16)."""
    BIAS: constexpr = 0x43004300 if tl.bfloat16 == SIXTEEN else 0x64006400
    return ((words >> (4 * j)) & 0x000F000F) | BIAS


# fma(a, b, -0.0) and fma(a, 1.0, b): sm80 multiplies and adds bf16 by fma only.
_TIMES_BF16 = constexpr(
    "{.reg .b32 t, c; mov.b32 c, 0x80008000; fma.rn.bf16x2 t, $2, $3, c; mov.b32 {$0, $1}, t;}"
)
# _int4_pair() of words that are shifted already, in one instruction, and what is added to it.
_PLUS_BF16 = constexpr(
    "{.reg .b32 t, c; lop3.b32 t, $2, 0x000F000F, 0x43004300, 0xEA; mov.b32 c, 0x3F803F80; "
    "fma.rn.bf16x2 t, t, c, $3; mov.b32 {$0, $1}, t;}"
)
_PLUS_FP16 = constexpr(
    "{.reg .b32 t; lop3.b32 t, $2, 0x000F000F, 0x64006400, 0xEA; "
    "add.f16x2 t, t, $3; mov.b32 {$0, $1}, t;}"
)
# The sum is exact; only its product with $4 is rounded.
_PLUS_TIMES_BF16 = constexpr(
    "{.reg .b32 t, c; lop3.b32 t, $2, 0x000F000F, 0x43004300, 0xEA; mov.b32 c, 0x3F803F80; "
    "fma.rn.bf16x2 t, t, c, $3; mov.b32 c, 0x80008000; fma.rn.bf16x2 t, t, $4, c; "
    "mov.b32 {$0, $1}, t;}"
)
_PLUS_TIMES_FP16 = constexpr(
    "{.reg .b32 t; lop3.b32 t, $2, 0x000F000F, 0x64006400, 0xEA; "
    "add.f16x2 t, t, $3; mul.f16x2 t, t, $4; mov.b32 {$0, $1}, t;}"
)


@triton.jit
def _half_results(operands, ASM: constexpr, SIXTEEN: constexpr):
    """The lower and the upper halves of what ASM computes of pairs. Compiled from operations on
    single 16-bit numbers, a third of the instructions would take pairs apart and join them again.
    """
    low, high = tl.inline_asm_elementwise(
        ASM,
        "=h,=h,r,r" if len(operands) == 2 else "=h,=h,r,r,r",
        operands,
        dtype=(tl.int16, tl.int16),
        is_pure=True,
        pack=1,
    )
    return tl.join(low.to(SIXTEEN, bitcast=True), high.to(SIXTEEN, bitcast=True))


@triton.jit
def _halves(pair, SIXTEEN: constexpr):
    low = pair.to(tl.int16).to(SIXTEEN, bitcast=True)
    high = (pair >> 16).to(tl.int16).to(SIXTEEN, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _values(
    words,
    j: constexpr,
    added,
    factor,
    SIXTEEN: constexpr,
    NUMBER: constexpr,
):
    """Pair j of each word in a new dimension."""
    BF16: constexpr = tl.bfloat16 == SIXTEEN
    if added is None:
        pair = _e2m1_pair(words, j)
    elif tl.float32 == NUMBER:
        pair = _int4_pair(words, j, SIXTEEN)
    else:
        pair = words >> (4 * j)
    if tl.float32 == NUMBER:
        low, high = _halves(pair, SIXTEEN)
        if added is not None:
            number, _ = _halves(added, SIXTEEN)
            low, high = low + number, high + number
        if factor is not None:
            number, _ = _halves(factor, SIXTEEN)
            low, high = low * number, high * number
        return tl.join(low, high)
    elif added is None:
        return _half_results([pair, factor], _TIMES_BF16, SIXTEEN)
    elif factor is None:
        return _half_results([pair, added], _PLUS_BF16 if BF16 else _PLUS_FP16, SIXTEEN)
    else:
        ASM: constexpr = _PLUS_TIMES_BF16 if BF16 else _PLUS_TIMES_FP16
        return _half_results([pair, added, factor], ASM, SIXTEEN)


@triton.jit
def _unseen(values, SIXTEEN: constexpr):
    """The values, of which Triton does not see how they are computed. Where warps multiply by
    themselves it gives a thread four adjacent columns of joined values, not two and two: x would be
    read four bytes at a time.
    """
    bits = tl.inline_asm_elementwise(
        "mov.b32 $0, $1;",
        "=r,r",
        [values.to(tl.int16, bitcast=True)],
        dtype=tl.int16,
        is_pure=False,
        pack=2,
    )
    return bits.to(SIXTEEN, bitcast=True)


@triton.jit
def fragments(
    words,
    added,
    factor,
    WARPS: constexpr,
    SIXTEEN: constexpr,
    NUMBER: constexpr,
    ALONE: constexpr = False,
):
    """The values [BLOCK_N, 128] of words [BLOCK_N, 4, 4], in NUMBER: rows in their order, where
    those of the words are as fragment_row says.

    added    int32 of two equal 16-bit numbers, minus_zero() of int4 codes; None for e2m1 codes
    factor   likewise, of what the codes, or their sums with `added`, are multiplied with; None: 1
    SIXTEEN  the 16-bit type of a value without its scale
    NUMBER   SIXTEEN, or fp32, as the interpreter computes them
    ALONE    each warp multiplies by itself, as less than four do anyway
    """
    BLOCK_N: constexpr = words.shape[0]
    first = tl.join(
        _values(words, 0, added, factor, SIXTEEN, NUMBER),
        _values(words, 1, added, factor, SIXTEEN, NUMBER),
    )
    last = tl.join(
        _values(words, 2, added, factor, SIXTEEN, NUMBER),
        _values(words, 3, added, factor, SIXTEEN, NUMBER),
    )
    # [row, q, g, h, j % 2, j // 2] -> columns [g, j, q, h]
    ordered = tl.permute(tl.join(first, last), (0, 2, 5, 4, 1, 3))
    by_warp = tl.reshape(ordered, (BLOCK_N // (16 * WARPS), 2, WARPS, 8, 128))
    values = tl.reshape(tl.permute(by_warp, (0, 2, 1, 3, 4)), (BLOCK_N, 128))
    if tl.float32 == NUMBER or (WARPS >= 4 and not ALONE):
        return values
    else:
        return _unseen(values, SIXTEEN)


@triton.jit
def minus_zero(zero, SIXTEEN: constexpr):
    """What is added to the int4 codes of a pair whose zero is this code, fp32."""
    BIAS: constexpr = 128.0 if tl.bfloat16 == SIXTEEN else 1024.0
    bits = (0.0 - BIAS - zero).to(SIXTEEN).to(tl.int16, bitcast=True)
    return doubled(bits.to(tl.int32) & 0xFFFF)


@triton.jit
def doubled(bits):
    """The lower 16 bits, of which the upper ones are zero, twice."""
    return bits | (bits << 16)
