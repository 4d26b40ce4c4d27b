"""The norms of queries and keys, rotary positions and the write into a shuffled cache in one HIP
kernel of AITER's, which rounds between them as the op does.

AITER writes queries and keys where they were: it gets copies. Its tables have a number a pair, the
cosines of a token beside its sines.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.attention.shuffled_cache import shuffled_views, unwritable
from atomc.kernels.aiter.library import Function, installed
from atomc.kernels.aiter.rows.kv_write import scaled
from atomc.kernels.aiter.rows.rope import moving, not_by_token, rotated_width
from atomc.kernels.checks import first_refusal, named, strided, unlike
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal

fused_qk_norm_rope_cache_quant_shuffle = Function(
    "fused_qk_norm_rope_cache_quant_shuffle",
    "aiter",
    takes=["q", "k", "v", "cos_sin_cache", "pos_ids"],
)
WIDTHS = (64, 128, 256)
MOST_KEY_HEADS = 32
LANES = 32  # that share a head


def _unfused(q: Tensor, k: Tensor, cos: Tensor, norm_style: str, rope_style: str) -> Refusal | None:
    if norm_style == "one_plus":
        return Refusal("argument", "AITER's kernel multiplies by the weight, not by one more")
    if rope_style == "neox":
        return Refusal("argument", "AITER's kernel has one number of the tables for both of a pair")
    width, rotated = q.shape[-1], rotated_width(cos, rope_style)
    if width not in WIDTHS or k.shape[1] > MOST_KEY_HEADS:
        return Refusal(
            "shape",
            f"{k.shape[1]} key heads of {width}: AITER's kernel is written for heads of {WIDTHS}, "
            f"up to {MOST_KEY_HEADS}",
        )
    # The other of a pair is found by flipping bits of a lane's number.
    apart, rest = divmod(rotated // 2, width // LANES)
    if rope_style == "half" and (rest or apart & (apart - 1)):
        return Refusal(
            "shape", f"{rotated} of {width} columns rotate: the halves are no power of two apart"
        )
    return None


@ops.qk_norm_rope_kv_write.kernel(
    "aiter",
    layout="shuffled",
    refuses=first_refusal(
        installed(fused_qk_norm_rope_cache_quant_shuffle),
        named("q k v cos sin k_cache v_cache", unlike, HALVES),
        lambda q, q_weight, k_weight: unlike((q.dtype,), q_weight=q_weight, k_weight=k_weight),
        named("k_scale v_scale", scaled),
        moving,
        _unfused,
        named("q_weight k_weight", strided),
        not_by_token,
        unwritable,
    ),
)
def qk_norm_rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    rope_style: str,
) -> tuple[Tensor, Tensor]:
    q, k = (x.clone(memory_format=torch.contiguous_format) for x in (q, k))
    if q.numel():
        rows = torch.arange(q.shape[0], device=q.device)  # token t has row t of the tables
        one = q.new_ones(1, dtype=torch.float32)  # read by the kernel, and not used
        fused_qk_norm_rope_cache_quant_shuffle(
            q,
            k,
            v,
            q.shape[1],
            k.shape[1],
            v.shape[1],
            q.shape[2],
            eps,
            q_weight,
            k_weight,
            torch.cat((cos, sin), -1).flatten(0, 1),
            rope_style == "half",
            rows,
            *shuffled_views(k_cache, v_cache),
            slots,
            "auto",
            one,
            one,
        )
    return q, q.new_empty((0,))
