"""The ops. Each is called like a function; `.reference` is its definition in PyTorch, and `.kernel`
registers an implementation.
"""

from atomc.ops.activation import gelu_and_mul, sigmoid_and_mul, silu_and_mul
from atomc.ops.activation_quant import silu_and_mul_quant
from atomc.ops.attention import attention, kv_write, paged_attention
from atomc.ops.collective import all_gather, all_reduce, allreduce_add_rms_norm, allreduce_rms_norm
from atomc.ops.collective_quant import allreduce_add_rms_norm_quant, allreduce_rms_norm_quant
from atomc.ops.conv import causal_conv1d, causal_conv1d_update, conv_state
from atomc.ops.conv_delta_rule import conv_gated_delta_rule_update
from atomc.ops.delta_gates import delta_gates
from atomc.ops.delta_rule import delta_state, gated_delta_rule, gated_delta_rule_update
from atomc.ops.dispatch import combine_tokens, dispatch_tokens
from atomc.ops.expert_load import count_experts
from atomc.ops.experts import moe_experts
from atomc.ops.indexer import chosen_mask, index_topk, index_write, indexer_state, paged_index_topk
from atomc.ops.kv_b_weight import kv_b_half, kv_b_weight
from atomc.ops.linear import embedding, linear, linear_fp32
from atomc.ops.linear_gated import linear_gated
from atomc.ops.lora import lora_linear
from atomc.ops.mla import (
    bmm_mxfp4,
    bmm_rope_kv_write,
    linear_by_head,
    linear_split_cat,
    mla_kv_write,
    mla_rope_kv_write,
    quantized_linear_by_head,
    scaled_bmm_fp8,
)
from atomc.ops.mla_attention import (
    latent_state,
    mla_absorbed_attention,
    mla_attention,
    mla_paged_attention,
    quantized_mla_paged_attention,
)
from atomc.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from atomc.ops.norm_add import rms_norm_add, rms_norm_add_rms_norm
from atomc.ops.norm_gated import rms_norm_gated
from atomc.ops.norm_pad import add_rms_norm_pad
from atomc.ops.norm_pair import rms_norm_pair, rms_norm_pair_quant
from atomc.ops.norm_quant import add_rms_norm_quant, rms_norm_quant
from atomc.ops.op import REGISTRY, Kernel, Op, Prepared, Refusal, Shared, op_of
from atomc.ops.quant import (
    quant_fp8_group,
    quant_fp8_per_token,
    quant_fp8_static,
    quant_int8_per_token,
    quant_mxfp4,
)
from atomc.ops.rope import qk_norm_rope, qk_norm_rope_kv_write, rope, rope_kv_write
from atomc.ops.rotary_tables import rotary_tables
from atomc.ops.route import linear_topk_route, topk_route
from atomc.ops.scaled_experts import (
    moe_experts_fp8,
    moe_experts_int8,
    moe_experts_mxfp4,
    moe_experts_w4a16,
)
from atomc.ops.scaled_linear import (
    linear_mxfp4,
    linear_nvfp4,
    linear_w4a16,
    scaled_linear_fp8,
    scaled_linear_fp8_block,
    scaled_linear_int8,
)
from atomc.ops.ssm import ssm_scan, ssm_scan_update, ssm_state
from atomc.ops.state import LAYOUTS, GroupStep, Layout, StateSpec, Step, kv_state, state_handle
from atomc.ops.varlen_attention import varlen_attention
from atomc.token_range import Tokens

__all__ = [
    "LAYOUTS",
    "REGISTRY",
    "GroupStep",
    "Kernel",
    "Layout",
    "Op",
    "Prepared",
    "Refusal",
    "Shared",
    "StateSpec",
    "Step",
    "Tokens",
    "add_layer_norm",
    "add_rms_norm",
    "add_rms_norm_pad",
    "add_rms_norm_quant",
    "all_gather",
    "all_reduce",
    "allreduce_add_rms_norm",
    "allreduce_add_rms_norm_quant",
    "allreduce_rms_norm",
    "allreduce_rms_norm_quant",
    "attention",
    "bmm_mxfp4",
    "bmm_rope_kv_write",
    "causal_conv1d",
    "causal_conv1d_update",
    "chosen_mask",
    "combine_tokens",
    "conv_gated_delta_rule_update",
    "conv_state",
    "count_experts",
    "delta_gates",
    "delta_state",
    "dispatch_tokens",
    "embedding",
    "gated_delta_rule",
    "gated_delta_rule_update",
    "gelu_and_mul",
    "index_topk",
    "index_write",
    "indexer_state",
    "kv_b_half",
    "kv_b_weight",
    "kv_state",
    "kv_write",
    "latent_state",
    "layer_norm",
    "linear",
    "linear_by_head",
    "linear_fp32",
    "linear_gated",
    "linear_mxfp4",
    "linear_nvfp4",
    "linear_split_cat",
    "linear_topk_route",
    "linear_w4a16",
    "lora_linear",
    "mla_absorbed_attention",
    "mla_attention",
    "mla_kv_write",
    "mla_paged_attention",
    "mla_rope_kv_write",
    "moe_experts",
    "moe_experts_fp8",
    "moe_experts_int8",
    "moe_experts_mxfp4",
    "moe_experts_w4a16",
    "op_of",
    "paged_attention",
    "paged_index_topk",
    "qk_norm_rope",
    "qk_norm_rope_kv_write",
    "quant_fp8_group",
    "quant_fp8_per_token",
    "quant_fp8_static",
    "quant_int8_per_token",
    "quant_mxfp4",
    "quantized_linear_by_head",
    "quantized_mla_paged_attention",
    "rms_norm",
    "rms_norm_add",
    "rms_norm_add_rms_norm",
    "rms_norm_gated",
    "rms_norm_pair",
    "rms_norm_pair_quant",
    "rms_norm_quant",
    "rope",
    "rope_kv_write",
    "rotary_tables",
    "scaled_bmm_fp8",
    "scaled_linear_fp8",
    "scaled_linear_fp8_block",
    "scaled_linear_int8",
    "sigmoid_and_mul",
    "silu_and_mul",
    "silu_and_mul_quant",
    "ssm_scan",
    "ssm_scan_update",
    "ssm_state",
    "state_handle",
    "topk_route",
    "varlen_attention",
]
