"""Gated activations, as calls of torch."""

from atomc import ops
from atomc.kernels.torch.eager import eager

silu_and_mul = eager(ops.silu_and_mul, __name__)
gelu_and_mul = eager(ops.gelu_and_mul, __name__)
sigmoid_and_mul = eager(ops.sigmoid_and_mul, __name__)
