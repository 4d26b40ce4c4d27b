"""The gated delta rule as torch calls, on any device."""

from atomc import ops
from atomc.kernels.torch.eager import eager

gated_delta_rule = eager(ops.gated_delta_rule, __name__, syncs=True)
gated_delta_rule_update = eager(ops.gated_delta_rule_update, __name__, syncs=True)
