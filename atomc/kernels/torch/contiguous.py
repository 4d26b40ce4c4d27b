"""State in "contiguous" layout, on a CPU: a sequence is one block, so its keys are a slice and nothing is gathered."""

from torch import Tensor

from atomc import ops
from atomc.kernels.torch.sequence import attend, on_a_cpu, reads_it_as_it_is, sequences, write


@ops.kv_write.kernel("torch", layout="contiguous", refuses=on_a_cpu)
def kv_write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return write(k, v, k_cache, v_cache, slots)


@ops.paged_attention.kernel("torch", layout="contiguous", refuses=reads_it_as_it_is)
def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, query_start: Tensor, seq_lens: Tensor, block_tables: Tensor,
    token: Tensor, sinks: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    *, scale: float, window: int = 0, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    rows = q.reshape(-1, *q.shape[-2:])
    out = q.new_zeros((*rows.shape[:-1], v_cache.shape[-1]))
    block = block_tables[:, 0].tolist()
    for s, new, first, length in sequences(query_start, seq_lens, window):
        keys, values = k_cache[block[s], first:length], v_cache[block[s], first:length]
        out[new] = attend(rows[new], keys, values, sinks, scale, window, softcap)
    return out.view(*q.shape[:-1], v_cache.shape[-1])


@ops.rope_kv_write.kernel("torch", layout="contiguous", refuses=on_a_cpu)
def rope_kv_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, rope_style: str = "neox",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    token = write(ops.rope.reference(k, cos, sin, rope_style), v, k_cache, v_cache, slots)
    return ops.rope.reference(q, cos, sin, rope_style), token


@ops.qk_norm_rope_kv_write.kernel("torch", layout="contiguous", refuses=on_a_cpu)
def qk_norm_rope_kv_write(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float,
    k_cache: Tensor, v_cache: Tensor, slots: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    norm_style: str = "after", rope_style: str = "neox",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k = ops.qk_norm_rope.reference(q, k, q_weight, k_weight, cos, sin, eps, norm_style, rope_style)
    return q, write(k, v, k_cache, v_cache, slots)
