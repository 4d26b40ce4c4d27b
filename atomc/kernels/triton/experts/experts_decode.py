"""Mixtures of experts for few tokens in Triton, bound by the bandwidth of reading the weights.

Two kernels, without sorting tokens by experts: a program of the first takes a choice of a token and
some rows of gate and up, one of the second a token and some rows of down, of all of its experts,
which it adds in a fixed order. Programs of one choice of rows run side by side, so that tokens of
the same expert share reads through the L2 cache.

The first kernel waits for the ids before it reads anything. It lets the second one start as soon as
it has them, and that one reads its first weights before it waits for the activations.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.checks import strided, too_wide, unknown, unlike, wrong_rank
from atomc.kernels.triton.experts.experts_decode_sums import sums_of_numbers, sums_of_words
from atomc.kernels.triton.experts.weighted_sum import weighted_sum
from atomc.kernels.triton.launch.launch import (
    TRITON_DTYPE,
    int64_view,
    let_next_start,
    overlap,
    wait_for_last,
)
from atomc.kernels.triton.launch.tile_table import ExpertsFewTile
from atomc.kernels.triton.rows.gate import GateConstants, activated
from atomc.ops.experts import ACTIVATIONS
from atomc.ops.formats import FLOATS, HALVES
from atomc.ops.op import Refusal
from atomc.platform import Platform

MAX_TOKENS = 16
FEW = ops.Tokens(1, MAX_TOKENS)
MAX_CHOICES = 32


def _most_tokens(pairs: int, choices: int) -> int:
    """Those of so many pairs, as a power of two: a step of each is launched before the first
    request.
    """
    return 1 << (min(max(1, pairs // choices), MAX_TOKENS).bit_length() - 1)


def up_to_half(ids: Tensor, w13: Tensor) -> int:
    """The most tokens with at most half as many pairs as there are experts.

    Of more, the kernels for many tokens read each expert once, not once for each pair, and are
    faster (H200): DeepSeek-V2-Lite's 64 experts in bf16, 24 pairs 94 us and 93, 96 pairs 309 and
    204. Qwen3-30B's 128 in int4, in the order of the checkpoint: 32 pairs 62 and 66, 64 114 and 97.
    """
    return _most_tokens(w13.shape[0] // 2, ids.shape[-1])


def up_to_all(ids: Tensor, w13: Tensor) -> int:
    """The most tokens with at most as many pairs as there are experts: GPT-OSS' 32 experts in the
    order of the checkpoint, H200, us, 32 pairs 334 and with the kernels for many tokens 399, 64
    pairs 659 and 519.
    """
    return _most_tokens(w13.shape[0], ids.shape[-1])


@triton.jit
def _rounded(x, like):
    """x, fp32, rounded to the type of the elements of a pointer."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _sums(
    x_ptr,
    x_row,
    weight,
    expert,
    row,
    here,
    there,
    K: constexpr,
    FORM: constexpr,
    GROUP: constexpr,
    SIXTEEN: constexpr,
    BLOCK_K: constexpr,
    PDL: constexpr,
):
    """The sums of experts_decode_sums.py for rows of weights stored in this FORM."""
    weight_row = expert * weight.expert + row * weight.row
    if FORM == "numbers":
        return sums_of_numbers(x_ptr, x_row, weight, weight_row, here, there, K, BLOCK_K, PDL)
    else:
        return sums_of_words(
            x_ptr,
            x_row,
            weight,
            weight_row,
            expert * weight.scale_expert + row * weight.scale_row,
            here,
            there,
            K,
            GROUP,
            FORM == "int4",
            SIXTEEN,
            BLOCK_K,
            PDL,
        )


