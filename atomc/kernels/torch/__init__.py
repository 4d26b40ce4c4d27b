"""Kernels of stock PyTorch: the references called eagerly, and attention through
scaled_dot_product_attention.

The first registered kernel that accepts the arguments is selected. A CPU therefore prefers the
paged layout to the contiguous one, and the writes for CPUs to those for any device.
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
