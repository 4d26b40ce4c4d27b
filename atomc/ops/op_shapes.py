"""Results of ops on fake tensors: the rules that several ops share.

An op names its rule with `@op(shape=...)`. A rule reads the first arguments of the op, and some of
those by name.
"""

import torch
from torch import Tensor


def shape_of_x(x: Tensor, *_: object, out_dtype: torch.dtype | None = None, **__: object) -> Tensor:
    """Contiguous, as x, in out_dtype or that of x."""
    return x.new_empty(x.shape, dtype=out_dtype)


def rows_of_product(
    x: Tensor, weight: Tensor, *_: object, out_dtype: torch.dtype | None = None, **__: object
) -> Tensor:
    """x [..., K] and weight [N, ...] -> [..., N], or [..., H, K] and [H, N, ...] -> [..., H, N]."""
    outputs = weight.shape[weight.dim() - 2]
    return x.new_empty((*x.shape[:-1], outputs), dtype=out_dtype)


def heads_of_values(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> Tensor:
    """q [..., N, D] and v [..., K, V], or a cache of values -> [..., N, V]."""
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def written_token(rows: Tensor, *_: object, **__: object) -> Tensor:
    """What a write of rows returns: the empty token, [0]."""
    return rows.new_empty((0,))
