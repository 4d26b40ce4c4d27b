"""Norms, as torch calls, with every rounding of the reference, not guaranteed by Inductor."""

from atomc import ops
from atomc.kernels.torch.eager import eager

rms_norm = eager(ops.rms_norm, __name__)
add_rms_norm = eager(ops.add_rms_norm, __name__)
rms_norm_pair = eager(ops.rms_norm_pair, __name__)
rms_norm_gated = eager(ops.rms_norm_gated, __name__)
layer_norm = eager(ops.layer_norm, __name__)
add_layer_norm = eager(ops.add_layer_norm, __name__)
