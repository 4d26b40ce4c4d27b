"""Ops run by Triton kernels, on NVIDIA and AMD GPUs."""

from atomc.kernels.triton import (
    activation,
    activation_quant,
    attention,
    few_queries,
    kv_write,
    linear,
    norm,
    norm_quant,
    quant,
    rope,
)

__all__ = [
    "activation",
    "activation_quant",
    "attention",
    "few_queries",
    "kv_write",
    "linear",
    "norm",
    "norm_quant",
    "quant",
    "rope",
]
