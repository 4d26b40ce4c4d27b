"""Norms of queries and keys, rotary positions and the write into a cache in one HIP kernel."""

import torch
from torch import Tensor

from stand_ins import stands_for
from stand_ins.cache import of_shuffled, same_kind, write_shuffled

WIDTHS = (64, 128, 256)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Of each head; in fp32, rounded once."""
    row = x.float()
    rms = torch.rsqrt(row.square().mean(-1, keepdim=True) + eps)
    return (row * rms * weight.float()).to(x.dtype)


def turned(x: Tensor, tables: Tensor, is_neox: bool) -> Tensor:
    """x [T, heads, D], tables [T, R]: the cosines of R/2 pairs, then their sines."""
    width, rotated = x.shape[-1], tables.shape[-1]
    pairs = rotated // 2
    per_lane = width // 32
    out = x.clone()
    for c in range(rotated):
        if is_neox:
            # A lane has so many columns, and takes the other half from the lane whose number
            # differs in these bits.
            lane = (c // per_lane) ^ (pairs // per_lane)
            other, pair = lane * per_lane + c % per_lane, c % pairs
            sign = -1.0 if c < pairs else 1.0
        else:
            other, pair = c ^ 1, c // 2
            sign = -1.0 if c % 2 == 0 else 1.0
        cos, sin = tables[:, None, pair].float(), tables[:, None, pairs + pair].float()
        out[..., c] = (x[..., c].float() * cos + sign * x[..., other].float() * sin).to(x.dtype)
    return out


@stands_for("aiter")
def fused_qk_norm_rope_cache_quant_shuffle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    qw: Tensor,
    kw: Tensor,
    cos_sin_cache: Tensor,
    is_neox_style: bool,
    pos_ids: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """q and k [T, heads, D] are normed and rotated in place, and k and v written into caches [blocks,
    K, D/x, block_size, x] and [blocks, K, block_size/x, D, x]. cos_sin_cache [positions, R].
    """
    for name, x in (("pos_ids", pos_ids), ("slot_mapping", slot_mapping)):
        if x.dtype != torch.int64 or not x.is_contiguous():
            raise RuntimeError(f"{name} must be contiguous int64")
    for x in (qw, kw, cos_sin_cache, k_cache, v_cache):
        if not x.is_contiguous():
            raise RuntimeError("weights, tables and caches must be contiguous")
    for x, heads in ((q, num_heads_q), (k, num_heads_k), (v, num_heads_v)):
        if tuple(x.shape) != (len(pos_ids), heads, head_dim):
            raise RuntimeError("q, k, v 3D shape must be [num_tokens, heads, head_dim]")
    if len({x.dtype for x in (q, k, v, qw, kw)}) > 1 or qw.shape != (head_dim,):
        raise RuntimeError("q/k/v must match q_weight/k_weight dtype")
    if cos_sin_cache.dtype != q.dtype:
        raise RuntimeError("the tables are read as q.dtype")
    rotated = cos_sin_cache.shape[1]
    if rotated > head_dim or (is_neox_style and rotated // 2 % (head_dim // 32)):
        raise RuntimeError("rotary_dim must be <= head_dim, and its half a multiple of head_dim/32")
    if head_dim not in WIDTHS or num_heads_k > 32 or num_heads_v != num_heads_k:
        raise RuntimeError("Unsupported head dimension for fusedQKNormRope")
    blocks, heads, pieces, page, piece = k_cache.shape
    if (heads, pieces * piece) != (num_heads_k, head_dim):
        raise RuntimeError("k_cache must be 5D [num_blocks, num_kv_heads, head_dim//x, page, x]")
    if tuple(v_cache.shape) != (blocks, heads, page // piece, head_dim, piece):
        raise RuntimeError("v_cache shuffle must be [num_blocks, heads, page//x, head_dim, x]")
    same_kind(kv_cache_dtype, k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    if k_scale.dtype != torch.float32 or v_scale.dtype != torch.float32:
        raise RuntimeError("scales are read as fp32")
    tables = cos_sin_cache[pos_ids]
    for x, weight in ((q, qw), (k, kw)):
        x.copy_(turned(normed(x, weight, eps), tables, is_neox_style))
    keys, values = of_shuffled(k_cache, v_cache, num_heads_k, head_dim)
    for t, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            write_shuffled(keys, values, slot, k[t], v[t])
