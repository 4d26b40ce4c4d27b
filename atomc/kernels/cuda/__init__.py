"""Kernels of NVIDIA's libraries, through torch: matrix products by cuBLAS, attention without state
by cuDNN.
"""

from atomc.kernels.cuda import attention, linear, scaled_linear

__all__ = ["attention", "linear", "scaled_linear"]
