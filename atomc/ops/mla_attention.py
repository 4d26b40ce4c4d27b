"""Multi-head latent attention (DeepSeek-V2, section 2.1): attention whose keys and values are
computed from a latent that all heads share.

T tokens, H heads, P width of the part of a key that is not rotated, V width of a value, L latent
width, R rotated width.
"""

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomc.ops.attention import PagedSequences, Sequence, attention, loaded_values, sequences
from atomc.ops.indexer import chosen_key_mask, chosen_mask
from atomc.ops.kv_b_weight import STORED
from atomc.ops.mla import linear_split_cat, mla_kv_write
from atomc.ops.op import op
from atomc.ops.op_cost import Formula, OpCall, Work, bytes_of, least
from atomc.ops.op_traits import Arguments, Kind, StateBinding, StepFields
from atomc.ops.quant import quant_fp8_group, quant_mxfp4
from atomc.ops.state import StateSpec, state_handle
from atomc.ops.state_update import call_on_state

cat: Callable[[tuple[Tensor, ...], int], Tensor] = torch.ops.aten.cat.default


class LatentOperands(PagedSequences):
    """The arguments of mla_absorbed_attention besides the queries, `token` and `chosen`."""

    kv_cache: Tensor
    kv_scale: Tensor | None
    latent: int
    scale: float


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


