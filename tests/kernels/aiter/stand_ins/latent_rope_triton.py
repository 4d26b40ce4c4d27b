"""Rotary positions and the write into a latent cache in Triton, alone and behind a product by head.

The kernels go by strides, of tables by those of the cosines; slots and positions follow each other.
"""

import torch
from torch import Tensor

from stand_ins import stands_for
from stand_ins.batched_gemms import (
    batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant as product_in_fp8,
)
from stand_ins.batched_gemms import batched_gemm_a16wfp4 as product_in_mxfp4
from stand_ins.memory import check, contiguous_view
from stand_ins.rope_triton import CACHE, power_of_two, tables, turned

BMM = "aiter.ops.triton.fusions.fused_bmm_rope_kv_cache"


@stands_for(*CACHE)
def fused_qk_rope_cat_and_cache_mla(
    q_nope: Tensor,
    q_pe: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    pos: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_scale: Tensor | None,
    is_neox: bool,
    num_decode_toks_for_zeros: int = 0,
    apply_scale: bool = True,
    q_out: Tensor | None = None,
    decode_q_pe_out: Tensor | None = None,
    k_pe_out: Tensor | None = None,
    q_out_dtype: torch.dtype | None = None,
    shuffled_kv_cache: bool = False,
    upcast_operand: bool = False,
) -> tuple[Tensor, ...]:
    """q [T, H, L + R], and rows [L + R] of a cache [slots, 1, L + R]: the latent k_nope [T, 1, L] and
    the rotated k_pe [T, 1, R].
    """
    check(k_scale is None and not shuffled_kv_cache and not num_decode_toks_for_zeros, "not played")
    check(kv_cache.dtype == torch.bfloat16, "KV cache dtype must be BF16, FP8 or packed FP4")
    (tokens, heads, latent), rotated = q_nope.shape, q_pe.shape[-1]
    check(q_pe.shape == (tokens, heads, rotated), "Q dimensions should be identical")
    check(k_nope.shape == (tokens, 1, latent), "D dimension of q_nope and k_nope")
    check(k_pe.shape == (tokens, 1, rotated), "D dimension of q_pe and k_pe")
    check(kv_cache.shape[1:] == (1, latent + rotated), "D dimension of kv_cache")
    check(kv_cache.stride(2) == 1, "The stride of the last dimension of KV cache must be 1")
    check(cos.shape[-1] in (rotated, rotated // 2), "cos/sin last dim")
    for width in (latent, rotated):
        power_of_two(width, "a block")
    half = cos.shape[-1] == rotated // 2
    first, second = (x[contiguous_view(pos, tokens)] for x in tables(cos, sin))
    out = q_nope.new_empty((tokens, heads, latent + rotated)) if q_out is None else q_out
    out.copy_(torch.cat((q_nope.float(), turned(q_pe, first, second, is_neox, half)), -1))
    keys = torch.cat((k_nope.float(), turned(k_pe, first, second, is_neox, half)), -1)
    for t, slot in enumerate(contiguous_view(slot_mapping, tokens).tolist()):
        if slot >= 0:
            kv_cache[slot] = keys[t].to(kv_cache.dtype)
    return out, q_pe, keys[..., latent:].to(k_pe.dtype), kv_cache


@stands_for(BMM)
def fused_fp8_bmm_rope_cat_and_cache_mla(
    q_nope: Tensor,
    w_k: Tensor,
    w_k_scale: Tensor,
    q_pe: Tensor,
    k_nope: Tensor,
    k_rope: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    group_size: int = 128,
    transpose_bm: bool = True,
    config: object = None,
    k_scale: Tensor | None = None,
    is_neox: bool = False,
    q_out_dtype: torch.dtype | None = torch.bfloat16,
    num_decode_toks_for_zeros: int = 0,
) -> tuple[Tensor, ...]:
    """q_nope [H, T, P] by w_k [H, L, P], and what fused_qk_rope_cat_and_cache_mla does with it."""
    check(transpose_bm and config is None, "not played")
    projected = product_in_fp8(
        q_nope, w_k, w_k_scale, group_size, dtype=q_out_dtype or torch.bfloat16, transpose_bm=True
    )
    rows = (k_nope, k_rope, kv_cache, slot_mapping, positions, cos, sin, k_scale, is_neox)
    return fused_qk_rope_cat_and_cache_mla(
        projected, q_pe, *rows, num_decode_toks_for_zeros, apply_scale=False
    )


@stands_for(BMM)
def fused_fp4_bmm_rope_cat_and_cache_mla(
    q_nope: Tensor,
    w_k: Tensor,
    w_k_scale: Tensor,
    q_pe: Tensor,
    k_nope: Tensor,
    k_rope: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    y: Tensor | None = None,
    transpose_bm: bool = True,
    prequant: bool = True,
    y_scale: Tensor | None = None,
    config: object = None,
    k_scale: Tensor | None = None,
    is_neox: bool = False,
    q_out_dtype: torch.dtype | None = None,
    num_decode_toks_for_zeros: int = 0,
) -> tuple[Tensor, ...]:
    """As fused_fp8_bmm_rope_cat_and_cache_mla, in MXFP4."""
    check(transpose_bm and config is None and y is None and y_scale is None, "not played")
    projected = product_in_mxfp4(
        q_nope, w_k, w_k_scale, q_out_dtype or q_nope.dtype, transpose_bm=True, prequant=prequant
    )
    rows = (k_nope, k_rope, kv_cache, slot_mapping, positions, cos, sin, k_scale, is_neox)
    return fused_qk_rope_cat_and_cache_mla(
        projected, q_pe, *rows, num_decode_toks_for_zeros, apply_scale=False
    )
