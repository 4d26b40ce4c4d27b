"""The pipeline: all changes to a graph, in order.

A rewrite is named like its constant, in lower case. `after` names passes that must come earlier;
`paged` passes run for the runtime only; `cleanup` passes are left out of the report; `by_site`
passes can be turned off for single modules, as all rewrites can. A pass that is `off_by_default`
gained nothing on a GPU, or was not measured; the option passes={name: True} turns it on.
"""

from atomc.passes.bind_state import bind_state
from atomc.passes.canonicalize import canonicalize
from atomc.passes.cleanup import tidy
from atomc.passes.expert_load import expert_load
from atomc.passes.fuse.activation_quant import SILU_AND_MUL_QUANT
from atomc.passes.fuse.add_norm import ADD_LAYER_NORM, ADD_RMS_NORM
from atomc.passes.fuse.allreduce_add import ALLREDUCE_ADD
from atomc.passes.fuse.allreduce_norm import ALLREDUCE_ADD_RMS_NORM, ALLREDUCE_RMS_NORM
from atomc.passes.fuse.allreduce_norm_quant import (
    ALLREDUCE_ADD_RMS_NORM_QUANT,
    ALLREDUCE_RMS_NORM_QUANT,
)
from atomc.passes.fuse.bmm_kv_write import BMM_ROPE_KV_WRITE
from atomc.passes.fuse.conv_delta_rule import conv_gated_delta_rule
from atomc.passes.fuse.experts_ep import MOE_EXPERTS_EP
from atomc.passes.fuse.kv_write import QK_NORM_ROPE_KV_WRITE, ROPE_KV_WRITE
from atomc.passes.fuse.linear_route import LINEAR_TOPK_ROUTE
from atomc.passes.fuse.linear_split_cat import LINEAR_SPLIT_CAT
from atomc.passes.fuse.mla_kv_write import MLA_ROPE_KV_WRITE
from atomc.passes.fuse.norm_gated import RMS_NORM_GATED
from atomc.passes.fuse.norm_pad import ADD_RMS_NORM_PAD
from atomc.passes.fuse.norm_pair import norm_pair
from atomc.passes.fuse.norm_quant import ADD_RMS_NORM_QUANT, RMS_NORM_QUANT
from atomc.passes.fuse.qk_norm_rope import QK_NORM_ROPE
from atomc.passes.fuse.quantizers_before_views import quantizers_before_views
from atomc.passes.fuse.sums_behind_views import sums_behind_views
from atomc.passes.index_queries import index_queries
from atomc.passes.lift import LIFTED, lift
from atomc.passes.lora import lora
from atomc.passes.lower import lower
from atomc.passes.merge.linears import merging
from atomc.passes.merge.shared_expert import shared_expert
from atomc.passes.recognize.attention import attention
from atomc.passes.recognize.attention.proven_mask import proven_masks
from atomc.passes.recognize.cat_of_slices import cat_of_slices
from atomc.passes.recognize.collectives import ALL_GATHER, ALL_REDUCE
from atomc.passes.recognize.columns_of_pairs import columns_of_pairs
from atomc.passes.recognize.delta_gates import DELTA_GATES
from atomc.passes.recognize.delta_rule import delta_rule
from atomc.passes.recognize.experts import MOE_EXPERTS, ids_as_chosen
from atomc.passes.recognize.gated import GELU_AND_MUL, OTHER_GATES, SIGMOID_AND_MUL, SILU_AND_MUL
from atomc.passes.recognize.layer_norm import LAYER_NORM
from atomc.passes.recognize.linear_fp32 import linear_fp32
from atomc.passes.recognize.lora_linear import (
    LORA_LINEAR,
    LORA_LINEAR_QUANTIZED,
    LORA_LINEAR_UNSCALED,
)
from atomc.passes.recognize.mla import MASKED_MLA, MLA_ATTENTION
from atomc.passes.recognize.mla_quantized import MLA_QUANTIZED
from atomc.passes.recognize.repeat_kv import REPEAT_KV
from atomc.passes.recognize.rms_norm import OTHER_NORMS, RMS_NORM
from atomc.passes.recognize.rope import ROPE, ROPE_CAST, ROPE_COMPLEX, ROPE_OTHER_SIGN, ROPE_PARTIAL
from atomc.passes.recognize.rope_before_transpose import (
    ROPE_BEFORE_TRANSPOSE,
    TRANSPOSE_BEFORE_ROPE,
)
from atomc.passes.recognize.route import TOPK_ROUTE
from atomc.passes.reinplace import reinplace
from atomc.passes.select_mla_form import select_mla_form
from atomc.rewriting.graph_pass import Pass, rewriting

