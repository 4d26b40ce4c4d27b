"""Linear layers on x86 CPUs, by oneDNN and by PyTorch's own kernels for few bits, over weights in
layouts of their own.

Of kernels that serve, the one registered first is taken: for int8 one that keeps a copy of the
weight, then one that reads it as it lies, then one that makes it fp32.
"""

import torch

if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
    raise ImportError("this torch is built without oneDNN (MKLDNN)")

from atomc.kernels.onednn import (
    linear,
    linear_bf16,
    linear_mxfp4,
    linear_w4a16,
    scaled_linear_int8,
    scaled_linear_int8_as_it_lies,
    scaled_linear_int8_in_fp32,
)

__all__ = [
    "linear",
    "linear_bf16",
    "linear_mxfp4",
    "linear_w4a16",
    "scaled_linear_int8",
    "scaled_linear_int8_as_it_lies",
    "scaled_linear_int8_in_fp32",
]
