"""Linear layers and embedding look-up, as torch calls."""

from atomc import ops
from atomc.kernels.torch.eager import eager

linear = eager(ops.linear, __name__)
linear_fp32 = eager(ops.linear_fp32, __name__)
embedding = eager(ops.embedding, __name__)
