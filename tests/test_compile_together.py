"""Triton kernels compiled at once, before a step needs them."""

import pytest
import torch

from atomc import ops
from atomc.kernels import load
from atomc.kernels.triton.together import compile_together

assert load("triton") is None


def test_the_interpreter_has_nothing_to_compile_and_nothing_runs():
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    called = []
    assert not compile_together(lambda: called.append(1))
    assert not called


@pytest.mark.gpu
def test_kernels_are_compiled_and_do_not_run():
    x, weight = torch.randn(3, 777, device="cuda"), torch.rand(777, device="cuda")
    (kernel,) = (kernel.function for kernel in ops.rms_norm.kernels if kernel.provider == "triton")
    out = []
    assert compile_together(lambda: out.extend(kernel(x, weight, 1e-6) for _ in range(2)))
    expected = ops.rms_norm.reference(x, weight, 1e-6)
    assert not torch.equal(out[0], expected)
    torch.testing.assert_close(kernel(x, weight, 1e-6), expected)
