"""Multi-head latent attention (DeepSeek-V2, section 2.1): attention whose keys and values are
computed from a latent that all heads share.

T tokens, H heads, P width of the part of a key that is not rotated, V width of a value, L latent
width, R rotated width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomc.ops.attention import attention
from atomc.ops.op import op
from atomc.ops.op_cost import OpCall, Work, bytes_of
from atomc.ops.op_traits import Kind
from atomc.ops.state import state_handle


def latent_state(latent: int, rotated: int) -> nn.Buffer:
    """The handle of a layer's latent cache, for `ops.mla_attention`: `self.kv =
    ops.latent_state(...)`.
    """
    return state_handle(latent + rotated)


def _cost(call: OpCall) -> Work:
    """Reads and writes its operands; FLOPs of the keys and values of all heads, and of each pair of
    a query and a visible key.
    """
    operands = [call[name] for name in ("q_nope", "q_rope", "latent", "k_rope", "weight")]
    q, latent, weight = operands[0], operands[2], operands[4]
    *batch, rows, heads, _ = q.shape
    width = operands[1].shape[-1] + weight.shape[0] / heads
    pairs = math.prod(batch) * rows * (rows + 1) / 2
    return (
        bytes_of([*operands, *call.results]),
        2 * latent.numel * weight.shape[0] + 2 * pairs * heads * width,
    )


def _shape(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    weight: Tensor,
    kv: Tensor | None = None,
    *,
    scale: float,
) -> Tensor:
    *lead, heads, nope = q_nope.shape
    return q_nope.new_empty((*lead, heads, weight.shape[0] // heads - nope))


@op(kind=Kind.ATTENTION, rows=None, cost=_cost, shape=_shape)
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
    """Causal attention of H heads over keys and values that `weight` computes from the latent
    (DeepSeek-V2, section 2.1, eq. 10 to 19) -> [..., T, H, V] in q_nope.dtype.

    q_nope  [..., T, H, P]
    q_rope  [..., T, H, R], rotated
    latent  [..., T, L], normalized
    k_rope  [..., T, 1, R], rotated; the same for all heads
    weight  [H * (P + V), L], kv_b_proj of checkpoints: the rows of a head are those of its P key
            columns, then those of its V value columns
    kv      the layer's state handle (latent_state), which only the runtime uses
    scale   of the scores, for example (P + R) ** -0.5
    """
    heads, nope = q_nope.shape[-2:]
    both = F.linear(latent, weight).view(*latent.shape[:-1], heads, weight.shape[0] // heads)
    k = torch.cat((both[..., :nope], k_rope.expand(*both.shape[:-1], k_rope.shape[-1])), -1)
    q = torch.cat((q_nope, q_rope), -1)
    return attention.reference(q, k, both[..., nope:], scale=scale)
