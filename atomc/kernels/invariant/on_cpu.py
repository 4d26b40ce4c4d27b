"""Batch-invariant kernels on a CPU: the torch calls for a row have the same shapes in every step.

A matrix product takes TILE rows, with padding, also one of the tokens of an expert; attention takes
one token, whose keys are the same in any step.
"""

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal, not_a_cpu, refuse_gpus
from atomc.kernels.invariant.adapter import adapted, several
from atomc.kernels.row_views import as_heads, as_rows, with_lead
from atomc.kernels.torch.mla_attention import gathered_latents
from atomc.kernels.torch.sequence import attend, gathered, refuse_scaled_cache
from atomc.kernels.torch.varlen_attention import varlen_attention as by_sequence
from atomc.ops.attention import PagedSequences, loaded_values
from atomc.ops.experts import ExpertOperands, experts_by

# A product of this number of rows costs little more than one row: reading the weight dominates.
TILE = 8


@ops.linear.kernel("invariant", refuses=refuse_gpus)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = as_rows(x)
    padded = F.pad(rows, (0, 0, 0, -len(rows) % TILE))
    out = x.new_empty((len(padded), weight.shape[0]))
    for start in range(0, len(padded), TILE):
        tile = padded[start : start + TILE]
        if bias is None:
            torch.mm(tile, weight.T, out=out[start : start + TILE])
        else:
            torch.addmm(bias, tile, weight.T, out=out[start : start + TILE])
    return with_lead(out[: len(rows)], x)


@ops.linear_fp32.kernel("invariant", refuses=refuse_gpus)
def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    return linear(x.to(torch.float32), weight.to(torch.float32))


@ops.lora_linear.kernel("invariant", refuses=first_refusal(not_a_cpu, several))
def lora_linear(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return adapted(linear, y, x, a, b, scale)


@ops.linear_by_head.kernel("invariant", refuses=refuse_gpus)
def linear_by_head(x: Tensor, weight: Tensor) -> Tensor:
    heads = x.unbind(-2)
    return torch.stack(
        [linear(of_x.contiguous(), of_head) for of_x, of_head in zip(heads, weight, strict=True)],
        -2,
    )


@ops.moe_experts.kernel("invariant", refuses=refuse_gpus, syncs=True)
def moe_experts(weight_on_input: bool, **operands: Unpack[ExpertOperands]) -> Tensor:
    return experts_by(linear, weight_on_input=weight_on_input, **operands)


@ops.mla_absorbed_attention.kernel("invariant", layout="paged", refuses=refuse_gpus, syncs=True)
def mla_absorbed_attention(
    q: Tensor,
    kv_cache: Tensor,
    kv_scale: Tensor | None,
    latent: int,
    scale: float,
    chosen: Tensor | None,
    **sequences: Unpack[PagedSequences],
) -> Tensor:
    rows = as_heads(q)
    positions = None if chosen is None else chosen.reshape(len(rows), -1)
    out = q.new_zeros((*rows.shape[:-1], latent))
    # In 16 bits, values times a scale would be rounded.
    wide = q.dtype if kv_scale is None else torch.float32
    for new, stored in gathered_latents(kv_cache, **sequences):
        cached = loaded_values(stored, kv_scale, wide)
        for row in range(new.start, new.stop):
            keys = cached[: len(cached) - (new.stop - row) + 1, None]
            if positions is not None:
                keys = keys[positions[row, : len(keys)].long()]
            attended = attend(rows[row : row + 1].to(wide), keys, keys, None, scale, 0, 0.0)
            out[row] = attended[0, :, :latent]
    return with_lead(out, q)


@ops.paged_attention.kernel("invariant", layout="paged", refuses=refuse_scaled_cache, syncs=True)
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    **sequences: Unpack[PagedSequences],
) -> Tensor:
    rows = as_heads(q)
    out = q.new_zeros((*rows.shape[:-1], v_cache.shape[-1]))
    for new, first, keys, values in gathered(k_cache, v_cache, window, **sequences):
        keys, values = keys.to(q.dtype), values.to(q.dtype)
        for row in range(new.start, new.stop):
            end = len(keys) - (new.stop - row) + 1
            seen = slice(max(0, first + end - window) - first if window else 0, end)
            out[row] = attend(
                rows[row : row + 1], keys[seen], values[seen], sinks, scale, window, softcap
            )[0]
    return with_lead(out, q)


@ops.varlen_attention.kernel("invariant", refuses=refuse_gpus, syncs=True)
def varlen_attention(q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, scale: float) -> Tensor:
    return by_sequence(q, k, v, query_start, scale=scale)
