"""Ops run by stock PyTorch: the meanings called eagerly, and attention through scaled_dot_product_attention.

Of two kernels that serve, the one registered first is taken: those of the paged layout that are written for the CPU, then
those of the contiguous one, then the paged ones that run anywhere.
"""

from atomc.kernels.torch import paged  # isort: split

from atomc.kernels.torch import contiguous  # isort: split

from atomc.kernels.torch import activation, attention, linear, mla, norm, rope, scaled_linear_fp8

__all__ = ["activation", "attention", "contiguous", "linear", "mla", "norm", "paged", "rope", "scaled_linear_fp8"]
