"""The write of new keys and values into a shuffled cache by AITER's HIP kernel."""

from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.attention.shuffled_cache import shuffled_views, unwritable
from atomc.kernels.aiter.library import Function, installed
from atomc.kernels.aiter.rows.kv_write import apart, scaled
from atomc.kernels.checks import first_refusal, named, unlike, wrong_rank
from atomc.ops.formats import HALVES

reshape_and_cache = Function("reshape_and_cache", "aiter", takes=["asm_layout"])


refuse_kv_write = first_refusal(
    installed(reshape_and_cache),
    named("k v k_cache v_cache", unlike, HALVES),
    named("k_scale v_scale", scaled),
    named("k", wrong_rank, (3,)),
    named("k v", apart),
    unwritable,
)


@ops.kv_write.kernel("aiter", layout="shuffled", refuses=refuse_kv_write)
def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
    if k.numel():
        reshape_and_cache(k, v, *shuffled_views(k_cache, v_cache), slots, "auto", asm_layout=True)
    return k.new_empty((0,))
