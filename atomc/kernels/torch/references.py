"""Ops for which a few torch calls are fast enough: their references, with every rounding, which
Inductor does not guarantee.
"""

from atomc import ops
from atomc.kernels.torch.eager import eager
from atomc.kernels.torch.sequence import refuse_scaled_cache

PAGED = {"paged": None}
PAGED_OR_CONTIGUOUS = {"paged": None, "contiguous": refuse_scaled_cache}

silu_and_mul = eager(ops.silu_and_mul, __name__)
gelu_and_mul = eager(ops.gelu_and_mul, __name__)
sigmoid_and_mul = eager(ops.sigmoid_and_mul, __name__)

linear = eager(ops.linear, __name__)
linear_fp32 = eager(ops.linear_fp32, __name__)
embedding = eager(ops.embedding, __name__)

rms_norm = eager(ops.rms_norm, __name__)
add_rms_norm = eager(ops.add_rms_norm, __name__)
rms_norm_pair = eager(ops.rms_norm_pair, __name__)
rms_norm_gated = eager(ops.rms_norm_gated, __name__)
layer_norm = eager(ops.layer_norm, __name__)
add_layer_norm = eager(ops.add_layer_norm, __name__)

rope = eager(ops.rope, __name__)
qk_norm_rope = eager(ops.qk_norm_rope, __name__)
kv_write = eager(ops.kv_write, __name__, PAGED_OR_CONTIGUOUS)
rope_kv_write = eager(ops.rope_kv_write, __name__, PAGED_OR_CONTIGUOUS)
qk_norm_rope_kv_write = eager(ops.qk_norm_rope_kv_write, __name__, PAGED_OR_CONTIGUOUS)

mla_kv_write = eager(ops.mla_kv_write, __name__, PAGED)
mla_rope_kv_write = eager(ops.mla_rope_kv_write, __name__, PAGED)
bmm_rope_kv_write = eager(ops.bmm_rope_kv_write, __name__, PAGED)

index_topk = eager(ops.index_topk, __name__)
chosen_mask = eager(ops.chosen_mask, __name__)
index_write = eager(ops.index_write, __name__, PAGED)
paged_index_topk = eager(ops.paged_index_topk, __name__, PAGED)

topk_route = eager(ops.topk_route, __name__)
linear_topk_route = eager(ops.linear_topk_route, __name__)
# Zen 4, one thread, bf16, E 128, k 8, H 1024, I 384: 1 token 4.0 ms, 64 tokens 71; by
# torch.nn.functional.grouped_mm, which loops as well, 5.3 and 83; by torch.bmm of gathered weights
# 17.5 and more.
moe_experts = eager(ops.moe_experts, __name__, syncs=True)
moe_experts_fp8 = eager(ops.moe_experts_fp8, __name__, syncs=True)
moe_experts_int8 = eager(ops.moe_experts_int8, __name__, syncs=True)
moe_experts_w4a16 = eager(ops.moe_experts_w4a16, __name__, syncs=True)
moe_experts_mxfp4 = eager(ops.moe_experts_mxfp4, __name__, syncs=True)
