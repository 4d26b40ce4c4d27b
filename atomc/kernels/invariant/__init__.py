"""Kernels whose result for a row does not depend on what else is in the step: for
Options(batch_invariant=True).

Each cuts its work in the same way whatever the number of rows, and sums in a fixed order. Written
in Triton, on its GPUs, and as calls of torch on a CPU.
"""

import importlib.util

from atomc.kernels.invariant import on_cpu

__all__ = ["on_cpu"]

if importlib.util.find_spec("triton") is not None:
    from atomc.kernels.invariant import attention, linear

    __all__ += ["attention", "linear"]
