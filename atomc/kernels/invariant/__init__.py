"""Batch-invariant kernels: the result of a row does not depend on the other rows of the step. For
Options(batch_invariant=True).

Tiles and the order of sums are the same for any number of rows. Written in Triton for GPUs, and as
torch calls for CPUs.
"""

import importlib.util

from atomc.kernels.invariant import on_cpu

__all__ = ["on_cpu"]

if importlib.util.find_spec("triton") is not None:
    from atomc.kernels.invariant import attention, experts, linear, mla

    __all__ += ["attention", "experts", "linear", "mla"]
