"""LoRA adapters of a linear layer (Hu et al. 2021): each row of a step has its own, or none.

L adapters, r their rank, P layers that are merged to one, K inputs, N outputs, T rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc.ops.op import op
from atomc.ops.op_cost import OpCall, Work, bytes_of, distinct_experts
from atomc.ops.op_traits import Kind


def _cost(call: OpCall) -> Work:
    """Of the adapters only those are read that rows have, if each row chooses uniformly."""
    y, x, a, b = (call[name] for name in ("y", "x", "a", "b"))
    adapters, thin, depth = a.shape
    tokens = x.numel / depth
    hit = distinct_experts(adapters, 1, tokens)
    moved = bytes_of([y, x, *call.results]) + hit * (a.bytes + b.bytes) / adapters
    return moved, 2 * tokens * (thin * depth + b.shape[1] * y.shape[-1])


@op(kind=Kind.LINEAR | Kind.ADAPTER, rows="x", cost=_cost, shape=lambda y: torch.empty_like(y))
def lora_linear(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    rows: Tensor | None = None,
    widths: list[int] | None = None,
    scale: float = 1.0,
) -> Tensor:
    """y + (x @ A.T) @ B * scale of the adapter of each row. y [..., N], x [..., K] of T rows ->
    as y. The products are in the dtype of a and b, which may be fp32 where y is not.

    a       [L, P * r, K]: A of each adapter, for the P layers whose outputs y has behind each other
    b       [L, r, N]: B.T of each adapter
    rows    [T] int32: the adapter of each row; -1: none. None: there is one adapter, for all rows
    widths  outputs of the P layers; columns of layer p are multiplied with rows p * r to p * r + r
            of A, columns after those of all layers are unchanged. None: one layer
    """
    widths = [y.shape[-1]] if widths is None else widths
    adapters, thin_size, _ = a.shape
    rank = thin_size // len(widths)
    # All adapters are multiplied, which needs no size that depends on data: their number is small.
    thin = F.linear(x.flatten(0, -2).to(a.dtype), a.flatten(0, 1))
    thin = thin.view(-1, adapters, len(widths), rank)
    if rows is not None:
        own = rows.unsqueeze(-1) == torch.arange(adapters, device=rows.device)
        thin = thin.where(own[..., None, None], 0)
    deltas, start = [], 0
    for part, width in enumerate(widths):
        columns = b[..., start : start + width].flatten(0, 1)
        deltas.append(thin[:, :, part].flatten(1) @ columns)
        start += width
    delta = torch.cat(deltas, -1) if len(deltas) > 1 else deltas[0]
    delta = F.pad(delta, (0, y.shape[-1] - start)).view(y.shape)
    return (y + (delta if scale == 1.0 else delta * scale)).to(y.dtype)
