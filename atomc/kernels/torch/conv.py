"""Causal convolutions as torch calls, on any device."""

from atomc import ops
from atomc.kernels.torch.eager import eager

causal_conv1d = eager(ops.causal_conv1d, __name__)
causal_conv1d_update = eager(ops.causal_conv1d_update, __name__, syncs=True)
