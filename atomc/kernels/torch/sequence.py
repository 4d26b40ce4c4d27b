"""Causal attention of one sequence at a time, shared by the kernels of both layouts.

T new tokens, S keys of a sequence, N query heads, K key/value heads, G = N / K, D head width.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc.kernels.checks import first_refusal, not_a_cpu
from atomc.ops.op import Refusal
from atomc.platform import Platform


def refuse_scaled_cache(
    platform: Platform, k_scale: Tensor | None, v_scale: Tensor | None
) -> Refusal | None:
    """For kernels on a CPU that read or write caches without scales."""
    if reason := not_a_cpu(platform):
        return reason
    unscaled = k_scale is None and v_scale is None
    return None if unscaled else Refusal("argument", "the cache has scales")


def _mixed(q: Tensor, k_cache: Tensor) -> Refusal | None:
    if q.dtype == k_cache.dtype:
        return None
    return Refusal(
        "dtype",
        f"the cache is {k_cache.dtype}, the query {q.dtype}: mixed dtypes are not supported",
    )


refuse_paged_attention = first_refusal(_mixed, refuse_scaled_cache)


def sequences(
    query_start: Tensor, seq_lens: Tensor, window: int
) -> Iterator[tuple[int, slice, int, int]]:
    """(sequence, its rows, first key that they see, number of keys), for each sequence with new
    tokens.
    """
    bounds = query_start.tolist()
    for s, length in enumerate(seq_lens.tolist()):
        start, end = bounds[s], bounds[s + 1]
        if start < end:
            yield (
                s,
                slice(start, end),
                max(0, length - (end - start) - window + 1) if window else 0,
                length,
            )


def gathered(
    k_cache: Tensor,
    v_cache: Tensor,
    window: int,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
) -> Iterator[tuple[slice, int, Tensor, Tensor]]:
    """(rows, first key that they see, keys and values [S, K, D] from that key on) of each sequence
    with new tokens, from caches in blocks. Keys and values are valid until the next iteration.
    """
    block_size = k_cache.shape[1]
    parts = [
        (s, new, first, length, first // block_size, -(-length // block_size))
        for s, new, first, length in sequences(query_start, seq_lens, window)
    ]
    k_room, v_room = _room(
        k_cache, v_cache, max((end - start for *_, start, end in parts), default=0)
    )
    for s, new, first, length, start, end in parts:
        blocks = block_tables[s, start:end]
        seen = slice(first - start * block_size, length - start * block_size)
        # Not k_cache[blocks], whose copy on a CPU is scalar. Zen 4, 512 keys, 8 heads of 64, bf16,
        # with attention: 0.22 ms, as with the contiguous layout; 0.39 with k_cache[blocks].
        keys = torch.index_select(k_cache, 0, blocks, out=k_room[: end - start]).flatten(0, 1)[seen]
        values = torch.index_select(v_cache, 0, blocks, out=v_room[: end - start]).flatten(0, 1)[
            seen
        ]
        yield new, first, keys, values


def _room(k_cache: Tensor, v_cache: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Memory for this number of blocks of keys and of values, reused for all sequences.

    It is one allocation, which malloc keeps for the next call. Two would be returned to the system,
    and mapping their pages again takes as long as reading the keys.
    """
    k_size, v_size = (blocks * cache.shape[1:].numel() for cache in (k_cache, v_cache))
    room = k_cache.new_empty(k_size + v_size)
    return room[:k_size].view(blocks, *k_cache.shape[1:]), room[k_size:].view(
        blocks, *v_cache.shape[1:]
    )


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Causal attention of the last T tokens of a sequence. q [T, N, D], keys and values [S, K, D]
    -> [T, N, D].

    The group is folded into the query length, [1, K, T * G, D]. A key is then read once for G
    heads, and one token is a matrix product. Cascade Lake, 16 query heads and 8 key/value heads of
    128, 1024 keys, bf16: 0.33 ms, 2.9 with enable_gqa.
    """
    num_new, num_heads, _ = q.shape
    num_keys, kv_heads, _ = keys.shape
    group = num_heads // kv_heads
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    plain = sinks is None and not softcap
    if plain and num_new == num_keys > 1 and not 0 < window < num_keys:
        # Skips half of the keys. Cascade Lake, 2048 tokens: 220 ms, 375 with a mask.
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys, values, is_causal=True, scale=scale, enable_gqa=group > 1
        )
        return out[0].transpose(0, 1)

    folded = (
        q.view(num_new, kv_heads, group, -1)
        .transpose(0, 1)
        .reshape(1, kv_heads, num_new * group, -1)
    )
    seen = None
    if num_new > 1:
        position = torch.arange(num_keys - num_new, num_keys, device=q.device).repeat_interleave(
            group
        )[:, None]
        columns = torch.arange(num_keys, device=q.device)[None, :]
        seen = columns <= position
        if window:
            seen &= columns > position - window
    if plain:
        if folded.shape[2] == 1 and q.dtype != torch.float32:
            # One row takes a slow matrix-vector path. Cascade Lake, 16 heads, 1024 keys: 3.04 ms,
            # 0.66 with two rows.
            folded = folded.repeat(1, 1, 2, 1)
        out = F.scaled_dot_product_attention(folded, keys, values, seen, scale=scale)[
            :, :, : num_new * group
        ]
    else:
        out = _attend_in_fp32(folded, keys, values, seen, sinks, scale, softcap)
    return out.reshape(kv_heads, num_new, group, -1).transpose(0, 1).reshape(num_new, num_heads, -1)


def _attend_in_fp32(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
) -> Tensor:
    """Attention with sinks and softcap, which scaled_dot_product_attention does not support, in
    fp32. q [1, K, T * G, D], keys [1, K, S, D].
    """
    scores = q.to(torch.float32) @ keys.to(torch.float32).transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        _, kv_heads, rows, _ = scores.shape
        sink = sinks.to(torch.float32).view(1, kv_heads, 1, -1)
        sink = sink.expand(1, kv_heads, rows // sink.shape[-1], -1).reshape(1, kv_heads, rows, 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    return (weights @ values.to(torch.float32)).to(q.dtype)
