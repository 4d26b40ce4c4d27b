"""Attention over a paged cache for long prompts by AITER's kernels for dense keys (CK, or assembly
where it has one for the shape): the keys of all sequences are gathered first, which is little
beside what attention of as many rows costs. Other steps take the Triton kernels.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.attention.attention import single_key
from atomc.kernels.aiter.attention.shuffled_cache import gathered_from_pieces
from atomc.kernels.aiter.attention.unified_attention import attended, unattended
from atomc.kernels.aiter.library import Function, installed
from atomc.kernels.checks import (
    first_refusal,
    named,
    scattered_blocks,
    unaligned_heads,
    unlike,
    unsupported,
)
from atomc.kernels.row_views import as_heads

flash_attn_varlen_func = Function(
    "flash_attn_varlen_func",
    "aiter",
    takes=["softmax_scale", "logits_soft_cap", "causal", "window_size", "out"],
)
WIDEST = 256
# Keys are gathered where there is room in the block tables for at most so many a row: a bound of
# the memory that they take, 16 MiB for 1,024 rows and 8 key heads of 128. Not measured on an AMD
# GPU.
KEYS_PER_ROW = 4


# Why AITER's kernels for dense keys do not serve these.
ungathered = first_refusal(
    installed(flash_attn_varlen_func),
    single_key,
    lambda q, v_cache: unaligned_heads(q, v_cache, WIDEST),
)


@ops.paged_attention.kernel(
    "aiter",
    layout="paged",
    refuses=first_refusal(
        ungathered,
        unattended,
        lambda q, k_cache: unlike((q.dtype,), k_cache=k_cache),
        # Its assembly does not look at sinks, and is not told apart.
        named("sinks k_scale", unsupported, "AITER's attention"),
        lambda k_cache: scattered_blocks(k_cache),
    ),
)
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    step = query_start, seq_lens, block_tables
    return attended_prompts(q, k_cache, v_cache, *step, scale, window, softcap)


def attended_prompts(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    *,
    shuffled: bool = False,
) -> Tensor:
    """paged_attention without sinks and scales, of steps with long prompts over gathered keys.
    shuffled: the layout of the caches.
    """
    rows = as_heads(q)
    room = block_tables.numel() * k_cache.shape[1]
    if rows.shape[0] <= seq_lens.shape[0] or not 0 < room <= KEYS_PER_ROW * rows.shape[0]:
        return attended(
            q,
            k_cache,
            v_cache,
            query_start,
            seq_lens,
            block_tables,
            scale=scale,
            window=window,
            softcap=softcap,
            shuffled=shuffled,
        )
    key_start = torch.zeros_like(query_start)
    torch.cumsum(seq_lens, 0, dtype=key_start.dtype, out=key_start[1:])
    slots = slots_of_keys(key_start, block_tables, k_cache.shape[1])
    gathered = gathered_from_pieces if shuffled else _gathered
    # Rows of no sequence stay 0.
    out = torch.zeros_like(rows, memory_format=torch.contiguous_format)
    with torch.no_grad():  # it is an autograd function
        flash_attn_varlen_func(
            rows,
            *gathered(k_cache, v_cache, slots),
            query_start,
            key_start,
            rows.shape[0],
            slots.shape[0],
            softmax_scale=scale,
            logits_soft_cap=softcap,
            causal=True,
            window_size=(window - 1 if window else -1, -1, 0),
            out=out,
        )
    return out.view(q.shape)


def _gathered(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [n, K, D] of these slots."""
    keys, values = (cache.flatten(0, 1).index_select(0, slots) for cache in (k_cache, v_cache))
    return keys, values


def slots_of_keys(key_start: Tensor, block_tables: Tensor, block_size: int) -> Tensor:
    """Where the keys of all sequences lie, one sequence behind the other, as many as there is room
    for. key_start [S + 1], block_tables [S, B] -> [S * B * block_size] int64; what is behind the
    last key is a slot of some sequence.
    """
    sequences, blocks = block_tables.shape
    key = torch.arange(sequences * blocks * block_size, device=key_start.device)
    of = torch.searchsorted(key_start[1:], key, right=True).clamp_(max=sequences - 1)
    position = (key - key_start[of]).clamp_(max=blocks * block_size - 1)
    return block_tables[of, position // block_size].long() * block_size + position % block_size
