"""Ops run by Triton kernels, on NVIDIA and AMD GPUs."""

from atomc.kernels.triton import experts_all_to_all
from atomc.kernels.triton.attention import attention, decode_dense, varlen_attention
from atomc.kernels.triton.collective import allreduce_norm, collective
from atomc.kernels.triton.experts import (
    experts_4_bits,
    experts_decode_4_bits,
    experts_decode_unquantized,
    experts_prefill,
    experts_prefill_packed,
    experts_prefill_scaled,
    route,
)
from atomc.kernels.triton.latent import (
    indexer,
    mla,
    mla_attention,
    mla_bmm,
    mla_chosen,
    mla_prompts,
)
from atomc.kernels.triton.linear import (
    linear,
    linear_split_cat,
    lora,
    scaled_linear,
    scaled_linear_by_row,
    scaled_linear_tiles,
)
from atomc.kernels.triton.recurrent import conv, conv_delta_rule, delta_gates, delta_rule, ssm
from atomc.kernels.triton.rows import (
    activation,
    activation_quant,
    kv_write,
    norm,
    norm_gated,
    norm_pair,
    norm_quant,
    quant,
    rope,
    rope_kv_write,
    sigmoid_gate,
)
from atomc.kernels.triton.w4a16 import dequantized, w4a16, w4a16_mma

__all__ = [
    "activation",
    "activation_quant",
    "allreduce_norm",
    "attention",
    "collective",
    "conv",
    "conv_delta_rule",
    "decode_dense",
    "delta_gates",
    "delta_rule",
    "dequantized",
    "experts_4_bits",
    "experts_all_to_all",
    "experts_decode_4_bits",
    "experts_decode_unquantized",
    "experts_prefill",
    "experts_prefill_packed",
    "experts_prefill_scaled",
    "indexer",
    "kv_write",
    "linear",
    "linear_split_cat",
    "lora",
    "mla",
    "mla_attention",
    "mla_bmm",
    "mla_chosen",
    "mla_prompts",
    "norm",
    "norm_gated",
    "norm_pair",
    "norm_quant",
    "quant",
    "rope",
    "rope_kv_write",
    "route",
    "scaled_linear",
    "scaled_linear_by_row",
    "scaled_linear_tiles",
    "sigmoid_gate",
    "ssm",
    "varlen_attention",
    "w4a16",
    "w4a16_mma",
]
