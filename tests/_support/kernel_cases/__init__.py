"""Arguments to try each op with: one table for the references and for every kernel.

A case is a function from `Draw` to the op's arguments; it makes the same numbers each time it is
called.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atomc.testing.examples import EXAMPLES
from atomc.testing.random_inputs import Argument, Arguments, RandomInputs
from kernel_cases.attention import ATTENTION, PAGED_ATTENTION, VARLEN_ATTENTION
from kernel_cases.conv import CAUSAL_CONV1D, CAUSAL_CONV1D_UPDATE
from kernel_cases.conv_delta_rule import CONV_GATED_DELTA_RULE_UPDATE, DELTA_GATES
from kernel_cases.delta_rule import GATED_DELTA_RULE, GATED_DELTA_RULE_UPDATE
from kernel_cases.draw import FNUZ, Cases, Draw
from kernel_cases.experts import (
    COMBINE_TOKENS,
    COUNT_EXPERTS,
    DISPATCH_TOKENS,
    LINEAR_TOPK_ROUTE,
    MOE_EXPERTS,
    MOE_EXPERTS_FP8,
    MOE_EXPERTS_INT8,
    MOE_EXPERTS_MXFP4,
    MOE_EXPERTS_W4A16,
    TOPK_ROUTE,
)
from kernel_cases.indexer import CHOSEN_MASK, INDEX_TOPK, INDEX_WRITE, PAGED_INDEX_TOPK
from kernel_cases.linear import EMBEDDING, LINEAR, LINEAR_FP32, LINEAR_GATED
from kernel_cases.lora import LORA_LINEAR
from kernel_cases.mla import (
    BMM_MXFP4,
    BMM_ROPE_KV_WRITE,
    KV_B_HALF,
    KV_B_WEIGHT,
    LINEAR_BY_HEAD,
    LINEAR_SPLIT_CAT,
    MLA_ABSORBED_ATTENTION,
    MLA_ATTENTION,
    MLA_KV_WRITE,
    MLA_PAGED_ATTENTION,
    MLA_ROPE_KV_WRITE,
    QUANTIZED_LINEAR_BY_HEAD,
    QUANTIZED_MLA_PAGED_ATTENTION,
    SCALED_BMM_FP8,
)
from kernel_cases.quant import (
    QUANT_FP8_STATIC,
    norm_pair_cases,
    norm_pair_quant_cases,
    norm_quant_cases,
    quant_cases,
    quant_fp8_group_cases,
    quant_mxfp4_cases,
    quantizing_cases,
    reducing_norm_quant_cases,
)
from kernel_cases.rope import QK_NORM_ROPE, ROTARY_TABLES, rope_cases
from kernel_cases.rows import (
    ROWS,
    gated,
    gated_norm_cases,
    layer_norm_cases,
    left_out_sums,
    normed_sum_cases,
    padding_cases,
    reducing,
    reducing_norm_cases,
    rms_norm_cases,
    row_inputs,
    sigmoid_gated,
)
from kernel_cases.scaled_linear import (
    LINEAR_MXFP4,
    LINEAR_NVFP4,
    LINEAR_W4A16,
    SCALED_LINEAR_FP8,
    SCALED_LINEAR_FP8_BLOCK,
    SCALED_LINEAR_INT8,
)
from kernel_cases.ssm import SSM_SCAN, SSM_SCAN_UPDATE
from kernel_cases.state import KV_WRITE, QK_NORM_ROPE_KV_WRITE, ROPE_KV_WRITE

CASES: dict[str, Cases] = {
    "silu_and_mul": {kind: partial(gated, kind=kind) for kind in ROWS},
    "gelu_and_mul": {kind: partial(gated, kind=kind) for kind in ROWS}
    | {"tanh": partial(gated, kind="packed", approximate="tanh")},
    "sigmoid_and_mul": {
        f"{kind}{', one gate' * one_gate}{', added' * added}": partial(
            sigmoid_gated, kind=kind, one_gate=one_gate, added=added
        )
        for kind in ROWS
        for one_gate, added in ((False, False), (True, False), (True, True))
    }
    | {
        f"gates in another order, one gate {one_gate}": partial(
            sigmoid_gated, kind="transposed", one_gate=one_gate, added=False, alike=False
        )
        for one_gate in (False, True)
    },
    "rms_norm": rms_norm_cases(residual=False),
    "add_rms_norm": left_out_sums(rms_norm_cases(residual=True)),
    "rms_norm_add": rms_norm_cases(residual=True),
    "rms_norm_add_rms_norm": normed_sum_cases(),
    "layer_norm": layer_norm_cases(residual=False),
    "add_layer_norm": left_out_sums(layer_norm_cases(residual=True)),
    "linear": LINEAR,
    "linear_gated": LINEAR_GATED,
    "linear_fp32": LINEAR_FP32,
    "add_rms_norm_pad": padding_cases(),
    "all_reduce": {
        kind: reducing(lambda draw, kind=kind: {"x": row_inputs(draw, kind)[0]}) for kind in ROWS
    },
    "all_gather": {
        kind: reducing(lambda draw, kind=kind: {"x": row_inputs(draw, kind)[0], "ranks": 1})
        for kind in ROWS
    },
    "allreduce_rms_norm": reducing_norm_cases(residual=False),
    "allreduce_add_rms_norm": reducing_norm_cases(residual=True),
    "allreduce_rms_norm_quant": reducing_norm_quant_cases(residual=False),
    "allreduce_add_rms_norm_quant": reducing_norm_quant_cases(residual=True),
    "rms_norm_quant": norm_quant_cases(residual=False),
    "add_rms_norm_quant": norm_quant_cases(residual=True),
    "rms_norm_gated": gated_norm_cases(),
    "rms_norm_pair": norm_pair_cases(),
    "rms_norm_pair_quant": norm_pair_quant_cases(),
    "silu_and_mul_quant": quantizing_cases(gated),
    "quant_fp8_static": QUANT_FP8_STATIC,
    "quant_fp8_per_token": quant_cases((*ROWS, "many"), 128)
    | {"fnuz": lambda draw: {"x": draw.normal(5, 128), **FNUZ}},
    "quant_fp8_group": quant_fp8_group_cases(),
    "quant_int8_per_token": quant_cases((*ROWS, "many"), 128),
    "quant_mxfp4": quant_mxfp4_cases(),
    "scaled_linear_fp8": SCALED_LINEAR_FP8,
    "scaled_linear_fp8_block": SCALED_LINEAR_FP8_BLOCK,
    "scaled_linear_int8": SCALED_LINEAR_INT8,
    "linear_w4a16": LINEAR_W4A16,
    "linear_mxfp4": LINEAR_MXFP4,
    "linear_nvfp4": LINEAR_NVFP4,
    "embedding": EMBEDDING,
    "lora_linear": LORA_LINEAR,
    "count_experts": COUNT_EXPERTS,
    "topk_route": TOPK_ROUTE,
    "linear_topk_route": LINEAR_TOPK_ROUTE,
    "moe_experts": MOE_EXPERTS,
    "dispatch_tokens": DISPATCH_TOKENS,
    "combine_tokens": COMBINE_TOKENS,
    "moe_experts_fp8": MOE_EXPERTS_FP8,
    "moe_experts_int8": MOE_EXPERTS_INT8,
    "moe_experts_w4a16": MOE_EXPERTS_W4A16,
    "moe_experts_mxfp4": MOE_EXPERTS_MXFP4,
    "rotary_tables": ROTARY_TABLES,
    "rope": rope_cases(),
    "qk_norm_rope": QK_NORM_ROPE,
    "attention": ATTENTION,
    "kv_write": KV_WRITE,
    "rope_kv_write": ROPE_KV_WRITE,
    "qk_norm_rope_kv_write": QK_NORM_ROPE_KV_WRITE,
    "paged_attention": PAGED_ATTENTION,
    "varlen_attention": VARLEN_ATTENTION,
    "mla_absorbed_attention": MLA_ABSORBED_ATTENTION,
    "kv_b_weight": KV_B_WEIGHT,
    "kv_b_half": KV_B_HALF,
    "linear_by_head": LINEAR_BY_HEAD,
    "mla_attention": MLA_ATTENTION,
    "chosen_mask": CHOSEN_MASK,
    "index_topk": INDEX_TOPK,
    "index_write": INDEX_WRITE,
    "paged_index_topk": PAGED_INDEX_TOPK,
    "ssm_scan": SSM_SCAN,
    "ssm_scan_update": SSM_SCAN_UPDATE,
    "mla_paged_attention": MLA_PAGED_ATTENTION,
    "mla_kv_write": MLA_KV_WRITE,
    "mla_rope_kv_write": MLA_ROPE_KV_WRITE,
    "quantized_linear_by_head": QUANTIZED_LINEAR_BY_HEAD,
    "quantized_mla_paged_attention": QUANTIZED_MLA_PAGED_ATTENTION,
    "scaled_bmm_fp8": SCALED_BMM_FP8,
    "bmm_mxfp4": BMM_MXFP4,
    "bmm_rope_kv_write": BMM_ROPE_KV_WRITE,
    "linear_split_cat": LINEAR_SPLIT_CAT,
    "causal_conv1d": CAUSAL_CONV1D,
    "causal_conv1d_update": CAUSAL_CONV1D_UPDATE,
    "delta_gates": DELTA_GATES,
    "conv_gated_delta_rule_update": CONV_GATED_DELTA_RULE_UPDATE,
    "gated_delta_rule": GATED_DELTA_RULE,
    "gated_delta_rule_update": GATED_DELTA_RULE_UPDATE,
}


def strided(argument: Argument) -> Argument:
    """A matrix of floats cut from wider rows; another argument as it is."""
    if not isinstance(argument, Tensor) or argument.dim() < 2 or argument.element_size() == 1:
        return argument
    return torch.nn.functional.pad(argument, (0, argument.shape[-1]))[..., : argument.shape[-1]]


def example(make: Callable[[RandomInputs], Arguments], draw: Draw, cut: bool) -> dict[str, Any]:
    arguments = make(RandomInputs(draw.dtype, draw.device, rows=5, layout=draw.layout))
    return {name: strided(value) if cut else value for name, value in arguments.items()}


# Of an op without cases: the examples of the self-test, with contiguous and with strided rows.
for op, examples in EXAMPLES.items():
    if op.name not in CASES:
        CASES[op.name] = {
            f"{name or 'example'}{', strided' * cut}": partial(example, make, cut=cut)
            for name, make in examples.items()
            for cut in (False, True)
        }
