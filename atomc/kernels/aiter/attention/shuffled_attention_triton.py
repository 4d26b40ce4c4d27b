"""Attention over a shuffled cache by AITER's Triton kernels, prompts, chunks and single tokens
alike. Heads are a power of two wide.
"""

from typing import Unpack

from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.attention.unified_attention import Attended, attended, unattended_shuffled


@ops.paged_attention.kernel("aiter", layout="shuffled", refuses=unattended_shuffled)
def paged_attention(**arguments: Unpack[Attended]) -> Tensor:
    return attended(**arguments, shuffled=True)
