"""Quantize the result of a norm behind a sum over processes in the same op.

x > allreduce_rms_norm -+- quantizer -> codes, scales    x > allreduce_rms_norm_quant -+-> codes,
                        +-> sum                       =>                               |   scales
                                                                                       +-> sum

The same with a residual: allreduce_add_rms_norm > quantizer => allreduce_add_rms_norm_quant. A norm
with other readers is written, too.
"""

from atomc import ops
from atomc.passes.fuse.norm_quant import quantized_example, quantizing
from atomc.passes.fuse.quantizers import Quantizer
from atomc.rewriting.example import Example, norm_example, tensor_example


def _example(quantizer: Quantizer, keep: bool) -> Example:
    norm: Example = {**norm_example(width=64), "process_group": "a group"}
    return quantized_example(quantizer, keep, norm)


def _add_example(quantizer: Quantizer, keep: bool) -> Example:
    return {**_example(quantizer, keep), "residual": tensor_example(3, 64)}


ALLREDUCE_RMS_NORM_QUANT = quantizing(
    ops.allreduce_rms_norm,
    ops.allreduce_rms_norm_quant,
    _example,
    {"allreduce_rms_norm": {}},
)
ALLREDUCE_ADD_RMS_NORM_QUANT = quantizing(
    ops.allreduce_add_rms_norm,
    ops.allreduce_add_rms_norm_quant,
    _add_example,
    {"allreduce_add_rms_norm": {}},
)
