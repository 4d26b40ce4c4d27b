"""A kernel that a user registered in a file of theirs, whose source can change between two
starts.
"""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from atomc.ops.op import REGISTRY

SOURCE = """
import torch
import atomc

@atomc.register_kernel("rms_norm", "mine")
def rms_norm(x, weight, eps, style="after"):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps) * {factor}
"""


@contextlib.contextmanager
def registered(folder: Path, factor: float) -> Iterator[None]:
    """Within the block, RMSNorm is `factor` times what it should be."""
    path = folder / "kernel_of_mine.py"
    path.write_text(SOURCE.format(factor=factor))
    spec = importlib.util.spec_from_file_location("kernel_of_mine", path)
    assert spec and spec.loader
    sys.modules["kernel_of_mine"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        yield
    finally:
        registered_kernels = REGISTRY["rms_norm"].kernels
        registered_kernels[:] = [x for x in registered_kernels if x.provider != "mine"]
        del sys.modules["kernel_of_mine"]
