"""Quantized linear layers by AMD's zentorch, on CPUs with AVX-512, VNNI and bf16."""

# Of the kernels that take a call, the first is chosen: those of the first module here.
MODULES = ("linear_w4a16", "linear_w4a16_few_rows", "scaled_linear_int8")
