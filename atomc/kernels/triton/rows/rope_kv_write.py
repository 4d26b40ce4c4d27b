"""RoPE in Triton with the write into a paged cache, optionally after q/k norms.

A program takes a few rows of q, or of k and v, each one head of one token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal
from atomc.kernels.triton.launch.launch import (
    TRITON_DTYPE,
    begin,
    inner_sizes,
    num_rows,
    row_offset,
    row_strides,
)
from atomc.kernels.triton.launch.tiles import HEAD_ROWS
from atomc.kernels.triton.rows.kv_write import (
    byte_view,
    cache_offset,
    codes_of,
    copy_rows,
    inverse_scale,
    refuse_kv_write,
)
from atomc.kernels.triton.rows.norm import normed_dtype
from atomc.kernels.triton.rows.rope import (
    empty_rows,
    launch_arguments,
    refuse_qk_norm_rope,
    rotated,
    store_parts,
    table_strides,
)


@triton.jit(do_not_specialize=["q_rows", "k_rows", "q_programs"])
def _rope_kv_write(
    q_ptr,
    k_ptr,
    v_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_rows,
    k_rows,
    q_programs,
    d1,
    q0,
    q1,
    q2,
    k0,
    k1,
    k2,
    v0,
    v1,
    v2,
    t0,
    t1,
    t2,
    q_out0,
    q_out1,
    q_out2,
    k_token,
    k_head,
    v_token,
    v_head,
    eps,
    NORMED: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    STYLE: tl.constexpr,
    CODES: tl.constexpr,
    BY_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    begin(PDL)
    OUT: tl.constexpr = q_out_ptr.dtype.element_ty
    if program < q_programs:
        row = program * ROWS + tl.arange(0, ROWS)[:, None]
        inside = row < q_rows
        a, b, rest = rotated(
            q_ptr,
            row_offset(row, d1, Q_HEADS, q0, q1, q2),
            inside,
            q_weight_ptr,
            cos_ptr,
            sin_ptr,
            row_offset(row, d1, Q_HEADS, t0, t1, t2),
            eps,
            NORMED,
            OUT,
            D,
            HALF,
            BLOCK,
            BLOCK_REST,
            NORM,
            STYLE,
        )
        store_parts(
            q_out_ptr,
            row_offset(row, d1, Q_HEADS, q_out0, q_out1, q_out2),
            inside,
            a,
            b,
            rest,
            1.0,
            D,
            HALF,
            BLOCK,
            BLOCK_REST,
            STYLE,
            "",
            False,
        )
    else:
        row = (program - q_programs) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = row < k_rows
        a, b, rest = rotated(
            k_ptr,
            row_offset(row, d1, K_HEADS, k0, k1, k2),
            inside,
            k_weight_ptr,
            cos_ptr,
            sin_ptr,
            row_offset(row, d1, K_HEADS, t0, t1, t2),
            eps,
            NORMED,
            OUT,
            D,
            HALF,
            BLOCK,
            BLOCK_REST,
            NORM,
            STYLE,
        )
        k_at, inside = cache_offset(slots_ptr, row, inside, K_HEADS, k_token, k_head)
        v_at, _ = cache_offset(slots_ptr, row, inside, K_HEADS, v_token, v_head)
        store_parts(
            k_cache_ptr,
            k_at,
            inside,
            a,
            b,
            rest,
            inverse_scale(k_scale_ptr),
            D,
            HALF,
            BLOCK,
            BLOCK_REST,
            STYLE,
            CODES,
            BY_BITS,
        )
        copy_rows(
            v_ptr,
            row_offset(row, d1, K_HEADS, v0, v1, v2),
            v_cache_ptr,
            v_at,
            inside,
            inverse_scale(v_scale_ptr),
            DV,
            BLOCK_DV,
            CODES,
            BY_BITS,
        )


refuse_rope_kv_write = first_refusal(refuse_kv_write, refuse_qk_norm_rope)


def _launch_with_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    style: str,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    norm: str = "",
) -> tuple[Tensor, Tensor]:
    normed = q.dtype if q_weight is None else normed_dtype(q, q_weight, norm)
    q_out = empty_rows(q, cos, style, torch.promote_types(normed, cos.dtype))
    if k_rows := num_rows(k):
        (d1, q_heads), (_, k_heads) = inner_sizes(q), inner_sizes(k)
        q_rows = num_rows(q)
        rows_a_program = HEAD_ROWS.choose(q.device, q_rows + k_rows)
        q_programs = triton.cdiv(q_rows, rows_a_program)
        _rope_kv_write[(q_programs + triton.cdiv(k_rows, rows_a_program),)](
            q,
            k,
            v,
            q_weight,
            k_weight,
            cos,
            sin,
            q_out,
            byte_view(k_cache),
            byte_view(v_cache),
            slots,
            k_scale,
            v_scale,
            q_rows,
            k_rows,
            q_programs,
            d1,
            *row_strides(q),
            *row_strides(k),
            *row_strides(v),
            *table_strides(cos, q),
            *row_strides(q_out),
            *k_cache.stride()[1:3],
            *v_cache.stride()[1:3],
            eps,
            NORMED=TRITON_DTYPE[normed],
            Q_HEADS=q_heads,
            K_HEADS=k_heads,
            DV=v.shape[-1],
            BLOCK_DV=triton.next_power_of_2(v.shape[-1]),
            NORM=norm,
            **launch_arguments(q, cos, style, rows_a_program),
            **codes_of(k_cache),
        )
    return q_out, q_out.new_empty((0,))


@ops.rope_kv_write.kernel(
    "triton", layout="paged", refuses=refuse_rope_kv_write, tuned_for=HEAD_ROWS.archs
)
def rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    rope_style: str = "neox",
) -> tuple[Tensor, Tensor]:
    return _launch_with_write(
        q, k, v, cos, sin, k_cache, v_cache, slots, k_scale, v_scale, rope_style
    )


@ops.qk_norm_rope_kv_write.kernel(
    "triton", layout="paged", refuses=refuse_rope_kv_write, tuned_for=HEAD_ROWS.archs
)
def qk_norm_rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    norm_style: str = "after",
    rope_style: str = "neox",
) -> tuple[Tensor, Tensor]:
    return _launch_with_write(
        q,
        k,
        v,
        cos,
        sin,
        k_cache,
        v_cache,
        slots,
        k_scale,
        v_scale,
        rope_style,
        q_weight,
        k_weight,
        eps,
        norm_style,
    )
