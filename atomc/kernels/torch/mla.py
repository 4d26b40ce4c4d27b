"""The products and writes of multi-head latent attention, as torch calls, on any device."""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.torch.eager import eager

mla_kv_write = eager(ops.mla_kv_write, __name__, layout="paged")
mla_rope_kv_write = eager(ops.mla_rope_kv_write, __name__, layout="paged")
bmm_rope_kv_write = eager(ops.bmm_rope_kv_write, __name__, layout="paged")


@ops.linear_by_head.kernel("torch")
def linear_by_head(x: Tensor, weight: Tensor) -> Tensor:
    rows = x.reshape(-1, *x.shape[-2:])
    out = x.new_empty((*rows.shape[:-1], weight.shape[1]))
    # Without `out`, heads would be before tokens in memory.
    torch.bmm(rows.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
    return out.view(*x.shape[:-1], weight.shape[1])
