"""Quantized linear layers by AMD's zentorch, on CPUs with AVX-512, VNNI and bf16."""

from atomc.kernels.zentorch import linear_w4a16  # isort: split

from atomc.kernels.zentorch import linear_w4a16_few_rows, scaled_linear_int8

__all__ = ["linear_w4a16", "linear_w4a16_few_rows", "scaled_linear_int8"]
