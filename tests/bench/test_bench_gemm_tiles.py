"""The tiles that bench/gemm.py --tiles times take the weights that it gives them: in strips where the
kernel prepares them, otherwise as they are stored.
"""

from typing import Any

import pytest
import torch
from bench_script import loaded
from kernel_cases.draw import Draw
from kernel_cases.scaled_linear import int4_operands, mxfp4_operands, nvfp4_operands

from atomc import kernels, ops

pytest.importorskip("triton")
assert kernels.load("triton") is None


@pytest.mark.parametrize(
    ("op", "given", "module"),
    [
        ("linear_w4a16", lambda draw: int4_operands(draw, 3, 160, out=48), "w4a16_mma"),
        ("linear_mxfp4", lambda draw: mxfp4_operands(draw, 3, 160, out=48), "w4a16_mma"),
        (
            "linear_mxfp4",
            lambda draw: mxfp4_operands(draw, 3, 160, out=48, activation="mxfp4"),
            "w4a16",
        ),
        ("linear_nvfp4", lambda draw: nvfp4_operands(draw, 3, 160, out=48), "w4a16"),
    ],
)
def test_a_tile_computes_the_layer(op: str, given: Any, module: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments = given(Draw(torch.bfloat16, device))
    [kernel] = [
        each
        for each in ops.REGISTRY[op].kernels
        if each.function.__module__ == f"atomc.kernels.triton.w4a16.{module}"
    ]
    wanted = ops.REGISTRY[op].reference(**arguments).float()
    named = {name: value for name, value in arguments.items() if name not in ("bias", "zeros")}
    named |= kernel.prepared(arguments)
    _, call = next(loaded("gemm_tiles").tiles(op, 3, 160, bool(kernel.prepare)))
    torch.testing.assert_close(call(**named).float(), wanted, atol=0.05, rtol=0.05)
