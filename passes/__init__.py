"""The pipeline: every change that a graph goes through, in order."""

from atomc.passes import cleanup
from atomc.passes.bind_state import bind_state
from atomc.passes.fuse.activation_quant import SILU_AND_MUL_QUANT
from atomc.passes.fuse.add_norm import ADD_LAYER_NORM, ADD_RMS_NORM
from atomc.passes.fuse.allreduce_norm import ALLREDUCE_ADD_RMS_NORM, ALLREDUCE_RMS_NORM
from atomc.passes.fuse.bmm_kv_write import BMM_ROPE_KV_WRITE
from atomc.passes.fuse.kv_write import QK_NORM_ROPE_KV_WRITE, ROPE_KV_WRITE
from atomc.passes.fuse.linear_split_cat import LINEAR_SPLIT_CAT
from atomc.passes.fuse.mla_kv_write import MLA_ROPE_KV_WRITE
from atomc.passes.fuse.norm_pad import ADD_RMS_NORM_PAD
from atomc.passes.fuse.norm_quant import ADD_RMS_NORM_QUANT, RMS_NORM_QUANT
from atomc.passes.fuse.qk_norm_rope import QK_NORM_ROPE
from atomc.passes.lift import lift
from atomc.passes.lower import lower
from atomc.passes.merge.linears import merge
from atomc.passes.recognize.all_reduce import ALL_REDUCE
from atomc.passes.recognize.cat_of_slices import cat_of_slices
from atomc.passes.recognize.gated import GELU_AND_MUL, SILU_AND_MUL
from atomc.passes.recognize.repeat_kv import REPEAT_KV
from atomc.passes.recognize.rms_norm import RMS_NORM
from atomc.passes.recognize.rope import ROPE, ROPE_PARTIAL
from atomc.passes.recognize.rope_before_transpose import ROPE_BEFORE_TRANSPOSE
from atomc.passes.reinplace import reinplace
from atomc.rewriting.graph_pass import Pass, rewriting

# On Dynamo's graph, where composite calls are still one node.
LIFT = Pass("lift", lift, by_site=True)

# On the functional ATen graph.
PIPELINE: tuple[Pass, ...] = (
    Pass("tidy", cleanup.tidy, cleanup=True),
    # recognize
    Pass("cat_of_slices", cat_of_slices, cleanup=True, after=("tidy",)),
    rewriting("rms_norm", RMS_NORM, after=["tidy"]),
    rewriting("silu_and_mul", SILU_AND_MUL, after=["tidy"]),
    rewriting("gelu_and_mul", GELU_AND_MUL, after=["tidy"]),
    rewriting("rope", ROPE, after=["tidy"]),
    rewriting("rope_partial", ROPE_PARTIAL, after=["rope"]),
    rewriting("repeat_kv", REPEAT_KV),
    rewriting("all_reduce", ALL_REDUCE),
    rewriting(
        "rope_before_transpose",
        ROPE_BEFORE_TRANSPOSE,
        after=["rms_norm", "rope_partial", "repeat_kv"],
        cleanup=True,
    ),
    Pass("tidy_transposes", cleanup.tidy, cleanup=True, after=("rope_before_transpose",)),
    # merge
    Pass("merge_qkv", merge("merge_qkv"), after=("tidy_transposes",), by_site=True),
    Pass(
        "merge_gate_up",
        merge("merge_gate_up"),
        after=("silu_and_mul", "gelu_and_mul"),
        by_site=True,
    ),
    Pass(
        "merge_linears", merge("merge_linears"), after=("merge_qkv", "merge_gate_up"), by_site=True
    ),
    # fuse
    rewriting("add_rms_norm", ADD_RMS_NORM, after=["rms_norm"]),
    rewriting("add_layer_norm", ADD_LAYER_NORM),
    rewriting("add_rms_norm_pad", ADD_RMS_NORM_PAD, after=["add_rms_norm"]),
    rewriting(
        "allreduce_add_rms_norm", ALLREDUCE_ADD_RMS_NORM, after=["add_rms_norm", "all_reduce"]
    ),
    rewriting("allreduce_rms_norm", ALLREDUCE_RMS_NORM, after=["allreduce_add_rms_norm"]),
    rewriting("add_rms_norm_quant", ADD_RMS_NORM_QUANT, after=["add_rms_norm", "merge_linears"]),
    rewriting("rms_norm_quant", RMS_NORM_QUANT, after=["add_rms_norm_quant"]),
    rewriting("silu_and_mul_quant", SILU_AND_MUL_QUANT, after=["silu_and_mul", "merge_linears"]),
    rewriting("qk_norm_rope", QK_NORM_ROPE, after=["rms_norm", "rope", "tidy_transposes"]),
    rewriting("linear_split_cat", LINEAR_SPLIT_CAT, after=["cat_of_slices", "merge_linears"]),
    rewriting("mla_rope_kv_write", MLA_ROPE_KV_WRITE, after=["rope", "tidy_transposes"]),
    rewriting("bmm_rope_kv_write", BMM_ROPE_KV_WRITE, after=["mla_rope_kv_write"]),
    # state, for the runtime
    Pass("bind_state", bind_state, paged=True, after=("qk_norm_rope",)),
    rewriting("qk_norm_rope_kv_write", QK_NORM_ROPE_KV_WRITE, paged=True, after=["bind_state"]),
    rewriting("rope_kv_write", ROPE_KV_WRITE, paged=True, after=["bind_state"]),
    Pass("reinplace", reinplace),
)

# Once per range of token counts.
LOWER = Pass("lower", lower)
