"""Experts one after another: the (token, choice) pairs are sorted by expert, and each expert that
is hit multiplies its rows once.

T tokens, k choices of each, P = T * k pairs; pair p is choice p % k of token p // k.
"""

from collections.abc import Callable
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc import ops
from atomc.ops.experts import Gate, gated

Tensors = tuple[Tensor | None, ...]


def one_by_one(
    ids: Tensor,
    weights: Tensor | None,
    operands: tuple[Tensor, ...],
    product: Callable[..., Tensor],
    up: Tensors,
    between: Callable[[Tensor], tuple[Tensor, ...]],
    down: Tensors,
) -> Tensor:
    """The weighted sums [T, H], in the dtype of `product`. The host waits for `ids` [T, k].

    weights   [T, k]; None: all 1
    operands  tensors [T, ...], or [P, ...] with a row per pair
    product   (*rows of operands, *tensors of one expert) -> [n, N]
    up, down  the tensors of all experts, each [E, ...] or None; the first are weights
    between   [m, 2I], all rows in the order of experts -> the operands of down, [m, ...]
    """
    assert up[0] is not None
    num_experts = len(up[0])
    flat = ids.flatten()
    valid = (flat >= 0) & (flat < num_experts)
    order = flat.where(valid, num_experts).argsort(stable=True)
    counts = torch.bincount(flat[valid], minlength=num_experts).tolist()
    hit = [(e, count) for e, count in enumerate(counts) if count]
    order = order[: sum(counts)]

    def products(operands: tuple[Tensor, ...], of_experts: Tensors) -> Tensor:
        def one(e: int, *rows: Tensor) -> Tensor:
            return product(*rows, *(None if x is None else x[e] for x in of_experts))

        parts = [torch.split(x, [count for _, count in hit]) for x in operands]
        rows = zip(*parts, strict=True)
        if hit:
            return torch.cat([one(e, *own) for (e, _), own in zip(hit, rows, strict=True)])
        return one(0, *operands)  # no rows

    token = order // ids.shape[1]
    rows = tuple(x[token if len(x) == len(ids) else order] for x in operands)
    sums = products(between(products(rows, up)), down)
    if len(order) == len(flat):
        by_pair = torch.empty_like(sums)
    else:
        by_pair = sums.new_zeros(len(flat), sums.shape[1])
    by_pair[order] = sums
    return weighted_sum(by_pair, ids, weights)


def weighted_sum(by_pair: Tensor, ids: Tensor, weights: Tensor | None) -> Tensor:
    """by_pair [P, H], ids and weights [T, k] -> [T, H], as the op sums."""
    products = by_pair.view(*ids.shape, by_pair.shape[1])
    if weights is not None:
        products = products * weights.unsqueeze(-1)
    return products.sum(1, dtype=torch.float32).to(by_pair.dtype)


def weighted_input(x: Tensor, weights: Tensor) -> Tensor:
    """The inputs of all pairs, each times its weight: x [T, H], weights [T, k] -> [P, H]."""
    return (x.unsqueeze(1) * weights.unsqueeze(-1)).to(x.dtype).flatten(0, 1)


# Zen 4, one thread, bf16, E 128, k 8, H 1024, I 384: 1 token 4.0 ms, 64 tokens 71; by
# torch.nn.functional.grouped_mm, which loops as well, 5.3 and 83; by the reference 10.9 and 113;
# by torch.bmm of gathered weights 17.5 and more.
@ops.moe_experts.kernel("torch", syncs=True)
def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    weight_on_input: bool,
    **gate: Unpack[Gate],
) -> Tensor:
    return one_by_one(
        ids,
        None if weight_on_input else weights,
        (weighted_input(x, weights) if weight_on_input else x,),
        F.linear,
        (w13, b13),
        lambda h: (gated(h, **gate),),
        (w2, b2),
    )
