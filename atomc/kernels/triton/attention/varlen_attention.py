"""Attention within packed sequences in Triton: the kernel of attention over a paged cache, with the
rows of a sequence as one block.
"""

from torch import Tensor

from atomc import ops
from atomc.kernels.checks import no_bf16_products, too_wide, unlike, wrong_rank
from atomc.kernels.triton.attention import attention as paged
from atomc.kernels.triton.attention.attention import MAX_WIDTH
from atomc.kernels.triton.attention.attention_tiles import fitted_tiling, tiling
from atomc.kernels.triton.launch.launch import unfit
from atomc.kernels.triton.launch.tiles import PAGED_PREFILL
from atomc.ops.op import Refusal
from atomc.platform import Platform


def refuse_varlen_attention(
    platform: Platform, q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, *, scale: float
) -> Refusal | None:
    return (
        unfit(platform, q=q, k=k, v=v)
        or wrong_rank((3,), q=q, k=k, v=v)
        or no_bf16_products(platform, q.dtype)
        or unlike((q.dtype,), k=k, v=v)
        or paged.odd_numbers(scale, query_start=query_start)
        or too_wide(max(q.shape[-1], v.shape[-1]), MAX_WIDTH, "heads")
        or paged.crowded_group(q.shape[1] // k.shape[1])
    )


@ops.varlen_attention.kernel(
    "triton", refuses=refuse_varlen_attention, tuned_for=PAGED_PREFILL.archs
)
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, *, scale: float
) -> Tensor:
    rows, heads, width = q.shape
    if rows == 0:
        return q.new_empty((*q.shape[:-1], v.shape[-1]))
    kv_heads, widest = k.shape[1], max(width, v.shape[-1])
    cut = tiling(
        rows,
        query_start.shape[0] - 1,
        heads // kv_heads,
        kv_heads,
        widest,
        q.element_size(),
        rows,
        q.device,
    )._replace(splits=1)
    cut = fitted_tiling(cut, widest, q.device)
    return paged.attend_packed(q, k, v, query_start, scale, cut, causal=False)
