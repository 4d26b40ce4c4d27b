"""Attention, without state and over a paged cache, and the write to the cache.

T new tokens, S keys or sequences, N query heads, K key/value heads (N a multiple of K), D head
width; values may have another width than queries and keys. Caches are [blocks, block_size, K, D]; a
layout (atomc.ops.state) changes their strides, or, if it is shuffled, the order of the values,
which these references do not know.
Values of an fp8 cache are codes times k_scale or v_scale, [1] fp32 (None: 1).
"""

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from atomc.ops.formats import FP8
from atomc.ops.op import op
from atomc.ops.op_cost import OpCall, Work, bytes_of, least, state_write
from atomc.ops.op_shapes import heads_of_values, written_token
from atomc.ops.op_traits import Arguments, Kind, StateBinding, StepFields
from atomc.ops.quant import rounded_fp8
from atomc.ops.state import StateSpec
from atomc.ops.state_update import call_on_state


def _scores(q: Tensor, k: Tensor, scale: float, softcap: float) -> Tensor:
    """q [..., T, N, D] against k [..., S, K, D] in fp32 -> [..., N, T, S]."""
    group = q.shape[-2] // k.shape[-2]
    q_heads = q.to(torch.float32).transpose(-2, -3)
    k_heads = k.to(torch.float32).repeat_interleave(group, -2).transpose(-2, -3)
    scores = q_heads @ k_heads.transpose(-1, -2) * scale
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _weighted_values(scores: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """softmax(scores [..., N, T, S]) @ v [..., S, K, D] -> [..., T, N, D] in fp32; a row without
    visible keys is zero.

    sinks [N]: logits of an additional key without a value (GPT-OSS).
    """
    if sinks is not None:
        sink = sinks.to(torch.float32)[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    hidden = (scores == -math.inf).all(-1, keepdim=True)
    weights = weights.masked_fill(hidden, 0.0)  # NaN of an operand stays NaN
    group = weights.shape[-3] // v.shape[-2]
    values = v.to(torch.float32).repeat_interleave(group, -2).transpose(-2, -3)
    return (weights @ values).transpose(-2, -3)


def _attention_cost(call: OpCall) -> Work:
    """Reads and writes its operands; FLOPs of each pair of a query and a visible key."""
    q, k, v = (call[name] for name in "qkv")
    rows, keys, width = q.shape[-3], k.shape[-3], q.shape[-1] + v.shape[-1]
    causal, window = call.arguments["causal"], call.arguments["window"]
    pairs = rows * (keys - (rows - 1) / 2) if causal else rows * keys
    if window:
        pairs = least(pairs, rows * window)
    return bytes_of([q, k, v, *call.results]), 2 * math.prod(q.shape[:-3]) * pairs * q.shape[
        -2
    ] * width


def _kv_spec(name: str, arguments: Arguments, codes: torch.dtype | None) -> StateSpec:
    k, v = arguments["k"], arguments["v"]
    if arguments.get("mask") is not None or not arguments.get("causal", True):
        raise ValueError(
            "it has a mask or is not causal, and a paged cache serves causal attention only"
        )
    return StateSpec.of(
        name,
        "kv",
        (k.shape[-2:], v.shape[-2:]),
        codes or k.dtype,
        window=arguments.get("window", 0),
    )


def _paged(arguments: Arguments, state: Mapping[str, Tensor], step: StepFields) -> Tensor:
    return _read(arguments, state, step, call_on_state(kv_write, arguments, state, step))


def _read(
    arguments: Arguments, state: Mapping[str, Tensor], step: StepFields, token: Tensor
) -> Tensor:
    # Of the inputs of a step that it takes, block tables are the first of a graph.
    others = {"block_tables": step.block_tables, "token": token, "sinks": arguments.get("sinks")}
    return call_on_state(paged_attention, arguments, state, step, **others)


@op(
    kind=Kind.ATTENTION,
    rows=None,
    cost=_attention_cost,
    shape=heads_of_values,
    state=StateBinding(
        handle="kv",
        tokens=lambda arguments: math.prod(arguments["q"].shape[:-2]),
        spec=_kv_spec,
        form=_paged,
        kept=("k", "v"),
        reads=_read,
    ),
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """softmax(scale * q k^T) v (Vaswani et al. 2017, eq. 1), with grouped queries (Ainslie et al.
    2023). q [..., T, N, D], k and v [..., S, K, D] -> [..., T, N, D] in q.dtype, computed in fp32.

    kv       the layer's state handle (kv_state), which only the runtime uses
    mask     [..., N or 1, T, S], bool (True: visible) or float (added to the scores)
    sinks    [N], logits of an additional key per head without a value (GPT-OSS)
    causal   query i sees keys 0..i;  window > 0: only the last `window` of these
    softcap  > 0: scores become softcap * tanh(scores / softcap) (Gemma 2)

    A row that sees no key is padding, which no other row reads as a key: its result is finite, and
    zero if there are sinks. Without, cuDNN has the mean of all values, other kernels zero.
    """
    scores = _scores(q, k, scale, softcap)
    rows = torch.arange(q.shape[-3], device=q.device)[:, None]
    columns = torch.arange(k.shape[-3], device=q.device)[None, :]
    if causal:
        scores = scores.masked_fill(columns > rows, float("-inf"))
    if window:
        scores = scores.masked_fill(columns <= rows - window, float("-inf"))
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        )
    return _weighted_values(scores, v, sinks).to(q.dtype).contiguous()


def stored_values(x: Tensor, cache: Tensor, scale: Tensor | None) -> Tensor:
    """x as it is stored in the cache: in an fp8 cache clamped to the largest number and rounded."""
    if scale is not None:
        x = x.to(torch.float32) * (1.0 / scale)
    return (
        rounded_fp8(x.to(torch.float32), cache.dtype) if cache.dtype in FP8 else x.to(cache.dtype)
    )


def loaded_values(cached: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The values of stored codes, in `dtype`."""
    return cached.to(dtype) if scale is None else (cached.to(torch.float32) * scale).to(dtype)


def slots_of_rows(k: Tensor, slots: Tensor, block_size: int) -> Tensor:
    """The slot of each row of k, [rows] i64, where sequences may share their offsets (kv_write)."""
    num_sequences = math.prod(k.shape[:-2]) // max(len(slots), 1)
    if num_sequences < 2:
        return slots
    first = block_size * torch.arange(num_sequences, device=slots.device)[:, None]
    return torch.where(slots < 0, slots, first + slots).flatten()


@op(
    kind=Kind.STATE_WRITE,
    rows=None,
    cost=state_write,
    mutates=("k_cache", "v_cache", "k_scale", "v_scale"),
    shape=lambda k: written_token(k),
)
def kv_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Write row t of k and v [..., K, D] (T rows in total) to slot slots[t] of the caches; slot -1
    writes nothing (vLLM, Kwon et al. 2023).

    slots [T] i64 = block * block_size + offset; or, of k [B, T, K, D], the offsets [T] that all
    sequences share: sequence b has block b. Returns an empty token, [0], which ops that read the
    caches take as an operand, so that no pass can reorder them.
    """
    token, block_size = k.new_empty((0,)), k_cache.shape[1]
    slots = slots_of_rows(k, slots, block_size)
    k, v = (x.reshape(-1, *x.shape[-2:]) for x in (k, v))
    # On a CPU the check costs 2 us, filtering 8 and a copy of k and v; only padded steps have rows
    # to skip.
    if slots.numel() and slots.min() < 0:
        rows = (slots >= 0).nonzero()[:, 0]
        k, v, slots = k[rows], v[rows], slots[rows]
    block, offset = slots // block_size, slots % block_size
    k_cache[block, offset] = stored_values(k, k_cache, k_scale)
    v_cache[block, offset] = stored_values(v, v_cache, v_scale)
    return token


class CacheWrite(TypedDict):
    """The arguments of kv_write besides the keys."""

    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None


class PagedSequences(TypedDict):
    """The arguments of paged_attention, and of ops like it, that describe the sequences of a
    step.
    """

    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor


class PagedOperands(PagedSequences):
    """The arguments of paged_attention besides the queries and `token`."""

    k_cache: Tensor
    v_cache: Tensor
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    scale: float
    window: int
    softcap: float


class Sequence(NamedTuple):
    """A sequence of a step, with new tokens.

    new        its rows of the step
    blocks     [B] i32, of its cached rows
    positions  of the new tokens, [tokens, 1]
    columns    the positions of all its tokens, [length]
    """

    new: slice
    blocks: Tensor
    positions: Tensor
    columns: Tensor

    def cached(self, cache: Tensor) -> Tensor:
        """Its rows [length, ...] of a cache [blocks, block_size, ...]."""
        length = len(self.columns)
        blocks = self.blocks[: -(-length // cache.shape[1])].long()
        return cache[blocks].flatten(0, 1)[:length]


def sequences(query_start: Tensor, seq_lens: Tensor, block_tables: Tensor) -> Iterator[Sequence]:
    """The sequences with new tokens, of the arguments of paged_attention."""
    for (start, end), length, blocks in zip(
        pairwise(query_start.tolist()), seq_lens.tolist(), block_tables, strict=True
    ):
        if start < end:
            columns = torch.arange(length, device=block_tables.device)
            yield Sequence(slice(start, end), blocks, columns[start - end :, None], columns)


def _paged_attention_cost(call: OpCall) -> Work:
    """Each sequence reads its context once; each new token attends to the tokens before it."""
    q, k_cache, v_cache = (call[name] for name in ("q", "k_cache", "v_cache"))
    tokens, sequences, window = q.shape[0], call["seq_lens"].shape[0], call.arguments["window"]
    read, seen = call.context, call.context - (tokens / sequences - 1) / 2
    if window:
        read, seen = least(read, window + tokens / sequences), least(seen, window)
    per_token = sum(
        math.prod(cache.shape[2:]) * cache.dtype.itemsize for cache in (k_cache, v_cache)
    )
    moved = bytes_of([q, *call.results]) + sequences * read * per_token
    return moved, 2 * tokens * seen * q.shape[1] * (q.shape[2] + v_cache.shape[3])


@op(
    kind=Kind.ATTENTION,
    rows=None,
    cost=_paged_attention_cost,
    shape=lambda q, v_cache: heads_of_values(q, v_cache),
)
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    token: Tensor,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Causal attention of ragged sequences over their cached keys (vLLM, Kwon et al. 2023). q
    [..., N, D] (T rows in total) -> the same shape and dtype, computed in fp32.

    Rows query_start[s]:query_start[s + 1] of q (query_start [S + 1] i32) are the last of the
    seq_lens[s] tokens (seq_lens [S] i32) of sequence s, whose keys are in blocks block_tables[s]
    ([S, B] i32). A sequence may have no new tokens. Rows of no sequence (padding) are zero. A step
    of as many rows as sequences is a decode step: row s is of sequence s, or both are padding.
    token: the result of the write. window, softcap and sinks as in `attention`.
    """
    rows = q.reshape(-1, *q.shape[-2:])
    out = q.new_zeros((rows.shape[0], q.shape[-2], v_cache.shape[-1]))
    for sequence in sequences(query_start, seq_lens, block_tables):
        keys = loaded_values(sequence.cached(k_cache), k_scale, torch.float32)
        values = loaded_values(sequence.cached(v_cache), v_scale, torch.float32)
        hidden = sequence.columns > sequence.positions
        if window:
            hidden = hidden | (sequence.columns <= sequence.positions - window)
        scores = _scores(rows[sequence.new], keys, scale, softcap).masked_fill(
            hidden, float("-inf")
        )
        out[sequence.new] = _weighted_values(scores, values, sinks).to(q.dtype)
    return out.view(*q.shape[:-1], v_cache.shape[-1])
