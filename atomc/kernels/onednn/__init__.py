"""Linear layers on x86 CPUs, by oneDNN and by PyTorch's quantized kernels, most of them over
prepared weights.

The first registered kernel that accepts the arguments is selected. For int8 the order is: packed
weight, unpacked weight, weight converted to fp32.
"""

import torch

if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
    raise ImportError("this torch is built without oneDNN (MKLDNN)")

MODULES = (
    "linear",
    "linear_bf16",
    "linear_w4a16",
    "scaled_linear_int8",
    "scaled_linear_int8_unpacked",
    "dequantized",
)
