"""Our kernels over stand-ins for AITER's compiled functions compute what their ops mean."""

from dataclasses import replace
from typing import Any

import pytest
import stand_ins
import torch
from aiter_cases import ARCHS, COMPILED, KERNELS, cases
from compare import compare
from kernel_cases.draw import Draw

from atomc.kernels.aiter import library
from atomc.ops.op import refusal
from atomc.platform import Platform


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", COMPILED)
def test_a_kernel_computes_what_its_op_means(name: str, arch: str) -> None:
    kernel = KERNELS[name]
    here = replace(Platform.named(arch), here=True)
    refused = {}
    with stand_ins.installed(arch) as called:
        for case, make in cases(kernel, arch).items():
            for dtype in (torch.bfloat16, torch.float16):

                def arguments(make: Any = make, dtype: torch.dtype = dtype) -> dict[str, Any]:
                    return make(Draw(dtype, layout=kernel.layout or "paged"))

                if found := refusal(kernel, here, arguments()):
                    refused[case] = found.text
                    continue
                try:
                    compare(kernel, arguments, dtype)
                except Exception as error:
                    error.add_note(f"case {case!r} in {dtype}")
                    raise
    if not called:
        pytest.skip(f"{name} refuses all: {sorted(set(refused.values()))}")


def test_every_compiled_function_that_we_call_has_a_stand_in() -> None:
    compiled = {function for function in library.FUNCTIONS if not is_triton(function)}
    lacking = {
        repr(function)
        for function in compiled
        if not any((module, function.name) in stand_ins.STAND_INS for module in function.modules)
    }
    assert not lacking


def is_triton(function: library.Function) -> bool:
    return "triton" in function.modules[0]
