"""Ops run by stock PyTorch: the meanings called eagerly, and attention through scaled_dot_product_attention."""

from atomc.kernels.torch import activation, attention, contiguous, linear, norm, rope

__all__ = ["activation", "attention", "contiguous", "linear", "norm", "rope"]
