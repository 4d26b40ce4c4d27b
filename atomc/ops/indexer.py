"""The indexer of sparse attention (DeepSeek-V3.2, section 2.1): it chooses the keys that attention
of each token reads.

T tokens, J heads of the indexer, C width of its keys, S keys. A chosen key is its position in the
sequence. Row t has the chosen positions in ascending order, then -1.

A row of the cache [blocks, block_size, C] is the key of a token. A row of an fp8 cache, [blocks,
block_size, C + 4], is its codes, and the four bytes of their scale, fp32: every key has its own.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from atomc.ops.attention import sequences
from atomc.ops.formats import FP8
from atomc.ops.op import op
from atomc.ops.op_cost import OpCall, Work, bytes_of, state_write
from atomc.ops.op_shapes import written_token
from atomc.ops.op_traits import Arguments, Kind, StateBinding, StepFields
from atomc.ops.quant import quant_fp8_per_token
from atomc.ops.state import StateSpec, state_handle
from atomc.ops.state_update import call_on_state

SCALE_BYTES = 4


def indexer_state(width: int) -> nn.Buffer:
    """The handle of a layer's cached keys of the indexer, for `ops.index_topk`: `self.keys =
    ops.indexer_state(...)`.
    """
    return state_handle(width)


def _scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """q [..., T, J, C], k [..., S, C], weights [..., T, J] -> [..., T, S] in fp32."""
    products = q.to(torch.float32) @ k.to(torch.float32).unsqueeze(-3).transpose(-1, -2)
    return (weights.to(torch.float32).unsqueeze(-2) @ products.relu()).squeeze(-2)


def _chosen(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """The `topk` visible keys [T, S] with the largest scores [..., T, S] -> [..., T, topk] i32; of
    equal ones the first.
    """
    keys = scores.shape[-1]
    scores = scores.masked_fill(~visible, float("-inf"))
    ranked = scores.argsort(dim=-1, descending=True, stable=True)[..., :topk]
    seen = visible.expand(scores.shape).gather(-1, ranked)
    positions = ranked.masked_fill(~seen, keys).sort(-1).values.to(torch.int32)
    chosen = positions.new_full((*scores.shape[:-1], topk), -1)
    chosen[..., : positions.shape[-1]] = positions.masked_fill(positions == keys, -1)
    return chosen


def _cost(call: OpCall) -> Work:
    q = call["q"]
    *batch, rows, heads, width = q.shape
    pairs = math.prod(batch) * rows * (rows + 1) / 2
    return bytes_of([q, call["k"], call["weights"], *call.results]), 2 * pairs * heads * width


def _shape(q: Tensor, topk: int) -> Tensor:
    return q.new_empty((*q.shape[:-2], topk), dtype=torch.int32)


@op(
    kind=Kind.STATE_WRITE,
    rows=None,
    cost=state_write,
    mutates=("index_cache",),
    shape=lambda k: written_token(k),
)
def index_write(k: Tensor, index_cache: Tensor, slots: Tensor) -> Tensor:
    """Write row t of k [..., C] (T rows) to slot slots[t] of the cache; -1 writes nothing.

    slots [T] i64 and the returned token [0] as in kv_write.
    """
    rows = slots >= 0
    block, offset = slots[rows] // index_cache.shape[1], slots[rows] % index_cache.shape[1]
    written = k.reshape(-1, k.shape[-1])[rows]
    if not len(written):
        return k.new_empty((0,))
    if index_cache.dtype in FP8:
        codes, scales = quant_fp8_per_token.reference(written, index_cache.dtype)
        parts = (codes.view(torch.uint8), scales.view(torch.uint8))
        index_cache.view(torch.uint8)[block, offset] = torch.cat(parts, -1)
    else:
        index_cache[block, offset] = written.to(index_cache.dtype)
    return k.new_empty((0,))


def cached_keys(rows: Tensor) -> Tensor:
    """The keys [..., C] in fp32 of rows of the cache."""
    if rows.dtype not in FP8:
        return rows.to(torch.float32)
    codes, scales = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:].contiguous()
    return codes.to(torch.float32) * scales.view(torch.float32)


def _paged_cost(call: OpCall) -> Work:
    """Each sequence reads its rows of the cache once, for all heads."""
    q, cache = call["q"], call["index_cache"]
    tokens, heads, width = math.prod(q.shape[:-2]), q.shape[-2], q.shape[-1]
    sequences = call["seq_lens"].shape[0]
    seen = call.context - (tokens / sequences - 1) / 2
    read = sequences * call.context * cache.shape[-1] * cache.dtype.itemsize
    moved = bytes_of([q, call["weights"], *call.results]) + read
    return moved, 2 * tokens * seen * heads * width


@op(kind=Kind.ATTENTION, rows=None, cost=_paged_cost, shape=_shape)
def paged_index_topk(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    token: Tensor,
    *,
    topk: int,
) -> Tensor:
    """index_topk of ragged sequences over their keys in the indexer's cache. q [..., J, C] and
    weights [..., J] (T rows) -> [..., topk] i32.

    q may be codes in fp8; their scales are then factors of the weights. query_start, seq_lens,
    block_tables and token as in paged_attention; a row of no sequence (padding) chooses no key.
    """
    rows, by_row = q.reshape(-1, *q.shape[-2:]), weights.reshape(-1, weights.shape[-1])
    chosen = q.new_full((len(rows), topk), -1, dtype=torch.int32)
    for sequence in sequences(query_start, seq_lens, block_tables):
        scores = _scores(
            rows[sequence.new], cached_keys(sequence.cached(index_cache)), by_row[sequence.new]
        )
        chosen[sequence.new] = _chosen(scores, sequence.columns <= sequence.positions, topk)
    return chosen.view(*q.shape[:-2], topk)


def _spec(name: str, arguments: Arguments, codes: torch.dtype | None) -> StateSpec:
    k = arguments["k"]
    width = k.shape[-1] + (SCALE_BYTES if codes else 0)
    if codes and width % SCALE_BYTES:
        raise ValueError(
            f"keys of {k.shape[-1]} columns: an fp8 cache needs a multiple of {SCALE_BYTES}"
        )
    return StateSpec.of(name, "indexer", ((width,),), codes or k.dtype)


def _paged(arguments: Arguments, state: Mapping[str, Tensor], step: StepFields) -> Tensor:
    token = call_on_state(index_write, arguments, state, step)
    return call_on_state(paged_index_topk, arguments, state, step, token=token)


@op(
    kind=Kind.ATTENTION,
    rows=None,
    cost=_cost,
    shape=_shape,
    state=StateBinding(
        handle="keys",
        tokens=lambda arguments: math.prod(arguments["q"].shape[:-2]),
        spec=_spec,
        form=_paged,
    ),
)
def index_topk(
    q: Tensor, k: Tensor, weights: Tensor, keys: Tensor | None = None, *, topk: int
) -> Tensor:
    """The keys that attention of each token reads: of keys 0..t the `topk` with the largest
    sum_j weights[t, j] relu(q[t, j] . k[s]), all if there are no more (DeepSeek-V3.2, eq. 1 and 2)
    -> [..., T, topk] i32. The sum is in fp32; of equal ones, the first keys are chosen.

    q        [..., T, J, C], rotated
    k        [..., T, C], rotated
    weights  [..., T, J]; a positive factor changes nothing
    keys     the layer's state handle (indexer_state), which only the runtime uses
    """
    rows = torch.arange(k.shape[-2], device=k.device)
    return _chosen(_scores(q, k, weights), rows[None, :] <= rows[:, None], topk)


def chosen_key_mask(chosen: Tensor, keys: int) -> Tensor:
    """Whether each of so many keys is chosen. [..., K] -> [..., keys] bool."""
    marked = chosen.new_zeros((*chosen.shape[:-1], keys + 1), dtype=torch.bool)
    return marked.scatter(-1, torch.where(chosen < 0, keys, chosen).long(), True)[..., :keys]


def _mask_shape(chosen: Tensor) -> Tensor:
    *lead, tokens, _ = chosen.shape
    return chosen.new_empty((*lead, 1, tokens, tokens), dtype=torch.bool)


@op(kind=Kind.OTHER, rows=None, shape=_mask_shape)
def chosen_mask(chosen: Tensor) -> Tensor:
    """The mask of `ops.attention` that shows the chosen keys (index_topk) of T tokens. chosen
    [..., T, K] -> [..., 1, T, T] bool.
    """
    return chosen_key_mask(chosen, chosen.shape[-2]).unsqueeze(-3).contiguous()
