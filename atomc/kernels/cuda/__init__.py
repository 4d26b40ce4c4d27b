"""Kernels of NVIDIA's libraries, through torch: matrix products by cuBLAS, attention without state
by cuDNN.
"""

MODULES = ("attention", "linear", "scaled_linear")
