"""Writes into a latent cache in HIP: rows of the latent and then the rotated key, in pages.

A token is read by its first stride alone. Vectors of eight elements are moved: the threads of a
token are as many as its latent has vectors, and these move the key, too.
"""

import torch
from torch import Tensor

from stand_ins import stands_for
from stand_ins.formats import native_fp8, to_codes
from stand_ins.memory import check, contiguous_view, row_view

VECTOR = 8


def page_row(kv_cache: Tensor, slot: int) -> Tensor:
    """The row of a slot, by the strides of pages and rows."""
    page, offset = divmod(slot, kv_cache.shape[1])
    start = kv_cache.storage_offset() + page * kv_cache.stride(0) + offset * kv_cache.stride(1)
    return kv_cache.as_strided((kv_cache.shape[2],), (1,), start)


def aligned(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        check(x.stride(0) % VECTOR == 0, f"a vector of {name} is not aligned")


@stands_for("aiter")
def concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    scale: Tensor,
) -> None:
    """kv_c [T, L] and k_pe [T, R] into kv_cache [pages, page_size, L + R]; codes are values by the
    scale, saturated. The scale is read, always.
    """
    check(slot_mapping.dtype == torch.int64, "slot_mapping is read as int64")
    latent, rotated = kv_c.shape[1], k_pe.shape[1]
    check(kv_cache.shape[2] == latent + rotated, "kv_cache.size(2) == kv_lora_rank + pe_dim")
    check(scale.dtype == torch.float32, "the scale is read as float")
    check(kv_c.dtype == k_pe.dtype, "k_pe is read as kv_c.dtype")
    if kv_cache_dtype == "auto":
        check(kv_cache.dtype == kv_c.dtype, "it would write bytes of another dtype")
    else:
        check(kv_cache_dtype == "fp8", f"Unsupported data type of kv cache: {kv_cache_dtype}")
        check(kv_cache.dtype == native_fp8(), "it would write bytes of another dtype")
    if latent % VECTOR or rotated % VECTOR:
        raise NotImplementedError("element by element, where codes do not saturate")
    aligned(kv_c=kv_c, k_pe=k_pe)
    threads = min(latent, 1024) // VECTOR
    moved = min(rotated, threads * VECTOR)
    for t, slot in enumerate(contiguous_view(slot_mapping, len(kv_c)).tolist()):
        if slot < 0:
            continue
        new = torch.cat((row_view(kv_c)[t], row_view(k_pe)[t][:moved]))
        if kv_cache_dtype == "fp8":
            new = to_codes(new, 1 / scale.flatten()[0], kv_cache.dtype)
        page_row(kv_cache, slot)[: latent + moved] = new


@stands_for("aiter")
def fused_qk_rope_concat_and_cache_mla(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    q_out: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor,
    q_scale: Tensor,
    positions: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    is_neox: bool,
    is_nope_first: bool,
    compute_all_q_rope: bool = False,
) -> None:
    """q_nope [T, H, L] and the rotated q_pe [T, H, R] into q_out [T, H, L + R], kv_c [T, L] and the
    rotated k_pe [T, R] into kv_cache [pages, page_size, L + R]; with is_nope_first the rotated
    columns are the last. Tables [positions, R/2] without gaps. Where the slot is negative, q_out is
    written only with compute_all_q_rope.
    """
    for name, x in (("slot_mapping", slot_mapping), ("positions", positions)):
        check(x.dtype == torch.int64 and x.is_contiguous(), f"{name} is read as int64")
    for name, x in (("k_scale", k_scale), ("q_scale", q_scale)):
        check(x.dtype == torch.float32, f"{name} is read as float")
    _, heads, latent = q_nope.shape
    rotated = k_pe.shape[-1]
    check(q_nope.dim() == q_pe.dim() and heads == q_pe.shape[1], "q_nope and q_pe differ")
    check(q_out.shape[2] == latent + rotated, "q_out.size(2) == qk_lora_rank + pe_dim")
    check(kv_c.shape[-1] == latent, "kv_lora_rank and qk_lora_rank must be the same")
    check(kv_c.dim() == k_pe.dim() == 2, "Unsupported tensor dimensions")
    check(cos_cache.shape[-1] * 2 == rotated, "rot_dim")
    check(cos_cache.is_contiguous() and sin_cache.is_contiguous(), "tables are read row by row")
    check(q_nope.stride(2) == q_pe.stride(2) == 1, "the columns of a head follow each other")
    given = (q_nope, q_pe, kv_c, k_pe, cos_cache, sin_cache)
    if len({x.dtype for x in (*given, q_out, kv_cache)}) > 1:
        raise NotImplementedError("codes, of which rotated ones do not saturate")
    if kv_cache.shape[1] == 1:
        raise NotImplementedError("the kernel for pages of one token")
    check(
        not compute_all_q_rope or ((latent, rotated) == (512, 64) and latent * heads >= 2048),
        "compute_all_q_rope is only supported by the per-head/opt MLA decode kernels",
    )
    aligned(q_nope=q_nope, kv_c=kv_c)
    check(q_nope.stride(1) % VECTOR == 0, "a vector of q_nope is not aligned")
    tables = [table[positions.clamp(0, len(table) - 1)].float() for table in (cos_cache, sin_cache)]

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [..., R] as the kernel reads it, in fp32, rounded once."""
        pairs = x.float().unflatten(-1, (2, -1)) if is_neox else x.float().unflatten(-1, (-1, 2))
        a, b = pairs.unbind(-2 if is_neox else -1)
        both = torch.stack((a * cos - b * sin, b * cos + a * sin), -2 if is_neox else -1)
        return both.flatten(-2).to(x.dtype)

    for t, slot in enumerate(slot_mapping.tolist()):
        cos, sin = (table[t] for table in tables)
        if slot >= 0:
            parts = [row_view(kv_c)[t], turned(row_view(k_pe)[t], cos, sin)]
            page_row(kv_cache, slot)[:] = torch.cat(parts if is_nope_first else parts[::-1])
        if slot >= 0 or compute_all_q_rope:
            parts = [q_nope[t], turned(q_pe[t], cos, sin)]
            q_out[t] = torch.cat(parts if is_nope_first else parts[::-1], -1)
