"""Attention over a paged cache by AITER's Triton kernels, prompts, chunks and single tokens
alike.
"""

from typing import Unpack

from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.attention.unified_attention import Attended, attended, unattended


@ops.paged_attention.kernel("aiter", layout="paged", refuses=unattended)
def paged_attention(**arguments: Unpack[Attended]) -> Tensor:
    return attended(**arguments)