@triton.jit
def _gate_and_up(
    x_ptr,
    ids_ptr,
    weight,
    out_ptr,
    x_step,
    E: constexpr,
    I: constexpr,  # noqa: E741
    K: constexpr,
    CHOICES: constexpr,
    FORM: constexpr,
    GROUP: constexpr,
    SIXTEEN: constexpr,
    GATE: constexpr,
    BLOCK_N: constexpr,
    BLOCK_K: constexpr,
    PDL: constexpr,
):
    """The gated activation [T, k, I], of a choice of a token and BLOCK_N columns; 2 * BLOCK_N rows
    of the weight.
    """
    # The next kernel starts when all programs of this one have the ids: it needs not wait for them.
    wait_for_last(PDL)
    let_next_start(PDL)
    pair = tl.program_id(0)
    first = tl.program_id(1) * BLOCK_N
    j = tl.arange(0, 2 * BLOCK_N)[:, None, None]
    if GATE.interleaved:
        row = 2 * first + j
        inside = row < 2 * I
    else:
        row = first + j % BLOCK_N
        inside = row < I
        row += j // BLOCK_N * I
    token = tl.zeros((1, 1, 1), tl.int32) + pair // CHOICES
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    valid = (expert >= 0) & (expert < E)
    here = (token >= 0) & valid
    there = here & inside
    sums = _sums(
        x_ptr,
        token * x_step,
        weight,
        expert,
        row,
        here,
        there,
        K,
        FORM,
        GROUP,
        SIXTEEN,
        BLOCK_K,
        False,
    )
    h = tl.reshape(sums, (2 * BLOCK_N, 1, 1))
    if weight.bias is not None:
        h += tl.load(weight.bias + expert * (2 * I) + row, there, 0.0).to(tl.float32)
    h = _rounded(h, out_ptr)
    if GATE.interleaved:
        gate, up = tl.split(tl.reshape(h, (BLOCK_N, 2)))
    else:
        gate, up = tl.split(tl.permute(tl.reshape(h, (2, BLOCK_N)), (1, 0)))
    out = activated(gate, up, GATE, out_ptr.dtype.element_ty)
    column = first + tl.arange(0, BLOCK_N)
    out_at = out_ptr + pair.to(tl.int64) * I + column
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), valid & (column < I))


@triton.jit
def _down(
    x_ptr,
    ids_ptr,
    weights_ptr,
    weight,
    out_ptr,
    E: constexpr,
    H: constexpr,
    K: constexpr,
    CHOICES: constexpr,
    FORM: constexpr,
    GROUP: constexpr,
    SIXTEEN: constexpr,
    BLOCK_N: constexpr,
    BLOCK_C: constexpr,
    BLOCK_K: constexpr,
    PDL: constexpr,
):
    """Of the rows [T, k, K] of x, out [T, H], of a token and BLOCK_N columns. With fewer experts
    than choices a program (BLOCK_C < CHOICES), their results before weighting, out [T, k, H].
    """
    PARTS: constexpr = (CHOICES + BLOCK_C - 1) // BLOCK_C
    let_next_start(PDL)
    token = tl.program_id(0) // PARTS
    begin_choice = tl.program_id(0) % PARTS * BLOCK_C
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None, None]
    choice = begin_choice + tl.arange(0, BLOCK_C)[None, :, None]
    pair = token * CHOICES + choice
    expert = tl.load(ids_ptr + pair, choice < CHOICES, -1).to(tl.int64)
    here = (expert >= 0) & (expert < E)
    there = here & (n < H)
    sums = _sums(
        x_ptr,
        # Numbers are those of any number of tokens, where bits do not depend on it.
        (pair.to(tl.int64) if FORM == "numbers" else pair) * K,
        weight,
        expert,
        n,
        here,
        there,
        K,
        FORM,
        GROUP,
        SIXTEEN,
        BLOCK_K,
        PDL,
    )
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    choice = begin_choice + tl.arange(0, BLOCK_C)[None, :]
    pair = token * CHOICES + choice
    expert = tl.load(ids_ptr + pair, choice < CHOICES, -1).to(tl.int64)
    here = (expert >= 0) & (expert < E)
    there = here & (n < H)
    if weight.bias is not None:
        sums += tl.load(weight.bias + expert * H + n, there, 0.0).to(tl.float32)
    results = _rounded(sums, out_ptr)
    if PARTS == 1:
        factor = tl.load(weights_ptr + pair, here, 0.0)
        weighted = results * factor.to(tl.float32)
        if weights_ptr.dtype.element_ty == out_ptr.dtype.element_ty:
            weighted = _rounded(weighted, out_ptr)
        total = tl.sum(tl.where(here, weighted, 0.0), 1)[:, None]
        tl.store(out_ptr + token * H + n, total.to(out_ptr.dtype.element_ty), n < H)
    else:
        tl.store(
            out_ptr + pair.to(tl.int64) * H + n,
            tl.where(here, results, 0.0).to(out_ptr.dtype.element_ty),
            (choice < CHOICES) & (n < H),
        )


class Stored(NamedTuple):
    """The weights of all experts [E, rows, ...], and what belongs to them."""

    values: Tensor
    scale: Tensor | None = None
    zeros: Tensor | None = None
    bias: Tensor | None = None


