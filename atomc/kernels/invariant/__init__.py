"""Batch-invariant kernels: the result of a row does not depend on the other rows of the step. For
Options(batch_invariant=True).

Tiles and the order of sums are the same for any number of rows. Written in Triton for GPUs, and as
torch calls for CPUs.
"""

import importlib.util

_IN_TRITON = ("attention", "experts", "linear", "mla")
MODULES = ("on_cpu", *(_IN_TRITON if importlib.util.find_spec("triton") is not None else ()))
