"""Norms of queries and keys, rotary positions and the write into a cache in one HIP kernel."""

import torch
from torch import Tensor

from stand_ins import ARCH, stands_for
from stand_ins.cache import in_memory, of_shuffled, write_shuffled
from stand_ins.paged_attention import FP8

LANES = 32  # that share a head


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Of each head; in fp32, rounded once."""
    row = x.float()
    rms = torch.rsqrt(row.square().mean(-1, keepdim=True) + eps)
    return (row * rms * weight.float()).to(x.dtype)


def turned(x: Tensor, tables: Tensor) -> Tensor:
    """x [T, heads, D], tables [T, R]: the cosines of R/2 pairs, then their sines. The products of a
    pair are added in fp32, and rounded once.
    """
    width, rotated = x.shape[-1], tables.shape[-1]
    pairs, columns = rotated // 2, width // LANES
    out = x.clone()
    for c in range(rotated):
        # A lane has so many columns, and takes the other half from a lane that is so many behind or
        # before it, in whole lanes.
        lane = c // columns + (pairs // columns if c < pairs else -(pairs // columns))
        other, pair = lane % LANES * columns + c % columns, c if c < pairs else c - pairs
        sign = -1.0 if c < pairs else 1.0
        cos, sin = tables[:, None, pair].float(), tables[:, None, pairs + pair].float()
        out[..., c] = (x[..., c].float() * cos + sign * x[..., other].float() * sin).to(x.dtype)
    return out


@stands_for("aiter")
def fused_qk_norm_rope_cache_pts_quant_shuffle(
    qkv: Tensor,
    qw: Tensor,
    kw: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    num_tokens: int,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_size: int,
    is_neox_style: bool,
    eps: float,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    per_tensor_k_scale: Tensor,
    per_tensor_v_scale: Tensor,
    k_out: Tensor | None,
    v_out: Tensor | None,
    return_kv: bool,
    use_shuffle_layout: bool,
    block_size: int,
    x: int,
    rotary_dim: int = 0,
) -> None:
    """Queries of qkv [T, columns] normed and rotated into q_out [T, heads, D]; keys so, and values,
    into caches [blocks, block_size, K, D], or in the same memory shuffled. cos_sin [positions, R].
    Codes are clamped; the host reads their scales.
    """
    for name, index in (("positions", positions), ("slot_mapping", slot_mapping)):
        if index.dtype != torch.int64 or index.dim() != 1 or not index.is_contiguous():
            raise RuntimeError(f"{name} must be contiguous int64")
    if len(positions) != num_tokens:
        raise RuntimeError("there is a position for each token")
    for tensor in (qkv, qw, kw, cos_sin, q_out):
        if not tensor.is_contiguous() or tensor.dtype != qkv.dtype:
            raise RuntimeError("they are read without strides, as the dtype of qkv")
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise RuntimeError("k_cache/v_cache innermost (head_size) dim must be contiguous")
    if head_size not in (64, 128, 256) or block_size & (block_size - 1) or x & (x - 1):
        raise RuntimeError("head_size, block_size or x")
    if not is_neox_style or return_kv or k_out is not None or v_out is not None:
        raise NotImplementedError("arguments that no lowering gives")
    if per_tensor_k_scale.dtype != torch.float32 or per_tensor_v_scale.dtype != torch.float32:
        raise RuntimeError("the scales are read as fp32")
    if k_cache.dtype not in (qkv.dtype, FP8[ARCH.get()]) or v_cache.dtype != k_cache.dtype:
        raise AssertionError(f"Unsupported dtype: {k_cache.dtype}")
    if x != 16 // k_cache.element_size():
        raise RuntimeError("another x than that of a piece")
    counts = (num_heads_q, num_heads_k, num_heads_v)
    steps = (sum(counts) * head_size, head_size, 1)
    q, k, v = in_memory(qkv, (num_tokens, sum(counts), head_size), steps).split(counts, 1)
    tables = cos_sin[positions]
    if tables.shape[1] != (rotary_dim or head_size):
        raise RuntimeError("rows of the tables are rotary_dim apart")
    q_out.copy_(turned(normed(q, qw, eps), tables))
    keys = turned(normed(k, kw, eps), tables)
    new = [
        stored(value, cache.dtype, float(scale))
        for value, cache, scale in (
            (keys, k_cache, per_tensor_k_scale),
            (v, v_cache, per_tensor_v_scale),
        )
    ]
    if use_shuffle_layout:
        blocks, heads = k_cache.shape[0], num_heads_k
        shuffled = of_shuffled(
            in_memory(
                k_cache,
                (blocks, heads, head_size // x, block_size, x),
                (k_cache.stride(0), head_size * block_size, block_size * x, x, 1),
            ),
            v_cache,
            heads,
            head_size,
        )
    for t, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0 and use_shuffle_layout:
            write_shuffled(*shuffled, slot, new[0][t], new[1][t])
        elif slot >= 0:
            for cache, values in zip((k_cache, v_cache), new, strict=True):
                cache[slot // block_size, slot % block_size] = values[t]


def stored(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """x as it is, or clamped and rounded to codes."""
    if dtype == x.dtype:
        return x
    largest = torch.finfo(dtype).max
    return (x.float() * (1.0 / scale)).clamp(-largest, largest).to(dtype)
