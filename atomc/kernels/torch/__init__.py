"""Ops run by stock PyTorch: the meanings called eagerly, and attention through
scaled_dot_product_attention.

Of two kernels that serve, the one registered first is taken: a CPU reads state in pages rather than
in the contiguous layout, and writes it by kernels of its own rather than by those that run
anywhere.
"""

from atomc.kernels.torch import kv_write  # isort: split

from atomc.kernels.torch import attention  # isort: split

from atomc.kernels.torch import activation, contiguous, linear, mla, norm, rope, scaled_linear_fp8

__all__ = [
    "activation",
    "attention",
    "contiguous",
    "kv_write",
    "linear",
    "mla",
    "norm",
    "rope",
    "scaled_linear_fp8",
]
