"""Routers, as torch calls."""

from atomc import ops
from atomc.kernels.torch.eager import eager

topk_route = eager(ops.topk_route, __name__)
linear_topk_route = eager(ops.linear_topk_route, __name__)
