"""RoPE in Triton with the write into a paged cache, optionally after q/k norms.

A program takes a few rows of q, or of k and v, each one head of one token.
"""

from typing import Unpack

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.checks import first_refusal
from atomc.kernels.triton.launch.launch import (
    begin,
    inner_sizes,
    num_rows,
    rows_of,
)
from atomc.kernels.triton.launch.tiles import HEAD_ROWS
from atomc.kernels.triton.rows.kv_write import (
    cache_at,
    cache_rows,
    codes_of,
    inverse_scale,
    refuse_kv_write,
    slot_of,
    written_rows,
)
from atomc.kernels.triton.rows.rope import (
    empty_rows,
    launch_arguments,
    refuse_qk_norm_rope,
    rotate,
    rotated,
    store_parts,
    tables_of,
)
from atomc.ops.attention import CacheWrite


@triton.jit(do_not_specialize=["q_rows", "k_rows", "q_programs"])
def _rope_kv_write(
    q,
    k,
    v,
    k_cache,
    v_cache,
    slots,
    q_weight_ptr,
    k_weight_ptr,
    tables,
    q_out,
    q_rows,
    k_rows,
    q_programs,
    d1,
    eps,
    Q_HEADS: constexpr,
    K_HEADS: constexpr,
    DV: constexpr,
    PARTS: constexpr,
    ROWS: constexpr,
    NORM: constexpr,
    CODES: constexpr,
    BY_BITS: constexpr,
    PDL: constexpr,
):
    program = tl.program_id(0)
    begin(PDL)
    OUT: constexpr = q_out.ptr.dtype.element_ty
    if program < q_programs:
        sizes = (d1, Q_HEADS)
        rotate(q, q_out, program, q_rows, sizes, q_weight_ptr, tables, eps, ROWS, PARTS, NORM)
    else:
        row = (program - q_programs) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = row < k_rows
        sizes = (d1, K_HEADS)
        parts = rotated(k, row, inside, sizes, k_weight_ptr, tables, eps, OUT, PARTS, NORM)
        slot = slot_of(slots, row // K_HEADS, inside, d1)
        target, inverse = cache_at(k_cache, slot, row, K_HEADS), inverse_scale(k_cache.scale)
        store_parts(target, slot >= 0, parts, inverse, PARTS, CODES, BY_BITS)
        cache_rows(v, v_cache, slot, row, d1, K_HEADS, DV, CODES, BY_BITS)


refuse_rope_kv_write = first_refusal(refuse_kv_write, refuse_qk_norm_rope)


def _launch_with_write(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    style: str,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    norm: str = "",
    in_fp32: bool = False,
    **write: Unpack[CacheWrite],
) -> tuple[Tensor, Tensor]:
    q_out = empty_rows(q, cos, style, q_weight, norm, in_fp32)
    if k_rows := num_rows(k):
        (d1, q_heads), (_, k_heads) = inner_sizes(q), inner_sizes(k)
        q_rows = num_rows(q)
        rows_a_program = HEAD_ROWS.choose(q.device, q_rows + k_rows)
        q_programs = triton.cdiv(q_rows, rows_a_program)
        _rope_kv_write[(q_programs + triton.cdiv(k_rows, rows_a_program),)](
            rows_of(q),
            *written_rows(k, **write),
            q_weight,
            k_weight,
            tables_of(cos, sin, q),
            rows_of(q_out),
            q_rows,
            k_rows,
            q_programs,
            d1,
            eps,
            Q_HEADS=q_heads,
            K_HEADS=k_heads,
            DV=write["v"].shape[-1],
            NORM=norm,
            **launch_arguments(q, cos, style, rows_a_program, in_fp32),
            **codes_of(write["k_cache"]),
        )
    return q_out, q_out.new_empty((0,))


@ops.rope_kv_write.kernel(
    "triton", layout="paged", refuses=refuse_rope_kv_write, tuned_for=HEAD_ROWS.archs
)
def rope_kv_write(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    rope_style: str,
    in_fp32: bool,
    **write: Unpack[CacheWrite],
) -> tuple[Tensor, Tensor]:
    return _launch_with_write(q, k, cos, sin, rope_style, in_fp32=in_fp32, **write)


@ops.qk_norm_rope_kv_write.kernel(
    "triton", layout="paged", refuses=refuse_rope_kv_write, tuned_for=HEAD_ROWS.archs
)
def qk_norm_rope_kv_write(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    norm_style: str,
    rope_style: str,
    **write: Unpack[CacheWrite],
) -> tuple[Tensor, Tensor]:
    return _launch_with_write(
        q, k, cos, sin, rope_style, q_weight, k_weight, eps, norm_style, **write
    )
