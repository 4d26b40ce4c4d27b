"""Ops run by Triton kernels, on NVIDIA and AMD GPUs."""

from atomc.kernels.triton import (
    activation,
    activation_quant,
    attention,
    decode_dense,
    dequantized,
    kv_write,
    linear,
    linear_split_cat,
    mla,
    norm,
    norm_quant,
    quant,
    rope,
    scaled_linear,
    scaled_linear_tiles,
    w4a16,
)

__all__ = [
    "activation",
    "activation_quant",
    "attention",
    "decode_dense",
    "dequantized",
    "kv_write",
    "linear",
    "linear_split_cat",
    "mla",
    "norm",
    "norm_quant",
    "quant",
    "rope",
    "scaled_linear",
    "scaled_linear_tiles",
    "w4a16",
]
