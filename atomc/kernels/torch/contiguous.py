"""State in "contiguous" layout, on a CPU: a sequence is one block, so its keys are a slice and nothing is gathered."""

from torch import Tensor

from atomc import ops
from atomc.kernels.torch.sequence import attend, no_scales, sequences
from atomc.platform import Platform


def _on_a_cpu(
    platform: Platform, k_scale: Tensor | None = None, v_scale: Tensor | None = None, **_: object
) -> str | None:  # fmt: skip
    return no_scales(platform, k_scale, v_scale) if platform.is_cpu else "written for the CPU"


def _reads_it_as_it_is(
    platform: Platform, q: Tensor, k_cache: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    **_: object,
) -> str | None:  # fmt: skip
    if q.dtype != k_cache.dtype:
        return f"the cache is {k_cache.dtype}, the query {q.dtype}: nothing is converted"
    return _on_a_cpu(platform, k_scale, v_scale)


@ops.kv_write.kernel("torch", layout="contiguous", refuses=_on_a_cpu)
def kv_write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    token = k.new_empty((0,))
    k, v = k.reshape(-1, *k.shape[-2:]), v.reshape(-1, *v.shape[-2:])
    # Asking costs 2 us, filtering 8 and a copy of k and v; only padded steps have rows to skip.
    if slots.numel() and slots.min() < 0:
        rows = (slots >= 0).nonzero()[:, 0]
        k, v, slots = k[rows], v[rows], slots[rows]
    block_size = k_cache.shape[1]
    block, offset = slots // block_size, slots % block_size
    k_cache[block, offset] = k.to(k_cache.dtype)
    v_cache[block, offset] = v.to(v_cache.dtype)
    return token


@ops.paged_attention.kernel("torch", layout="contiguous", refuses=_reads_it_as_it_is)
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


@ops.rope_kv_write.kernel("torch", layout="contiguous", refuses=_on_a_cpu)
def rope_kv_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, rope_style: str = "neox",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    token = kv_write(ops.rope.reference(k, cos, sin, rope_style), v, k_cache, v_cache, slots)
    return ops.rope.reference(q, cos, sin, rope_style), token


@ops.qk_norm_rope_kv_write.kernel("torch", layout="contiguous", refuses=_on_a_cpu)
def qk_norm_rope_kv_write(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float,
    k_cache: Tensor, v_cache: Tensor, slots: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    norm_style: str = "after", rope_style: str = "neox",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k = ops.qk_norm_rope.reference(q, k, q_weight, k_weight, cos, sin, eps, norm_style, rope_style)
    return q, kv_write(k, v, k_cache, v_cache, slots)
