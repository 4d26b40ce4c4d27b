"""The writes of multi-head latent attention, as torch calls, on any device."""

from atomc import ops
from atomc.kernels.torch.eager import eager

mla_kv_write = eager(ops.mla_kv_write, __name__, layout="paged")
mla_rope_kv_write = eager(ops.mla_rope_kv_write, __name__, layout="paged")
bmm_rope_kv_write = eager(ops.bmm_rope_kv_write, __name__, layout="paged")