def _shape(q_nope: Tensor, weight: Tensor) -> Tensor:
    *lead, heads, nope = q_nope.shape
    return q_nope.new_empty((*lead, heads, weight.shape[0] // heads - nope))


def _read_and_seen(call: OpCall) -> tuple[Formula, Formula]:
    """The rows of the cache that are read, and the keys that a token sees. Each sequence reads its
    rows once, for all heads; of chosen keys, those of each token.
    """
    q, chosen = call["q"], call.arguments.get("chosen")
    tokens, sequences = math.prod(q.shape[:-2]), call["seq_lens"].shape[0]
    read, seen = sequences * call.context, call.context - (tokens / sequences - 1) / 2
    if chosen is not None:
        read, seen = least(read, tokens * chosen.shape[-1]), least(seen, chosen.shape[-1])
    return read, seen


def _absorbed_cost(call: OpCall) -> Work:
    q, cache, latent = call["q"], call["kv_cache"], call.arguments["latent"]
    tokens, heads = math.prod(q.shape[:-2]), q.shape[-2]
    rows, seen = _read_and_seen(call)
    read = rows * cache.shape[-1] * cache.dtype.itemsize
    return bytes_of([q, *call.results]) + read, 2 * tokens * seen * heads * (q.shape[-1] + latent)


@op(
    kind=Kind.ATTENTION,
    rows=None,
    cost=_absorbed_cost,
    shape=lambda q, latent: q.new_empty((*q.shape[:-1], latent)),
)
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
    chosen: Tensor | None = None,
) -> Tensor:
    """paged_attention over a latent cache [blocks, block_size, L + R]: one key head, whose keys are
    the rows, and whose values are their first `latent` columns (DeepSeek-V2, section 2.1.2, with
    the projections of keys and values absorbed). q [..., H, L + R] -> [..., H, L].

    query_start, seq_lens, block_tables and token as in paged_attention; kv_scale [1] fp32 of an fp8
    cache; chosen as in mla_attention.
    """
    rows = q.reshape(-1, *q.shape[-2:])
    out = q.new_zeros((*rows.shape[:-1], latent))
    for sequence in sequences(query_start, seq_lens, block_tables):
        keys = loaded_values(sequence.cached(kv_cache), kv_scale, torch.float32).unsqueeze(1)
        seen = _seen(sequence, chosen)
        out[sequence.new] = attention.reference(
            rows[sequence.new], keys, keys[..., :latent], None, seen, scale=scale, causal=False
        )
    return out.view(*q.shape[:-1], latent)


def _seen(sequence: Sequence, chosen: Tensor | None) -> Tensor:
    """Which of its cached rows each new token of a sequence sees, [tokens, length] bool."""
    if chosen is None:
        return sequence.columns <= sequence.positions
    return chosen_key_mask(chosen.flatten(0, -2)[sequence.new], len(sequence.columns))


def _paged_cost(call: OpCall) -> Work:
    """Computes keys and values of all heads from each row of the cache that is read."""
    q, weight, cache = call["q"], call["weight"], call["kv_cache"]
    tokens, heads = math.prod(q.shape[:-2]), q.shape[-2]
    rows, seen = _read_and_seen(call)
    latent = weight.shape[-1] * STORED.get(call.arguments.get("scheme", ""), 1)
    return (
        bytes_of([q, weight, *call.results]) + rows * cache.shape[-1] * cache.dtype.itemsize,
        2 * rows * weight.shape[0] * latent
        + 2 * tokens * seen * (weight.shape[0] + heads * (cache.shape[-1] - latent)),
    )


def _paged_shape(q: Tensor, weight: Tensor, kv_cache: Tensor, scheme: str = "") -> Tensor:
    nope = q.shape[-1] - (kv_cache.shape[-1] - weight.shape[-1] * STORED.get(scheme, 1))
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
    chosen: Tensor | None = None,
) -> Tensor:
    """mla_attention of ragged sequences over their rows of a latent cache [blocks, block_size, L +
    R]: keys and values are computed from the cached latents. q [..., H, P + R] (its last R columns
    rotated) and weight [H * (P + V), L] -> [..., H, V] in q.dtype.

    query_start, seq_lens, block_tables and token as in paged_attention; kv_scale [1] fp32 of an fp8
    cache; chosen as in mla_attention.
    """

    def expanded(latents: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        both = F.linear(latents, weight).view(-1, q.shape[-2], weight.shape[0] // q.shape[-2])
        nope = q.shape[-1] - k_rope.shape[-1]
        return torch.cat((both[..., :nope], k_rope), -1), both[..., nope:]

    out = _paged_shape(q, weight, kv_cache).zero_()
    for sequence in sequences(query_start, seq_lens, block_tables):
        cached = loaded_values(sequence.cached(kv_cache), kv_scale, q.dtype)
        _attend(
            out, q, sequence, cached, weight.shape[-1], expanded, _seen(sequence, chosen), scale
        )
    return out


def _attend(
    out: Tensor,
    q: Tensor,
    sequence: Sequence,
    cached: Tensor,
    latent: int,
    expanded: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    seen: Tensor,
    scale: float,
) -> None:
    """Into out [..., H, V]: the new tokens of a sequence with these cached rows [S, L + R].
    expanded: of latents [S, L] and rotated keys [S, H, R], the keys and values of all heads.
    """
    k_rope = cached[:, None, latent:].expand(-1, q.shape[-2], -1)
    k, v = expanded(cached[:, :latent], k_rope)
    rows = q.reshape(-1, *q.shape[-2:])[sequence.new]
    out.view(-1, *out.shape[-2:])[sequence.new] = attention.reference(
        rows, k, v, None, seen, scale=scale, causal=False
    )


@op(kind=Kind.ATTENTION, rows=None, cost=_paged_cost, shape=_paged_shape)
def quantized_mla_paged_attention(
    q: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    kv_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    token: Tensor,
    kv_scale: Tensor | None = None,
    *,
    scale: float,
    scheme: str,
    dtype: torch.dtype = torch.float8_e4m3fn,
    rounding: str = "even",
) -> Tensor:
    """mla_paged_attention whose keys and values are linear_split_cat of the cached latents, which
    are quantized: in scheme "fp8_block" by quant_fp8_group, with `dtype`, in "mxfp4" by
    quant_mxfp4, with `rounding`. A kernel may leave out this rounding where it absorbs the
    projections. Raises ValueError for another scheme.

    weight [H * (P + V), ...] and weight_scale as in linear_split_cat, others as in
    mla_paged_attention
    """
    if scheme not in ("fp8_block", "mxfp4"):
        raise ValueError(
            f"quantized_mla_paged_attention: scheme {scheme!r} is not one of ('fp8_block', 'mxfp4')"
        )

    def expanded(latents: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        if scheme == "mxfp4":
            codes, scales = quant_mxfp4.reference(latents, rounding)
        else:
            codes, scales = quant_fp8_group.reference(latents, 128, False, dtype)
        nope = q.shape[-1] - k_rope.shape[-1]
        k, v = linear_split_cat.reference(
            codes, weight, scales, weight_scale, k_rope, nope=nope, scheme=scheme, out_dtype=q.dtype
        )
        return k, v

    out = _paged_shape(q, weight, kv_cache, scheme).zero_()
    for sequence in sequences(query_start, seq_lens, block_tables):
        cached = loaded_values(sequence.cached(kv_cache), kv_scale, q.dtype)
        latent = weight.shape[-1] * STORED[scheme]
        _attend(out, q, sequence, cached, latent, expanded, _seen(sequence, None), scale)
    return out


def _latent_spec(name: str, arguments: Arguments, codes: torch.dtype | None) -> StateSpec:
    latent, k_rope = arguments["latent"], arguments["k_rope"]
    width = latent.shape[-1] + k_rope.shape[-1]
    return StateSpec.of(name, "latent", ((width,),), codes or latent.dtype)


def _paged(arguments: Arguments, state: Mapping[str, Tensor], step: StepFields) -> Tensor:
    cache, *scales = state.values()
    token = mla_kv_write(arguments["latent"], arguments["k_rope"], cache, step.slots, *scales)
    q = cat((arguments["q_nope"], arguments["q_rope"]), -1)
    return call_on_state(mla_paged_attention, arguments, state, step, token=token, q=q)


@op(
    kind=Kind.ATTENTION,
    rows=None,
    cost=_cost,
    shape=_shape,
    state=StateBinding(
        handle="kv",
        tokens=lambda arguments: math.prod(arguments["q_nope"].shape[:-2]),
        spec=_latent_spec,
        form=_paged,
    ),
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
    chosen: Tensor | None = None,
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
    chosen  [..., T, K] i32, the positions of the keys that each token reads, as index_topk returns
            them: all up to its own if these are at most K, then -1. None: all up to its own
    """
    heads, nope = q_nope.shape[-2:]
    both = F.linear(latent, weight).view(*latent.shape[:-1], heads, weight.shape[0] // heads)
    k = torch.cat((both[..., :nope], k_rope.expand(*both.shape[:-1], k_rope.shape[-1])), -1)
    q = torch.cat((q_nope, q_rope), -1)
    mask = None if chosen is None else chosen_mask.reference(chosen)
    return attention.reference(q, k, both[..., nope:], None, mask, scale=scale)
