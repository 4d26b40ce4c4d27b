"""Multi-head latent attention (DeepSeek-V2, section 2.1): attention whose keys and values are
computed from a latent that all heads share.

T tokens, H heads, P width of the part of a key that is not rotated, V width of a value, L latent
width, R rotated width.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomc.ops.attention import attention, from_cache, paged_attention
from atomc.ops.mla import mla_kv_write
from atomc.ops.op import op
from atomc.ops.op_cost import OpCall, Work, bytes_of
from atomc.ops.op_traits import Arguments, Kind, StateBinding, StepFields
from atomc.ops.state import StateSpec, state_handle

cat: Callable[[Sequence[Tensor], int], Tensor] = torch.ops.aten.cat.default


def latent_state(latent: int, rotated: int) -> nn.Buffer:
    """The handle of a layer's latent cache, for `ops.mla_attention`: `self.kv =
    ops.latent_state(...)`.
    """
    return state_handle(latent + rotated)


def _cost(call: OpCall) -> Work:
    """Reads and writes its operands; FLOPs of the keys and values of all heads, and of each pair of
    a query and a visible key.
    """
    operands = [call[name] for name in ("q_nope", "q_rope", "latent", "k_rope", "weight")]
    q, latent, weight = operands[0], operands[2], operands[4]
    *batch, rows, heads, _ = q.shape
    width = operands[1].shape[-1] + weight.shape[0] / heads
    pairs = math.prod(batch) * rows * (rows + 1) / 2
    return (
        bytes_of([*operands, *call.results]),
        2 * latent.numel * weight.shape[0] + 2 * pairs * heads * width,
    )


def _shape(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    weight: Tensor,
    kv: Tensor | None = None,
    *,
    scale: float,
) -> Tensor:
    *lead, heads, nope = q_nope.shape
    return q_nope.new_empty((*lead, heads, weight.shape[0] // heads - nope))


def _absorbed_cost(call: OpCall) -> Work:
    """Each sequence reads its rows of the cache once, for all heads."""
    q, cache, latent = call["q"], call["kv_cache"], call.arguments["latent"]
    tokens, heads = math.prod(q.shape[:-2]), q.shape[-2]
    sequences = call["seq_lens"].shape[0]
    seen = call.context - (tokens / sequences - 1) / 2
    read = sequences * call.context * cache.shape[-1] * cache.dtype.itemsize
    return bytes_of([q, *call.results]) + read, 2 * tokens * seen * heads * (q.shape[-1] + latent)


def _absorbed_shape(q: Tensor, *_: object, latent: int, **__: object) -> Tensor:
    return q.new_empty((*q.shape[:-1], latent))


@op(kind=Kind.ATTENTION, rows=None, cost=_absorbed_cost, shape=_absorbed_shape)
def mla_absorbed_attention(
    q: Tensor,
    kv_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    token: Tensor,
    kv_scale: Tensor | None = None,
    *,
    latent: int,
    scale: float,
) -> Tensor:
    """paged_attention over a latent cache [blocks, block_size, L + R]: one key head, whose keys are
    the rows, and whose values are their first `latent` columns (DeepSeek-V2, section 2.1.2, with
    the projections of keys and values absorbed). q [..., H, L + R] -> [..., H, L].

    query_start, seq_lens, block_tables and token as in paged_attention; kv_scale [1] fp32 of an fp8
    cache.
    """
    keys = kv_cache.unsqueeze(2)
    return paged_attention.reference(
        q,
        keys,
        keys[..., :latent],
        query_start,
        seq_lens,
        block_tables,
        token,
        None,
        kv_scale,
        kv_scale,
        scale=scale,
    )


def _paged_cost(call: OpCall) -> Work:
    """Each sequence reads its rows of the cache once, and computes keys and values of all heads
    from them.
    """
    q, weight, cache = call["q"], call["weight"], call["kv_cache"]
    tokens, heads = math.prod(q.shape[:-2]), q.shape[-2]
    sequences = call["seq_lens"].shape[0]
    rows = sequences * call.context
    seen = call.context - (tokens / sequences - 1) / 2
    rotated = cache.shape[-1] - weight.shape[-1]
    return (
        bytes_of([q, weight, *call.results]) + rows * cache.shape[-1] * cache.dtype.itemsize,
        2 * rows * weight.numel + 2 * tokens * seen * (weight.shape[0] + heads * rotated),
    )


def _paged_shape(q: Tensor, weight: Tensor, kv_cache: Tensor, *_: object, **__: object) -> Tensor:
    nope = q.shape[-1] - (kv_cache.shape[-1] - weight.shape[-1])
    return q.new_empty((*q.shape[:-1], weight.shape[0] // q.shape[-2] - nope))


@op(kind=Kind.ATTENTION, rows=None, cost=_paged_cost, shape=_paged_shape)
def mla_paged_attention(
    q: Tensor,
    weight: Tensor,
    kv_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    token: Tensor,
    kv_scale: Tensor | None = None,
    *,
    scale: float,
) -> Tensor:
    """mla_attention of ragged sequences over their rows of a latent cache [blocks, block_size, L +
    R]: keys and values are computed from the cached latents. q [..., H, P + R] (its last R columns
    rotated) and weight [H * (P + V), L] -> [..., H, V] in q.dtype.

    query_start, seq_lens, block_tables and token as in paged_attention; kv_scale [1] fp32 of an fp8
    cache.
    """
    rows = q.reshape(-1, *q.shape[-2:])
    heads, latent = q.shape[-2], weight.shape[-1]
    width = weight.shape[0] // heads
    nope = q.shape[-1] - (kv_cache.shape[-1] - latent)
    out = q.new_zeros((*rows.shape[:-1], width - nope))
    bounds = query_start.tolist()
    for s, length in enumerate(seq_lens.tolist()):
        start, end = bounds[s], bounds[s + 1]
        if start == end:
            continue
        blocks = block_tables[s, : -(-length // kv_cache.shape[1])].long()
        cached = from_cache(kv_cache[blocks].flatten(0, 1)[:length], kv_scale, q.dtype)
        both = F.linear(cached[:, :latent], weight).view(length, heads, width)
        k_rope = cached[:, None, latent:].expand(length, heads, -1)
        # The queries of the last tokens; attention over all gives the rows of the others away.
        whole = rows[start:end].new_zeros((length, *rows.shape[1:]))
        whole[length - (end - start) :] = rows[start:end]
        attended = attention.reference(
            whole, torch.cat((both[..., :nope], k_rope), -1), both[..., nope:], scale=scale
        )
        out[start:end] = attended[length - (end - start) :]
    return out.view(*q.shape[:-1], width - nope)


def _tokens(arguments: Arguments) -> int | torch.SymInt:
    tokens: int | torch.SymInt = math.prod(arguments["q_nope"].shape[:-2])
    return tokens


def _latent_spec(name: str, arguments: Arguments, codes: torch.dtype | None) -> StateSpec:
    latent, k_rope = arguments["latent"], arguments["k_rope"]
    width = latent.shape[-1] + k_rope.shape[-1]
    return StateSpec.of(name, "latent", ((width,),), codes or latent.dtype)


def _paged(arguments: Arguments, state: Mapping[str, Tensor], step: StepFields) -> Tensor:
    cache, *scales = state.values()
    token = mla_kv_write(arguments["latent"], arguments["k_rope"], cache, step.slots, *scales)
    return mla_paged_attention(
        cat((arguments["q_nope"], arguments["q_rope"]), -1),
        arguments["weight"],
        cache,
        step.query_start,
        step.seq_lens,
        step.block_tables,
        token,
        *scales,
        scale=arguments["scale"],
    )


@op(
    kind=Kind.ATTENTION,
    rows=None,
    cost=_cost,
    shape=_shape,
    state=StateBinding(handle="kv", tokens=_tokens, spec=_latent_spec, form=_paged),
)
def mla_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    weight: Tensor,
    kv: Tensor | None = None,
    *,
    scale: float,
) -> Tensor:
    """Causal attention of H heads over keys and values that `weight` computes from the latent
    (DeepSeek-V2, section 2.1, eq. 10 to 19) -> [..., T, H, V] in q_nope.dtype.

    q_nope  [..., T, H, P]
    q_rope  [..., T, H, R], rotated
    latent  [..., T, L], normalized
    k_rope  [..., T, 1, R], rotated; the same for all heads
    weight  [H * (P + V), L], kv_b_proj of checkpoints: the rows of a head are those of its P key
            columns, then those of its V value columns
    kv      the layer's state handle (latent_state), which only the runtime uses
    scale   of the scores, for example (P + R) ** -0.5
    """
    heads, nope = q_nope.shape[-2:]
    both = F.linear(latent, weight).view(*latent.shape[:-1], heads, weight.shape[0] // heads)
    k = torch.cat((both[..., :nope], k_rope.expand(*both.shape[:-1], k_rope.shape[-1])), -1)
    q = torch.cat((q_nope, q_rope), -1)
    return attention.reference(q, k, both[..., nope:], scale=scale)
