"""The pipeline: all changes to a graph, in order.

A rewrite is named like its constant, in lower case. `after` names passes that must come earlier;
`paged` passes run for the runtime only; `cleanup` passes are left out of the report; `by_site`
passes can be turned off for single modules, as all rewrites can. A pass that is `off_by_default`
gained nothing on a GPU, or was not measured; the option passes={name: True} turns it on.
"""

from atomc.passes import (
    bind_state,
    canonicalize,
    cleanup,
    expert_load,
    index_queries,
    lift,
    lora,
    lower,
    reinplace,
    select_mla_form,
    unread_sums,
)
from atomc.passes.canonicalize import contiguous_sums
from atomc.passes.fuse import (
    activation_quant,
    add_norm,
    allreduce_add,
    allreduce_norm,
    allreduce_norm_quant,
    bmm_kv_write,
    conv_delta_rule,
    kv_write,
    linear_gated,
    linear_route,
    linear_split_cat,
    mla_kv_write,
    norm_add,
    norm_gated,
    norm_pad,
    norm_pair,
    norm_quant,
    qk_norm_rope,
    quantizers_before_dispatch,
    quantizers_before_views,
    static_cache,
    sums_behind_views,
    write_forms,
)
from atomc.passes.merge import counters, linears, shared_expert
from atomc.passes.recognize import (
    attention,
    cat_of_slices,
    collectives,
    columns_of_pairs,
    delta_gates,
    delta_rule,
    experts,
    gated,
    layer_norm,
    linear_fp32,
    lora_linear,
    mla,
    mla_quantized,
    repeat_kv,
    rms_norm,
    rope,
    rope_before_transpose,
    rotary_tables,
    route,
)
from atomc.passes.recognize.attention import proven_mask
from atomc.rewriting.graph_pass import Pass, rewriting

# Dynamo's graph, in which composite calls are still one node.
LIFT = Pass("lift", lift.lift, by_site=True, lifts=lift.LIFTED)

# These run once more per range of token counts, in which more is known of kernels.
BMM_AND_WRITE = rewriting(bmm_kv_write.BMM_ROPE_KV_WRITE, after=["mla_rope_kv_write"])
INDEX_QUERIES = Pass(
    "index_queries", index_queries.index_queries, after=["bind_state"], paged=True, by_site=True
)
LINEAR_GATED = Pass(
    "linear_gated",
    linear_gated.linear_gated,
    after=["merge_gate_up", "silu_and_mul_quant"],
    by_site=True,
)

