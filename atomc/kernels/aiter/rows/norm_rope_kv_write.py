"""The norms of queries and keys, rotary positions and the write into a cache in one HIP kernel of
AITER's, which writes codes, too: under one scale for the cache, clamped.

q, k and v are parts of one projection's rows, or are joined. The tables have one number a pair, the
cosines of a token beside its sines. AITER reads the scales on the host.
"""

from typing import TypedDict, Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.graph.sizes import known_equal, same_sizes
from atomc.kernels.aiter.library import Function, installed
from atomc.kernels.aiter.rows.kv_write import (
    foreign_cache,
    odd_blocks,
    odd_heads,
    scaled_values,
    unpaged,
)
from atomc.kernels.aiter.rows.rope import not_by_token
from atomc.kernels.checks import first_refusal, named, scattered_blocks, strided, unlike
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal

fused_qk_norm_rope_cache_pts_quant_shuffle = Function(
    "fused_qk_norm_rope_cache_pts_quant_shuffle",
    "aiter",
    takes=["qkv", "use_shuffle_layout", "rotary_dim"],
)
WIDTHS = (64, 128, 256)
LANES = 32  # that share a head
PIECE = 16  # bytes, in the shuffled layout


def share_rows(*parts: Tensor) -> bool:
    """Whether these [T, heads, D] of one dtype follow each other in the rows of one tensor."""
    first = parts[0]
    at = first.storage_offset()
    for part in parts:
        if part.untyped_storage()._cdata != first.untyped_storage()._cdata:
            return False
        if not known_equal(part.storage_offset(), at) or not known_equal(
            part.stride(0), first.stride(0)
        ):
            return False
        if not same_sizes(part.stride()[1:], (part.shape[2], 1)):
            return False
        at = at + part.shape[1] * part.shape[2]
    return True


def rows_of(*parts: Tensor) -> Tensor:
    """The rows [T, columns] that hold them, without a copy where there are such rows."""
    if share_rows(*parts):
        columns = sum(part.shape[1] * part.shape[2] for part in parts)
        return parts[0].as_strided((parts[0].shape[0], columns), (parts[0].stride(0), 1))
    return torch.cat([part.flatten(1) for part in parts], 1)


def _unfused(q: Tensor, cos: Tensor, norm_style: str, rope_style: str) -> Refusal | None:
    if norm_style == "one_plus":
        return Refusal("argument", "AITER's kernel multiplies by the weight, not by one more")
    if rope_style != "half":
        return Refusal(
            "argument",
            f"AITER's kernel rotates halves by one number of the tables a pair, not {rope_style!r}",
        )
    width, rotated = q.shape[-1], 2 * cos.shape[-1]
    if width not in WIDTHS:
        return Refusal("shape", f"heads of {width}: AITER's kernel is written for {WIDTHS}")
    # A lane finds the other of each of its pairs in one other lane.
    if rotated // 2 % (width // LANES):
        return Refusal(
            "shape",
            f"{rotated} of {width} columns rotate: a half is no multiple of {width // LANES}",
        )
    return None


# Why `written` does not serve these, whatever the layout of the caches.
unwritable = first_refusal(
    installed(fused_qk_norm_rope_cache_pts_quant_shuffle),
    named("q k v cos sin", unlike, HALVES),
    lambda q, q_weight, k_weight: unlike((q.dtype,), q_weight=q_weight, k_weight=k_weight),
    foreign_cache,
    scaled_values,
    odd_heads,
    _unfused,
    named("q_weight k_weight", strided),
    not_by_token,
)


def tables_of(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The tables [T, R] of all layers, and the row of each token."""
    tables = torch.cat((cos, sin), -1).flatten(0, 1)
    return tables, torch.arange(tables.shape[0], device=cos.device)


TABLES = ops.Shared(tables_of, ("cos", "sin"), lambda: ())


class WriteOperands(TypedDict):
    """The arguments of qk_norm_rope_kv_write that AITER's kernel reads, but the tables."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_weight: Tensor
    k_weight: Tensor
    eps: float
    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None


def written(
    tables: Tensor, rows: Tensor, *, shuffled: bool, **call: Unpack[WriteOperands]
) -> tuple[Tensor, Tensor]:
    """qk_norm_rope_kv_write by `tables_of`. shuffled: the layout of the caches."""
    q, k, v, k_cache = call["q"], call["k"], call["v"], call["k_cache"]
    out = q.new_empty(q.shape)
    if q.numel():
        unscaled = torch.ones(1)  # read on the host, where nothing is scaled, too
        fused_qk_norm_rope_cache_pts_quant_shuffle(
            rows_of(q, k, v).contiguous(),
            call["q_weight"],
            call["k_weight"],
            tables,
            rows,
            q.shape[0],
            q.shape[1],
            k.shape[1],
            v.shape[1],
            q.shape[2],
            True,
            call["eps"],
            out,
            k_cache,
            call["v_cache"],
            call["slots"],
            unscaled if call["k_scale"] is None else call["k_scale"],
            unscaled if call["v_scale"] is None else call["v_scale"],
            None,
            None,
            False,
            shuffled,
            k_cache.shape[1],
            PIECE // k_cache.dtype.itemsize,
            tables.shape[1],
        )
    return out, out.new_empty((0,))


@ops.qk_norm_rope_kv_write.kernel(
    "aiter",
    layout="paged",
    refuses=first_refusal(
        unwritable,
        lambda k_cache: odd_blocks(k_cache),
        unpaged,
        lambda k_cache, v_cache: scattered_blocks(k_cache, v_cache),
    ),
    rounds="once",
    shared=TABLES,
)
def qk_norm_rope_kv_write(
    shared: tuple[Tensor, Tensor], **call: Unpack[WriteOperands]
) -> tuple[Tensor, Tensor]:
    return written(*shared, shuffled=False, **call)
