"""Norms behind a sum over the GPUs of one host, for few tokens: sum, add and norm are one launch,
and a norm with a quantized result is a second one.
"""

from typing import Unpack

from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal
from atomc.kernels.triton.collective.allreduce import all_reduce, all_reduce_rms_norm
from atomc.kernels.triton.rows.norm import refuse_rms_norm
from atomc.kernels.triton.rows.norm_quant import quantized_norm, refuse_rms_norm_quant
from atomc.ops.norm_quant import QuantizedNorm
from atomc.ops.op import Refusal
from atomc.platform import Platform
from atomc.token_range import Tokens
from atomc.torch_compat import peer_memory
from atomc.torch_compat.process_groups import process_group as group_of

# The bytes of x up to which this is faster than NCCL and a norm, by the number of ranks: python
# bench/all_reduce.py. Two and four ranks: measured on H100s, where it is faster for all rows that
# fit. Three: as four; more: a guess, by the bytes that each receives.
CUT_OVER = {2: 2**22, 3: 2**21, 4: 2**21, 5: 2**19, 6: 2**19, 7: 2**19, 8: 2**19}
TOKENS = Tokens(1, peer_memory.rows_of(2))
NOTE = "one launch over peer memory"


def most_tokens(x: Tensor, process_group: str) -> int:
    """The most tokens that the kernels are for: a power of two, since a step of each is launched
    before the first request.
    """
    ranks = group_of(process_group).size()
    rows = int(CUT_OVER[ranks] // (x.shape[-1] * x.element_size()))
    return min(1 << (rows.bit_length() - 1), peer_memory.rows_of(ranks))


def refuse_all_reduce(platform: Platform, x: Tensor, process_group: str) -> Refusal | None:
    if not platform.is_cuda:
        return Refusal("hardware", "ranks write each other's memory on NVIDIA GPUs only")
    reason = dict(platform.peer_groups).get(process_group, "they did not ask for it")
    if reason:
        return Refusal("hardware", f"ranks have no memory of each other: {reason}")
    width = x.shape[-1] * x.element_size()
    if width > peer_memory.ROW_BYTES:
        return Refusal(
            "shape", f"rows of {width} bytes exceed the limit of {peer_memory.ROW_BYTES}"
        )
    return None


refuse_allreduce_rms_norm = first_refusal(refuse_rms_norm, refuse_all_reduce)
refuse_allreduce_rms_norm_quant = first_refusal(refuse_rms_norm_quant, refuse_all_reduce)


@ops.allreduce_rms_norm.kernel(
    "triton", refuses=refuse_allreduce_rms_norm, tokens=TOKENS, limit=most_tokens, note=NOTE
)
def allreduce_rms_norm(
    x: Tensor, weight: Tensor, eps: float, process_group: str, style: str
) -> tuple[Tensor, Tensor]:
    return all_reduce_rms_norm(x, None, weight, eps, peer_memory.of(process_group), style)


@ops.allreduce_add_rms_norm.kernel(
    "triton", refuses=refuse_allreduce_rms_norm, tokens=TOKENS, limit=most_tokens, note=NOTE
)
def allreduce_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, process_group: str, style: str
) -> tuple[Tensor, Tensor]:
    return all_reduce_rms_norm(x, residual, weight, eps, peer_memory.of(process_group), style)


@ops.allreduce_rms_norm_quant.kernel(
    "triton", refuses=refuse_allreduce_rms_norm_quant, tokens=TOKENS, limit=most_tokens, note=NOTE
)
def allreduce_rms_norm_quant(
    x: Tensor, process_group: str, **norm: Unpack[QuantizedNorm]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return quantized_norm(all_reduce(x, peer_memory.of(process_group)), None, **norm)


@ops.allreduce_add_rms_norm_quant.kernel(
    "triton", refuses=refuse_allreduce_rms_norm_quant, tokens=TOKENS, limit=most_tokens, note=NOTE
)
def allreduce_add_rms_norm_quant(
    x: Tensor, residual: Tensor, process_group: str, **norm: Unpack[QuantizedNorm]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return quantized_norm(all_reduce(x, peer_memory.of(process_group)), residual, **norm)
