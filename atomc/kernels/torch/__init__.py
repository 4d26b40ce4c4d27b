"""Ops run by stock PyTorch: the meanings called eagerly, and attention through scaled_dot_product_attention.

Of two kernels that serve, the one registered first is taken: the contiguous layout comes before the paged one.
"""

from atomc.kernels.torch import contiguous  # isort: split

from atomc.kernels.torch import activation, attention, linear, mla, norm, rope, scaled_linear_fp8

__all__ = ["activation", "attention", "contiguous", "linear", "mla", "norm", "rope", "scaled_linear_fp8"]
