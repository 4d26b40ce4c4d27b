"""Our kernels over stand-ins for AITER's functions compute what their ops mean."""

import functools
import re
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import stand_ins
import torch
from aiter_cases import ARCHS, KERNELS, cases
from compare import compare
from kernel_cases.draw import Draw

from atomc.kernels.aiter import library
from atomc.ops.op import refusal
from atomc.platform import Platform

# Seconds each, and alike on both architectures but for the fp8 of a cache: per change they run as on
# the newer one only.
ALIKE = (
    "latent_attention_triton.mla_absorbed_attention",
    "paged_attention.paged_attention",
    "paged_attention_triton.paged_attention",
    "shuffled_attention_gluon.paged_attention",
    "shuffled_attention_triton.paged_attention",
)


def of_kernel(name: str, *more: str) -> Any:
    """Parameters of a test, of which one worker runs those of one kernel: what it found is kept."""
    marks = [pytest.mark.xdist_group(name)]
    if name in ALIKE and more == ("gfx942",):
        marks.append(pytest.mark.slow)
    return pytest.param(name, *more, marks=marks, id="-".join((name, *more)))


@functools.cache
def outcomes(name: str, arch: str) -> dict[str, str]:
    """Each case of the kernel's op, in both types of 16 bits -> "passed", or what happened
    instead.
    """
    kernel = KERNELS[name]
    here = replace(Platform.named(arch), here=True)
    found: dict[str, str] = {}
    with stand_ins.installed(arch) as called:
        for case, make in cases(kernel, arch).items():
            for dtype in (torch.bfloat16, torch.float16):

                def arguments(make: Any = make, dtype: torch.dtype = dtype) -> dict[str, Any]:
                    return make(Draw(dtype, layout=kernel.layout or "paged"))

                label = f"{case}, {dtype}"
                if refused := refusal(kernel, here, arguments()):
                    found[label] = f"refused: {refused.text}"
                    continue
                called.clear()
                try:
                    compare(kernel, arguments, dtype)
                    found[label] = "passed" if called else "passed without AITER"
                except Exception:
                    found[label] = f"failed: {traceback.format_exc(limit=-3)}"
    return found


@pytest.mark.parametrize(
    ("name", "arch"), [of_kernel(name, arch) for name in KERNELS for arch in ARCHS]
)
def test_a_kernel_computes_what_its_op_means(name: str, arch: str) -> None:
    failed = [f"{k}: {v}" for k, v in outcomes(name, arch).items() if v.startswith("failed")]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("name", [of_kernel(name) for name in KERNELS])
def test_a_kernel_calls_aiter_in_several_cases(name: str) -> None:
    archs = ARCHS[-1:] if name in ALIKE else ARCHS
    results = [result for arch in archs for result in outcomes(name, arch).values()]
    assert results.count("passed") >= 4, sorted(set(results))


def test_every_function_that_is_called_has_a_stand_in() -> None:
    assert {
        repr(function)
        for function in library.FUNCTIONS
        if not any((module, function.name) in stand_ins.STAND_INS for module in function.modules)
    } == set()


def test_stand_ins_share_no_code_with_atomc() -> None:
    files = [file for file in Path(*stand_ins.__path__).glob("*.py") if file.stem != "__init__"]
    assert files
    for file in files:
        assert not re.search(r"^\s*(import|from) atomc", file.read_text(), re.MULTILINE), file.name
