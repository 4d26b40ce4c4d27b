"""Linear layers on x86 CPUs, by oneDNN and by PyTorch's own kernels for few bits, over weights in layouts of their own.

Of two kernels that serve, the one registered first is taken: one that keeps a copy of the weight comes first.
"""

import torch

if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
    raise ImportError("this torch is built without oneDNN (MKLDNN)")

from atomc.kernels.onednn import scaled_linear_int8  # isort: split

from atomc.kernels.onednn import linear, linear_bf16, linear_mxfp4, linear_w4a16, scaled_linear_int8_as_it_lies

__all__ = ["linear", "linear_bf16", "linear_mxfp4", "linear_w4a16", "scaled_linear_int8", "scaled_linear_int8_as_it_lies"]
