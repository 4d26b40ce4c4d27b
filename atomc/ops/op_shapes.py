"""Results of ops on fake tensors: the rules that several ops share.

An op names its rule with `@op(shape=...)`. A rule declares the arguments that it reads.
"""

import torch
from torch import Tensor


def shape_of_x(x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """Contiguous, as x, in out_dtype or that of x."""
    return x.new_empty(x.shape, dtype=out_dtype)


def rows_of_product(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [..., K] and weight [N, ...] -> [..., N], or [..., H, K] and [H, N, ...] -> [..., H, N]."""
    outputs = weight.shape[weight.dim() - 2]
    return x.new_empty((*x.shape[:-1], outputs), dtype=out_dtype)


def heads_of_values(q: Tensor, v: Tensor) -> Tensor:
    """q [..., N, D] and v [..., K, V], or a cache of values -> [..., N, V]."""
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def written_token(rows: Tensor) -> Tensor:
    """What a write of rows returns: the empty token, [0]."""
    return rows.new_empty((0,))
