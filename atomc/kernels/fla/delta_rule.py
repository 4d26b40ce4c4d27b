"""The gated delta rule by flash-linear-attention (fla): chunks of 64 tokens, or token by token.

Both have the op's layouts, normalize queries and keys inside with the same epsilon, take g as a
logarithm, and let value head n read key head n // (N // H). Operands that are not contiguous (q, k
and v cut from one convolution) are copied by fla.

Only the op without a cache. In `gated_delta_rule_update`, whose states are rows of a table that are
replaced in place, fla would cost more than it saves:

- It takes and returns the states of a call in the order of its sequences, without slots: a step of
  decoding would gather, clear and scatter them, with four times the traffic of the kernel itself.
- It lists the chunks of ragged sequences on the host, which waits for the device: no step of the
  program could be captured in a CUDA graph. Its list is cached by the identity of cu_seqlens, which
  the runtime rewrites in place.
- It leaves rows of no sequence unwritten, which have to be zero.

T tokens, H key heads, N value heads, K key width, V value width, B sequences.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal, named, too_wide, unlike
from atomc.kernels.fla.library import function, unfit
from atomc.ops.formats import FLOATS, HALVES

RECURRENT, CHUNKS = "fused_recurrent_gated_delta_rule", "chunk_gated_delta_rule"
# A sequence of at most so many tokens does not fill a chunk, as in our kernels. Not measured.
STEPS = 8
MAX_KEY = 256


# Of fp32, chunks are multiplied in tf32.
refuse_gated_delta_rule = first_refusal(
    lambda platform: unfit(platform, RECURRENT, CHUNKS),
    named("q k v", unlike, HALVES),
    named("g", unlike, (torch.float32,)),
    named("beta", unlike, FLOATS),
    lambda k: too_wide(k.shape[-1], MAX_KEY, "keys"),
)


def _batch(x: Tensor, dims: int) -> Tensor:
    """x [..., T, *dims] as [B, T, *dims]."""
    return x.reshape(-1, *x.shape[-dims - 1 :])


@ops.gated_delta_rule.kernel(
    "fla", refuses=refuse_gated_delta_rule, note="chunks are rounded to 16 bits in between"
)
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float
) -> Tensor:
    if not v.numel():
        return v.new_empty(v.shape)
    rule = function(RECURRENT if v.shape[-3] <= STEPS else CHUNKS)
    out: Tensor
    out, _ = rule(
        q=_batch(q, 2),
        k=_batch(k, 2),
        v=_batch(v, 2),
        g=_batch(g, 1),
        beta=_batch(beta, 1),
        scale=scale,
        use_qk_l2norm_in_kernel=True,
    )
    return out.view(v.shape)
