"""Attention within packed sequences, without state: the patches of images, one image after another.

P rows of all sequences, S sequences, N query heads, K key/value heads (N a multiple of K), D head
width; values may have another width than queries and keys.
"""

from itertools import pairwise

from torch import Tensor

from atomc.ops.attention import attention
from atomc.ops.op import op
from atomc.ops.op_cost import OpCall, Work, bytes_of
from atomc.ops.op_shapes import heads_of_values
from atomc.ops.op_traits import Kind


def _varlen_attention_cost(call: OpCall) -> Work:
    """Reads and writes its operands; FLOPs of each pair of rows of sequences of equal length."""
    q, k, v = (call[name] for name in "qkv")
    rows, sequences = q.shape[0], call["query_start"].shape[0] - 1
    pairs = rows * rows / sequences
    return bytes_of([q, k, v, *call.results]), 2 * pairs * q.shape[1] * (q.shape[2] + v.shape[2])


@op(kind=Kind.ATTENTION, rows=None, cost=_varlen_attention_cost, shape=heads_of_values)
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, *, scale: float
) -> Tensor:
    """Attention, not causal, of each sequence to its own rows (flash_attn_varlen_func, Dao 2023). q
    [P, N, D], k and v [P, K, D] -> [P, N, D] in q.dtype, computed in fp32.

    Sequence s has rows query_start[s]:query_start[s + 1] (query_start [S + 1] i32). Rows behind the
    last sequence (padding) are zero.
    """
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    for start, end in pairwise(query_start.tolist()):
        rows = slice(start, end)
        out[rows] = attention.reference(q[rows], k[rows], v[rows], scale=scale, causal=False)
    return out
