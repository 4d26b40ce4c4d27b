"""Rotary positions in Triton, alone and with what is written into a paged cache. The kernels go by
strides: of tables, those of the cosines; slots and positions follow each other.
"""

import torch
from torch import Tensor

from stand_ins import stands_for
from stand_ins.memory import check, contiguous_view
from stand_ins.rope import GPTJ, NEOX, rotated

ROPE = ("aiter.ops.triton.rope.rope", "aiter.ops.triton.rope")
CACHE = ("aiter.ops.triton.fusions.fused_kv_cache", "aiter.ops.triton.fused_kv_cache")


def power_of_two(width: int, what: str) -> None:
    check(width > 0 and width & (width - 1) == 0, f"{what} should be power of 2")


def tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Both [.., columns] in fp32 as rows, by the strides of cos."""
    rows, columns = cos.shape[0], cos.shape[-1]
    strides = (cos.stride(0), cos.stride(-1))
    first, second = (x.as_strided((rows, columns), strides).float() for x in (cos, sin))
    return first, second


def turned(x: Tensor, cos: Tensor, sin: Tensor, neox: bool, half_tables: bool) -> Tensor:
    """x [T, heads, D], of which the first columns rotate, by tables [T, columns] -> fp32."""
    style = NEOX if neox else GPTJ
    return rotated(x.float().unsqueeze(1), cos, sin, style, half_tables, False).squeeze(1)


@stands_for(*ROPE)
def rope_cached_fwd(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
    transpose_output: bool = False,
) -> Tensor:
    """x [S, B, H, D] by tables [S, 1, 1, columns]. All columns rotate, or half of them."""
    check(not transpose_output and not nope_first, "not played")
    width, columns = x.shape[-1], cos.shape[-1]
    half = columns == width // 4 or (columns == width // 2 and not reuse_freqs_front_part)
    part = width // 2 if half else width
    power_of_two(part, "the width of what rotates")
    check(columns == (part // 2 if reuse_freqs_front_part else part), "tables of another width")
    first, second = tables(cos, sin)
    return rotated(x, first, second, rotate_style, reuse_freqs_front_part, False)


@stands_for(*CACHE)
def fused_qk_rope_reshape_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    pos: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    is_neox: bool,
    flash_layout: bool,
    apply_scale: bool = True,
    offs: Tensor | None = None,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
    output_zeros: bool = True,
    zeros_out: Tensor | None = None,
    upcast_operand: bool = False,
) -> tuple[Tensor, ...]:
    """Caches [blocks, block_size, K, D], or keys [blocks, K, D/x, block_size, x] and values [blocks,
    K, block_size/x, D, x]. Codes are not saturated.
    """
    given = (offs, k_out, zeros_out, k_scale, v_scale)
    check(not output_zeros and not apply_scale and all(x is None for x in given), "not played")
    check(key_cache.dtype == torch.bfloat16, "KV cache dtype must be BF16, FP8 or packed FP4")
    (tokens, heads, width), (of_keys, shared, key_width) = q.shape, k.shape
    if flash_layout:
        keys, values = key_cache, value_cache
    else:
        _, _, pieces, size, piece = key_cache.shape
        keys = key_cache.permute(0, 3, 1, 2, 4)
        values = value_cache.permute(0, 2, 4, 1, 3)
    block_size = keys.shape[1] if flash_layout else size
    check(tokens == of_keys == v.shape[0] <= slot_mapping.shape[0], "numbers of tokens")
    check(width == key_width == v.shape[-1], "D dimension should be identical for q, k, and v")
    check(not flash_layout or width == keys.shape[-1] == values.shape[-1], "D of the caches")
    power_of_two(width, "D dimension")
    power_of_two(block_size, "block_size")
    check(heads % shared == 0, "Q heads must be multiple of H heads")
    check(cos.shape[-1] in (width, width // 2), "cos/sin last dim")
    half = cos.shape[-1] == width // 2
    first, second = (x[contiguous_view(pos, tokens)] for x in tables(cos, sin))
    out = q.new_empty(q.shape) if q_out is None else q_out
    out.copy_(turned(q, first, second, is_neox, half))
    turned_keys = turned(k, first, second, is_neox, half)
    for t, slot in enumerate(contiguous_view(slot_mapping, tokens).tolist()):
        if slot >= 0:
            block, place = divmod(slot, block_size)
            key, value = turned_keys[t], v[t]
            if flash_layout:
                keys[block, place], values[block, place] = key.to(keys.dtype), value
            else:
                keys[block, place] = key.unflatten(-1, (pieces, piece)).to(keys.dtype)
                values[block, place // piece, place % piece] = value
    return out, turned_keys.to(k.dtype), key_cache, value_cache


@stands_for("aiter.ops.triton.rope.fused_qkv_split_qk_norm_rope_cache")
def fused_qkv_split_qk_norm_rope_cache(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    qh: int,
    kvh: int,
    head_dim: int,
    is_neox: bool = True,
    offsets: Tensor | None = None,
    reuse_freqs_front_part: bool = True,
    attn_output_gate: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    eps: float = 1e-5,
    gated_qkv_layout: str = "interleaved",
    kv_cache_layout: str = "HND",
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [T, columns] -> q, k, v. Norms multiply by 1 + weight; caches are [blocks, block_size, K,
    D] ("NHD").
    """
    check(not attn_output_gate and kv_cache_layout == "NHD", "not played")
    check(offsets is None and k_scale is None and v_scale is None, "not played")
    check(key_cache.shape == value_cache.shape, "must have the same shape")
    check(tuple(key_cache.shape[2:]) == (kvh, head_dim), "NHD key_cache expected")
    check(qh % kvh == 0 and qkv.shape[-1] == (qh + 2 * kvh) * head_dim, "Shape error")
    power_of_two(head_dim, "head_dim")
    check(cos.shape[-1] * (1 + reuse_freqs_front_part) <= head_dim, "more columns than a head has")
    power_of_two(key_cache.shape[1], "block_size")
    tokens = qkv.shape[0]
    heads = qkv.unflatten(-1, (-1, head_dim))
    q, k, v = heads.split((qh, kvh, kvh), 1)
    first, second = (x[contiguous_view(positions, tokens)] for x in tables(cos, sin))

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        row = x.float()
        rms = torch.rsqrt(row.square().mean(-1, keepdim=True) + eps)
        scaled = row * rms * (1.0 + contiguous_view(weight, head_dim).float())
        return turned(scaled, first, second, is_neox, reuse_freqs_front_part).to(qkv.dtype)

    q, k = normed(q, q_weight), normed(k, k_weight)
    for t, slot in enumerate(contiguous_view(slot_mapping, tokens).tolist()):
        if slot >= 0:
            block, place = divmod(slot, key_cache.shape[1])
            key_cache[block, place], value_cache[block, place] = k[t], v[t]
    return q, k, v.contiguous()
