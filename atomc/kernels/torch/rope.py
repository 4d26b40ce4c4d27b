"""Rotary positions, as torch calls; with the write into a paged cache on any device."""

from atomc import ops
from atomc.kernels.torch.eager import eager

rope = eager(ops.rope, __name__)
qk_norm_rope = eager(ops.qk_norm_rope, __name__)
rope_kv_write = eager(ops.rope_kv_write, __name__, layout="paged")
qk_norm_rope_kv_write = eager(ops.qk_norm_rope_kv_write, __name__, layout="paged")
