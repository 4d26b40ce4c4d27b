"""Experts with quantized weights on any device, as torch calls."""

from atomc import ops
from atomc.kernels.torch.eager import eager

moe_experts_fp8 = eager(ops.moe_experts_fp8, __name__, syncs=True)
moe_experts_int8 = eager(ops.moe_experts_int8, __name__, syncs=True)
moe_experts_w4a16 = eager(ops.moe_experts_w4a16, __name__, syncs=True)
moe_experts_mxfp4 = eager(ops.moe_experts_mxfp4, __name__, syncs=True)
