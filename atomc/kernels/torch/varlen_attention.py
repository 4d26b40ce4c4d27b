"""Attention within packed sequences by scaled_dot_product_attention, one call per sequence, any
device.
"""

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor

from atomc import ops


@ops.varlen_attention.kernel("torch", syncs=True)
def varlen_attention(q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, scale: float) -> Tensor:
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    for start, end in pairwise(query_start.tolist()):
        if start < end:
            rows = slice(start, end)
            attended = F.scaled_dot_product_attention(
                q[:, :, rows], k[:, :, rows], v[:, :, rows], scale=scale, enable_gqa=True
            )
            out[rows] = attended[0].transpose(0, 1)
    return out
