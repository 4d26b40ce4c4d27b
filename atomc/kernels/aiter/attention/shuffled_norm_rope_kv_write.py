"""The norms of queries and keys, rotary positions and the write into a shuffled cache in one HIP
kernel of AITER's.
"""

from typing import Unpack

from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.attention.shuffled_cache import unwritable as unwritable_cache
from atomc.kernels.aiter.rows.norm_rope_kv_write import (
    TABLES,
    WriteOperands,
    unwritable,
    written,
)
from atomc.kernels.checks import first_refusal


@ops.qk_norm_rope_kv_write.kernel(
    "aiter",
    layout="shuffled",
    refuses=first_refusal(unwritable, unwritable_cache),
    rounds="once",
    shared=TABLES,
)
def qk_norm_rope_kv_write(
    shared: tuple[Tensor, Tensor], **call: Unpack[WriteOperands]
) -> tuple[Tensor, Tensor]:
    return written(*shared, shuffled=True, **call)