class Form(NamedTuple):
    """How weights are stored: "numbers"; "int4" or "e2m1", eight codes in a word of 32 bits, with a
    scale for each group of columns.
    """

    name: str
    group: int = 0

    @property
    def packed(self) -> bool:
        return self.name != "numbers"

    def read(self, x: Tensor) -> Tensor:
        """x, a matrix, as a kernel reads it: beside words four 16-bit values at a time."""
        return int64_view(x) if self.packed and x.dtype in HALVES else x

    def constants(self, x: Tensor) -> dict[str, object]:
        return {
            "FORM": self.name,
            "GROUP": self.group,
            "SIXTEEN": TRITON_DTYPE[x.dtype] if self.packed and x.dtype in HALVES else None,
        }


class _Weight(NamedTuple):
    """Stored, with its strides, as one argument of a kernel."""

    ptr: Tensor
    scale: Tensor | None
    zeros: Tensor | None
    bias: Tensor | None
    expert: int
    row: int
    column: int
    scale_expert: int | None = None
    scale_row: int | None = None


def _weight(stored: Stored) -> _Weight:
    scale = stored.scale
    of_scale = () if scale is None else scale.stride()[:2]
    return _Weight(*stored, *stored.values.stride(), *of_scale)


def _down_sums(
    h: Tensor,
    ids: Tensor,
    weights: Tensor,
    down: Stored,
    form: Form,
    out_dtype: torch.dtype,
    tile: ExpertsFewTile,
) -> Tensor:
    """The weighted sums [T, H] of the second products of h [T * k, I]."""
    (tokens, choices), inner = ids.shape, h.shape[1]
    experts, hidden = down.values.shape[:2]
    block = 1 if tile.apart else triton.next_power_of_2(choices)
    parts = triton.cdiv(choices, block)
    rows, width = tile.down_shape(inner, block)
    results = h.new_empty((tokens, parts if parts == 1 else choices, hidden), dtype=out_dtype)
    _down[(tokens * parts, triton.cdiv(hidden, rows))](
        form.read(h),
        ids,
        weights,
        _weight(down),
        results,
        E=experts,
        H=hidden,
        K=inner,
        CHOICES=choices,
        BLOCK_N=rows,
        BLOCK_C=block,
        BLOCK_K=width,
        **form.constants(h),
        num_warps=tile.warps,
        **overlap(h.device),
    )
    return (
        results[:, 0] if parts == 1 else weighted_sum(results.flatten(0, 1), ids, weights, experts)
    )


def compute(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Stored,
    down: Stored,
    form: Form,
    gate: GateConstants,
    out_dtype: torch.dtype,
    tile: ExpertsFewTile,
) -> Tensor:
    """The op, with the given tile. x [T, H]."""
    experts, hidden = down.values.shape[:2]
    inner = up.values.shape[1] // 2
    columns = up.values.shape[2] * (8 if form.packed else 1)
    tokens, choices = ids.shape
    if not tokens:
        return x.new_empty((0, hidden), dtype=out_dtype)
    ids, weights = ids.contiguous(), weights.contiguous()
    x = x.contiguous() if form.packed else x
    h = x.new_empty((tokens * choices, inner), dtype=out_dtype)
    rows, width = tile.up_shape(columns)
    _gate_and_up[(tokens * choices, triton.cdiv(inner, rows // 2))](
        form.read(x),
        ids,
        _weight(up),
        h,
        x.stride(0),
        E=experts,
        I=inner,
        K=columns,
        CHOICES=choices,
        GATE=gate,
        BLOCK_N=rows // 2,
        BLOCK_K=width,
        **form.constants(x),
        num_warps=tile.warps,
        **overlap(x.device),
    )
    return _down_sums(h, ids, weights, down, form, out_dtype, tile)


def refuse_more_tokens(x: Tensor) -> Refusal | None:
    if isinstance(x.shape[0], int) and x.shape[0] > MAX_TOKENS:
        return Refusal("slower", f"more than {MAX_TOKENS} tokens, whose experts meet again")
    return None


def unfit(
    platform: Platform,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    activation: str,
) -> Refusal | None:
    """Refuse what these kernels do not read, whatever the format of the weights."""
    choices = ids.shape[-1]
    if platform.is_cpu:
        return Refusal("hardware", "Triton kernels run on a GPU")
    if not all(isinstance(size, int) for size in (*w13.shape, *w2.shape, choices)):
        return Refusal("shape", "the size of a weight, or the number of choices, is dynamic")
    for name, bias in (("b13", b13), ("b2", b2)):
        if bias is not None and not bias.is_contiguous():
            return Refusal("layout", f"{name} is not contiguous")
    return (
        wrong_rank((2,), x=x, ids=ids, weights=weights)
        or unlike((torch.int32, torch.int64), ids=ids)
        or unlike(FLOATS, weights=weights)
        or strided(x=x)
        or too_wide(choices, MAX_CHOICES, "choices")
        or unknown(ACTIVATIONS, activation=activation)
    )
