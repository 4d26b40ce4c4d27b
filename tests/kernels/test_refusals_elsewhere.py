"""Kernels of another machine refuse at once: all kernels of an op are asked, for each of its calls
in a model and each range of token counts.
"""

from typing import Any

import pytest
import torch
from kernel_cases import CASES
from kernel_cases.draw import Draw
from torch.utils._python_dispatch import TorchDispatchMode

from atomc import kernels, ops
from atomc.ops.op import Kernel, refusal
from atomc.platform import Platform

assert kernels.load("aiter") is None
ON_AMD = [
    kernel
    for op in ops.REGISTRY.values()
    for kernel in op.kernels
    if kernel.provider == "aiter" and kernel.op in CASES
]


class Untouched(TorchDispatchMode):
    """No op may run."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{function} ran")


@pytest.mark.parametrize("kernel", ON_AMD, ids=lambda k: f"{k.op}-{k.function.__module__[21:]}")
def test_a_kernel_for_amd_refuses_other_machines_before_it_touches_a_tensor(kernel: Kernel) -> None:
    for case in CASES[kernel.op].values():
        arguments = case(Draw(torch.bfloat16))
        with Untouched():
            found = refusal(kernel, Platform.named("sm90"), arguments)
        assert found is not None and found.code in ("hardware", "argument")
