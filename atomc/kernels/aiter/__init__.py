"""Ops run by AITER, AMD's kernels for its GPUs: compiled ones first, those in Triton where these refuse."""

from atomc.kernels.aiter import (
    activation,
    activation_quant,
    norm,
    norm_quant,
    norm_quant_triton,
    norm_triton,
    quant,
    quant_triton,
)

__all__ = [
    "activation",
    "activation_quant",
    "norm",
    "norm_quant",
    "norm_quant_triton",
    "norm_triton",
    "quant",
    "quant_triton",
]