# The functional ATen graph.
PIPELINE: tuple[Pass, ...] = (
    Pass("tidy", cleanup.tidy, cleanup=True),
    # Recognize: PyTorch code becomes ops.
    Pass("cat_of_slices", cat_of_slices.cat_of_slices, after=["tidy"], cleanup=True),
    Pass("canonicalize", canonicalize.canonicalize, after=["tidy"], cleanup=True),
    rewriting(layer_norm.LAYER_NORM, after=["canonicalize"]),
    Pass("columns_of_pairs", columns_of_pairs.columns_of_pairs, after=["tidy"], cleanup=True),
    rewriting(rms_norm.RMS_NORM, *rms_norm.OTHER_NORMS, after=["layer_norm"]),
    Pass(
        "contiguous_sums",
        contiguous_sums.contiguous_sums,
        after=["layer_norm", "rms_norm"],
        cleanup=True,
    ),
    rewriting(experts.MOE_EXPERTS, after=["canonicalize", "columns_of_pairs"]),
    rewriting(route.TOPK_ROUTE, after=["canonicalize"]),
    Pass("ids_as_chosen", experts.ids_as_chosen, after=["topk_route", "moe_experts"], cleanup=True),
    rewriting(norm_gated.RMS_NORM_GATED, after=["rms_norm"]),
    rewriting(gated.SILU_AND_MUL, *gated.OTHER_GATES, after=["moe_experts", "rms_norm_gated"]),
    rewriting(gated.GELU_AND_MUL, after=["canonicalize"]),
    rewriting(
        rope.ROPE,
        rope.ROPE_CAST,
        rope.ROPE_OTHER_SIGN,
        rope.ROPE_COMPLEX,
        after=["columns_of_pairs"],
    ),
    rewriting(rope.ROPE_IN_FP32, after=["rope"], cleanup=True),
    rewriting(rope.ROPE_PARTIAL, after=["rope_in_fp32"]),
    rewriting(
        lora_linear.LORA_LINEAR,
        lora_linear.LORA_LINEAR_UNSCALED,
        lora_linear.LORA_LINEAR_QUANTIZED,
        after=["canonicalize"],
    ),
    rewriting(repeat_kv.REPEAT_KV),
    rewriting(delta_gates.DELTA_GATES, after=["canonicalize"]),
    Pass("gated_delta_rule", delta_rule.delta_rule, after=["canonicalize"]),
    Pass("attention", attention.attention, after=["tidy"], by_site=True),
    Pass("proven_masks", proven_mask.proven_masks, after=["attention"], cleanup=True),
    rewriting(collectives.ALL_REDUCE),
    rewriting(collectives.ALL_GATHER, after=["tidy"]),
    Pass(
        "sums_behind_views", sums_behind_views.sums_behind_views, after=["all_reduce"], cleanup=True
    ),
    rewriting(allreduce_add.ALLREDUCE_ADD, after=["sums_behind_views"]),
    Pass(
        "total_behind_views",
        sums_behind_views.sums_behind_views,
        after=["allreduce_add"],
        cleanup=True,
    ),
    rewriting(
        *rope_before_transpose.ROPE_BEFORE_TRANSPOSE,
        after=["rms_norm", "rope_partial", "repeat_kv"],
        cleanup=True,
    ),
    rewriting(
        mla.MLA_ATTENTION,
        *mla.MASKED_MLA,
        mla_quantized.MLA_QUANTIZED,
        after=["cat_of_slices", "proven_masks", "rope_before_transpose"],
    ),
    rewriting(rope_before_transpose.TRANSPOSE_BEFORE_ROPE, after=["mla_attention"], cleanup=True),
    Pass("rotary_tables", rotary_tables.rotary_tables, after=["tidy"], by_site=True),
    Pass("tidy_transposes", cleanup.tidy, after=["rope_before_transpose"], cleanup=True),
    rewriting(linear_route.LINEAR_TOPK_ROUTE, after=["topk_route"], off_by_default=True),
    Pass("linear_fp32", linear_fp32.linear_fp32, after=["linear_topk_route"], by_site=True),
    # Merge: linear layers with one input become one.
    Pass(
        "shared_expert",
        shared_expert.shared_expert,
        after=["moe_experts", "topk_route", "silu_and_mul", "gelu_and_mul"],
        by_site=True,
        off_by_default=True,
    ),
    linears.merging("merge_qkv", after=["tidy_transposes"]),
    linears.merging("merge_gate_up", after=["silu_and_mul", "gelu_and_mul"]),
    linears.merging("merge_linears", after=["merge_qkv", "merge_gate_up"]),
    Pass("lora", lora.lora, after=["merge_linears"], paged=True),
    # Fuse: chains of ops become one op.
    rewriting(add_norm.ADD_RMS_NORM, after=["rms_norm"]),
    rewriting(add_norm.ADD_LAYER_NORM, after=["layer_norm"]),
    # Behind all that has a sigmoid of its own, or a sum that a norm follows.
    rewriting(gated.SIGMOID_AND_MUL, after=["shared_expert", "merge_linears", "add_rms_norm"]),
    rewriting(norm_pad.ADD_RMS_NORM_PAD, after=["add_rms_norm"]),
    rewriting(allreduce_norm.ALLREDUCE_ADD_RMS_NORM, after=["add_rms_norm", "all_reduce"]),
    rewriting(allreduce_norm.ALLREDUCE_RMS_NORM, after=["allreduce_add_rms_norm"]),
    Pass(
        "quantizers_before_views",
        quantizers_before_views.quantizers_before_views,
        after=["merge_linears"],
        cleanup=True,
    ),
    Pass(
        "quantizers_before_dispatch",
        quantizers_before_dispatch.quantizers_before_dispatch,
        after=["quantizers_before_views"],
    ),
    rewriting(
        allreduce_norm_quant.ALLREDUCE_ADD_RMS_NORM_QUANT,
        after=["allreduce_add_rms_norm", "quantizers_before_dispatch"],
    ),
    rewriting(
        allreduce_norm_quant.ALLREDUCE_RMS_NORM_QUANT,
        after=["allreduce_rms_norm", "quantizers_before_views"],
    ),
    rewriting(norm_quant.ADD_RMS_NORM_QUANT, after=["add_rms_norm", "quantizers_before_views"]),
    rewriting(norm_quant.RMS_NORM_QUANT, after=["add_rms_norm_quant"]),
    rewriting(activation_quant.SILU_AND_MUL_QUANT, after=["silu_and_mul", "merge_linears"]),
    rewriting(qk_norm_rope.QK_NORM_ROPE, after=["rms_norm", "rope", "tidy_transposes"]),
    Pass(
        "rms_norm_pair",
        norm_pair.norm_pair,
        after=["merge_linears", "rms_norm_quant", "qk_norm_rope"],
        by_site=True,
    ),
    # Behind all that fuses one of its norms with something else.
    Pass(
        "rms_norm_add",
        norm_add.norm_add,
        after=["allreduce_rms_norm", "rms_norm_quant", "rms_norm_pair"],
        by_site=True,
    ),
    # Bind state: attention reads and writes the runtime's caches.
    Pass("bind_state", bind_state.bind_state, after=["qk_norm_rope"], paged=True),
    Pass(
        "conv_gated_delta_rule",
        conv_delta_rule.conv_gated_delta_rule,
        after=["delta_gates", "bind_state"],
        paged=True,
        by_site=True,
    ),
    rewriting(linear_split_cat.LINEAR_SPLIT_CAT, after=["cat_of_slices", "merge_linears"]),
    rewriting(kv_write.QK_NORM_ROPE_KV_WRITE, after=["bind_state"], paged=True),
    rewriting(kv_write.ROPE_KV_WRITE, after=["bind_state"], paged=True),
    Pass(
        write_forms.NAME,
        write_forms.write_forms,
        after=["rotary_tables", "qk_norm_rope_kv_write", "rope_kv_write"],
        paged=True,
        cleanup=True,
    ),
    rewriting(mla_kv_write.MLA_ROPE_KV_WRITE, after=["rope", "tidy_transposes"]),
    BMM_AND_WRITE,
    INDEX_QUERIES,
    LINEAR_GATED,
    Pass("expert_load", expert_load.expert_load, after=["moe_experts", "bind_state"], paged=True),
    Pass(
        "unread_sums",
        unread_sums.unread_sums,
        after=["add_layer_norm", "add_rms_norm_pad", "rms_norm_add"],
        cleanup=True,
    ),
    Pass("reinplace", reinplace.reinplace),
    Pass("counters", counters.counters, after=["reinplace"], cleanup=True),
    Pass("static_cache", static_cache.static_cache, after=["counters"], by_site=True),
)

# Once per range of token counts: latent attention and the indexer get the form that kernels serve
# there, and ops become calls of kernels.
SELECT_MLA_FORM = Pass("select_mla_form", select_mla_form.select_mla_form, cleanup=True)
AFTER_MLA_FORM = (BMM_AND_WRITE,)
LOWER = Pass("lower", lower.lower)
