"""State in "paged" layout, on a CPU: the blocks of one sequence at a time are gathered, and then lie as in "contiguous"."""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.torch.sequence import attend, on_a_cpu, reads_it_as_it_is, sequences, write


@ops.kv_write.kernel("torch", layout="paged", refuses=on_a_cpu)
def kv_write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return write(k, v, k_cache, v_cache, slots)


@ops.paged_attention.kernel("torch", layout="paged", refuses=reads_it_as_it_is)
def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, query_start: Tensor, seq_lens: Tensor, block_tables: Tensor,
    token: Tensor, sinks: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    *, scale: float, window: int = 0, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    rows = q.reshape(-1, *q.shape[-2:])
    out = q.new_zeros((*rows.shape[:-1], v_cache.shape[-1]))
    block_size = k_cache.shape[1]
    found = [(s, new, first // block_size, -(-length // block_size), first, length)
             for s, new, first, length in sequences(query_start, seq_lens, window)]  # fmt: skip
    k_room, v_room = _room(k_cache, v_cache, max((end - start for _, _, start, end, _, _ in found), default=0))
    for s, new, start, end, first, length in found:
        blocks = block_tables[s, start:end]
        seen = slice(first - start * block_size, length - start * block_size)
        # Not k_cache[blocks], which copies number by number. Zen 4, 512 keys, 8 heads of 64, bf16, with attention: 0.39 ms
        # for 0.22, and 0.22 for the contiguous layout.
        keys = torch.index_select(k_cache, 0, blocks, out=k_room[: end - start]).flatten(0, 1)[seen]
        values = torch.index_select(v_cache, 0, blocks, out=v_room[: end - start]).flatten(0, 1)[seen]
        out[new] = attend(rows[new], keys, values, sinks, scale, window, softcap)
    return out.view(*q.shape[:-1], v_cache.shape[-1])


def _room(k_cache: Tensor, v_cache: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Memory for so many blocks of keys and of values, for one sequence after another.

    In one piece, which malloc keeps for the next call: what is freed in two goes back to the system, and filling it anew
    takes as long as reading the keys does.
    """
    k_size, v_size = (blocks * cache.shape[1:].numel() for cache in (k_cache, v_cache))
    room = k_cache.new_empty(k_size + v_size)
    return room[:k_size].view(blocks, *k_cache.shape[1:]), room[k_size:].view(blocks, *v_cache.shape[1:])


@ops.rope_kv_write.kernel("torch", layout="paged", refuses=on_a_cpu)
def rope_kv_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, rope_style: str = "neox",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    token = write(ops.rope.reference(k, cos, sin, rope_style), v, k_cache, v_cache, slots)
    return ops.rope.reference(q, cos, sin, rope_style), token


@ops.qk_norm_rope_kv_write.kernel("torch", layout="paged", refuses=on_a_cpu)
def qk_norm_rope_kv_write(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float,
    k_cache: Tensor, v_cache: Tensor, slots: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    norm_style: str = "after", rope_style: str = "neox",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k = ops.qk_norm_rope.reference(q, k, q_weight, k_weight, cos, sin, eps, norm_style, rope_style)
    return q, write(k, v, k_cache, v_cache, slots)