# Dynamo's graph, in which composite calls are still one node.
LIFT = Pass("lift", lift, by_site=True, lifts=LIFTED)

# These run once more per range of token counts.
BMM_AND_WRITE = rewriting(BMM_ROPE_KV_WRITE, after=["mla_rope_kv_write"])
INDEX_QUERIES = Pass("index_queries", index_queries, after=["bind_state"], paged=True, by_site=True)

# The functional ATen graph.
PIPELINE: tuple[Pass, ...] = (
    Pass("tidy", tidy, cleanup=True),
    # Recognize: PyTorch code becomes ops.
    Pass("cat_of_slices", cat_of_slices, after=["tidy"], cleanup=True),
    Pass("canonicalize", canonicalize, after=["tidy"], cleanup=True),
    rewriting(LAYER_NORM, after=["canonicalize"]),
    Pass("columns_of_pairs", columns_of_pairs, after=["tidy"], cleanup=True),
    rewriting(RMS_NORM, *OTHER_NORMS, after=["layer_norm"]),
    rewriting(MOE_EXPERTS, after=["canonicalize", "columns_of_pairs"]),
    rewriting(TOPK_ROUTE, after=["canonicalize"]),
    Pass("ids_as_chosen", ids_as_chosen, after=["topk_route", "moe_experts"], cleanup=True),
    rewriting(RMS_NORM_GATED, after=["rms_norm"]),
    rewriting(SILU_AND_MUL, *OTHER_GATES, after=["moe_experts", "rms_norm_gated"]),
    rewriting(GELU_AND_MUL, after=["canonicalize"]),
    rewriting(ROPE, ROPE_CAST, ROPE_OTHER_SIGN, ROPE_COMPLEX, after=["columns_of_pairs"]),
    rewriting(ROPE_PARTIAL, after=["rope"]),
    rewriting(LORA_LINEAR, LORA_LINEAR_UNSCALED, LORA_LINEAR_QUANTIZED, after=["canonicalize"]),
    rewriting(REPEAT_KV),
    rewriting(DELTA_GATES, after=["canonicalize"]),
    Pass("gated_delta_rule", delta_rule, after=["canonicalize"]),
    Pass("attention", attention, after=["tidy"], by_site=True),
    Pass("proven_masks", proven_masks, after=["attention"], cleanup=True),
    rewriting(ALL_REDUCE),
    rewriting(ALL_GATHER, after=["tidy"]),
    Pass("sums_behind_views", sums_behind_views, after=["all_reduce"], cleanup=True),
    rewriting(ALLREDUCE_ADD, after=["sums_behind_views"]),
    Pass("total_behind_views", sums_behind_views, after=["allreduce_add"], cleanup=True),
    rewriting(
        *ROPE_BEFORE_TRANSPOSE, after=["rms_norm", "rope_partial", "repeat_kv"], cleanup=True
    ),
    rewriting(
        MLA_ATTENTION,
        *MASKED_MLA,
        MLA_QUANTIZED,
        after=["cat_of_slices", "proven_masks", "rope_before_transpose"],
    ),
    rewriting(TRANSPOSE_BEFORE_ROPE, after=["mla_attention"], cleanup=True),
    Pass("tidy_transposes", tidy, after=["rope_before_transpose"], cleanup=True),
    rewriting(LINEAR_TOPK_ROUTE, after=["topk_route"], off_by_default=True),
    Pass("linear_fp32", linear_fp32, after=["linear_topk_route"], by_site=True),
    rewriting(MOE_EXPERTS_EP, after=["moe_experts"], off_by_default=True),
    # Merge: linear layers with one input become one.
    Pass(
        "shared_expert",
        shared_expert,
        after=["moe_experts", "topk_route", "silu_and_mul", "gelu_and_mul"],
        by_site=True,
        off_by_default=True,
    ),
    merging("merge_qkv", after=["tidy_transposes"]),
    merging("merge_gate_up", after=["silu_and_mul", "gelu_and_mul"]),
    merging("merge_linears", after=["merge_qkv", "merge_gate_up"]),
    Pass("lora", lora, after=["merge_linears"], paged=True),
    # Fuse: chains of ops become one op.
    rewriting(ADD_RMS_NORM, after=["rms_norm"]),
    rewriting(ADD_LAYER_NORM, after=["layer_norm"]),
    # Behind all that has a sigmoid of its own, or a sum that a norm follows.
    rewriting(SIGMOID_AND_MUL, after=["shared_expert", "merge_linears", "add_rms_norm"]),
    rewriting(ADD_RMS_NORM_PAD, after=["add_rms_norm"]),
    rewriting(ALLREDUCE_ADD_RMS_NORM, after=["add_rms_norm", "all_reduce"]),
    rewriting(ALLREDUCE_RMS_NORM, after=["allreduce_add_rms_norm"]),
    Pass("quantizers_before_views", quantizers_before_views, after=["merge_linears"], cleanup=True),
    rewriting(
        ALLREDUCE_ADD_RMS_NORM_QUANT, after=["allreduce_add_rms_norm", "quantizers_before_views"]
    ),
    rewriting(ALLREDUCE_RMS_NORM_QUANT, after=["allreduce_rms_norm", "quantizers_before_views"]),
    rewriting(ADD_RMS_NORM_QUANT, after=["add_rms_norm", "quantizers_before_views"]),
    rewriting(RMS_NORM_QUANT, after=["add_rms_norm_quant"]),
    rewriting(SILU_AND_MUL_QUANT, after=["silu_and_mul", "merge_linears"]),
    rewriting(QK_NORM_ROPE, after=["rms_norm", "rope", "tidy_transposes"]),
    Pass(
        "rms_norm_pair",
        norm_pair,
        after=["merge_linears", "rms_norm_quant", "qk_norm_rope"],
        by_site=True,
    ),
    # Bind state: attention reads and writes the runtime's caches.
    Pass("bind_state", bind_state, after=["qk_norm_rope"], paged=True),
    Pass(
        "conv_gated_delta_rule",
        conv_gated_delta_rule,
        after=["delta_gates", "bind_state"],
        paged=True,
        by_site=True,
    ),
    rewriting(LINEAR_SPLIT_CAT, after=["cat_of_slices", "merge_linears"]),
    rewriting(QK_NORM_ROPE_KV_WRITE, after=["bind_state"], paged=True),
    rewriting(ROPE_KV_WRITE, after=["bind_state"], paged=True),
    rewriting(MLA_ROPE_KV_WRITE, after=["rope", "tidy_transposes"]),
    BMM_AND_WRITE,
    INDEX_QUERIES,
    Pass("expert_load", expert_load, after=["moe_experts", "bind_state"], paged=True),
    Pass("reinplace", reinplace),
)

# Once per range of token counts: latent attention and the indexer get the form that kernels serve
# there, and ops become calls of kernels.
SELECT_MLA_FORM = Pass("select_mla_form", select_mla_form, cleanup=True)
AFTER_MLA_FORM = (BMM_AND_WRITE,)
LOWER = Pass("lower", lower)
