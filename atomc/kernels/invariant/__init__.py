"""Kernels whose result for a row does not depend on what else is in the step: for Options(batch_invariant=True).

Each cuts its work in the same way whatever the number of rows, and sums in a fixed order. Written in Triton, on its GPUs.
"""

from atomc.kernels.invariant import attention, linear

__all__ = ["attention", "linear"]
