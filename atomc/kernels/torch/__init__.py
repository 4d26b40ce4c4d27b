"""Kernels of stock PyTorch: the references called eagerly, and attention through
scaled_dot_product_attention.

The first registered kernel that accepts the arguments is selected. A CPU therefore prefers the
paged layout to the contiguous one, and the writes for CPUs to those for any device; a GPU prefers
experts that need not wait for the host.
"""

from atomc.kernels.torch import kv_write  # isort: split

from atomc.kernels.torch import attention  # isort: split

from atomc.kernels.torch.experts import experts_grouped_mm  # isort: split

from atomc.kernels.torch import (
    activation,
    contiguous,
    conv,
    conv_delta_rule,
    delta_rule,
    indexer,
    kv_b_weight,
    linear,
    mla,
    mla_attention,
    norm,
    rope,
    scaled_linear_fp8,
    ssm,
    varlen_attention,
)
from atomc.kernels.torch.experts import (
    expert_load,
    experts,
    experts_all_to_all,
    experts_quantized,
    route,
)

# isort: split
from atomc.kernels.torch.experts import experts_by_reference

__all__ = [
    "activation",
    "attention",
    "contiguous",
    "conv",
    "conv_delta_rule",
    "delta_rule",
    "expert_load",
    "experts",
    "experts_all_to_all",
    "experts_by_reference",
    "experts_grouped_mm",
    "experts_quantized",
    "indexer",
    "kv_b_weight",
    "kv_write",
    "linear",
    "mla",
    "mla_attention",
    "norm",
    "rope",
    "route",
    "scaled_linear_fp8",
    "ssm",
    "varlen_attention",
]
