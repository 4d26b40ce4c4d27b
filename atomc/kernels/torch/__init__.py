"""Kernels of stock PyTorch: the references called eagerly, and attention through
scaled_dot_product_attention.

The first registered kernel that accepts the arguments is selected. A CPU therefore prefers the
paged layout to the contiguous one; a GPU prefers experts that need not wait for the host.
"""

MODULES = (
    "attention",
    "experts.experts_grouped_mm",
    "contiguous",
    "conv",
    "conv_delta_rule",
    "delta_rule",
    "kv_b_weight",
    "mla_attention",
    "scaled_linear_fp8",
    "ssm",
    "varlen_attention",
    "experts.expert_load",
    "experts.experts_quantized",
    "references",
)
