"""Multi-head latent attention and its writes, as torch calls, on any device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc import ops
from atomc.kernels.torch.attention import attention
from atomc.kernels.torch.eager import eager

mla_kv_write = eager(ops.mla_kv_write, __name__, layout="paged")
mla_rope_kv_write = eager(ops.mla_rope_kv_write, __name__, layout="paged")
bmm_rope_kv_write = eager(ops.bmm_rope_kv_write, __name__, layout="paged")


@ops.mla_attention.kernel("torch")
def mla_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    weight: Tensor,
    kv: Tensor | None = None,
    *,
    scale: float,
) -> Tensor:
    heads, nope = q_nope.shape[-2:]
    both = F.linear(latent, weight).view(*latent.shape[:-1], heads, weight.shape[0] // heads)
    k = torch.cat((both[..., :nope], k_rope.expand(*both.shape[:-1], k_rope.shape[-1])), -1)
    out: Tensor = attention(torch.cat((q_nope, q_rope), -1), k, both[..., nope:], scale=scale)
    return out
