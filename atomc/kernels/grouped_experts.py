"""Experts by the grouped matrix product of PyTorch: rows sorted by expert, one product of all.

M rows, k choices of each, P = M * k pairs, E experts, H width of the model, I of an expert.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_experts(
    out: Tensor,
    x: Tensor,
    ids: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    gate: Callable[[Tensor], Tensor],
    input_weights: Tensor | None = None,
) -> None:
    """Write the results of x [M, H] for all pairs to out [P, H]: 0 where ids [M, k] are outside of
    0..E-1. The host does not wait for ids.

    gate           [P, 2I] -> [P, I]
    input_weights  [M, k], multiply the inputs; the results are not weighted
    """
    count = len(w13)
    flat = ids.flatten().long()
    # Pairs of unknown experts go behind all others, where no group reaches.
    expert, order = flat.where((flat >= 0) & (flat < count), count).sort(stable=True)
    bounds = torch.arange(count, device=x.device)
    ends = torch.searchsorted(expert, bounds, right=True, out_int32=True)
    own = expert.clamp(max=count - 1)

    def product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
        return y if bias is None else y + bias[own]

    rows = x[order // ids.shape[1]]
    if input_weights is not None:
        rows = (rows * input_weights.flatten()[order].unsqueeze(-1)).to(x.dtype)
    y = product(gate(product(rows, w13, b13)), w2, b2)
    out[order] = y.masked_fill((expert == count).unsqueeze(-1), 0)
