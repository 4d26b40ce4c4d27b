"""The write of new keys and values into a shuffled cache by AITER's HIP kernel."""

from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.attention.shuffled_cache import shuffled_views, unwritable
from atomc.kernels.aiter.library import Function, unfit
from atomc.kernels.aiter.rows.kv_write import apart, scaled
from atomc.kernels.checks import unlike, wrong_rank
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal
from atomc.platform import Platform

reshape_and_cache = Function("reshape_and_cache", "aiter", takes=["asm_layout"])


def refuse_kv_write(
    platform: Platform,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Refusal | None:
    return (
        unfit(platform, reshape_and_cache)
        or unlike(HALVES, k=k, v=v, k_cache=k_cache, v_cache=v_cache)
        or scaled(k_scale=k_scale, v_scale=v_scale)
        or wrong_rank((3,), k=k, v=v)
        or apart(k=k, v=v)
        or unwritable(k_cache, v_cache, slots)
    )


@ops.kv_write.kernel("aiter", layout="shuffled", refuses=refuse_kv_write)
def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
    if k.numel():
        reshape_and_cache(k, v, *shuffled_views(k_cache, v_cache), slots, "auto", asm_layout=True)
    return k.new_empty((0,))
