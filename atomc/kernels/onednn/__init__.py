"""Ops run by oneDNN over weights in its own blocked layout, on x86 CPUs."""

import torch

if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
    raise ImportError("this torch is built without oneDNN (MKLDNN)")

from atomc.kernels.onednn import linear, linear_bf16

__all__ = ["linear", "linear_bf16"]
