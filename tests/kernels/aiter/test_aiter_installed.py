"""A kernel over AITER refuses where a function that it calls is missing, or is an older one."""

import inspect
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import stand_ins
import torch
from aiter_cases import KERNELS, cases
from kernel_cases.draw import Draw

from atomc.kernels.aiter.attention import shuffled_rope_kv_write, unified_attention
from atomc.kernels.aiter.library import Function
from atomc.ops.op import REGISTRY, Kernel, refusal
from atomc.platform import Platform

HERE = replace(Platform.named("gfx950"), here=True)
# Functions by which versions are known, of kernels that call the same function of any version.
VERSIONS = {
    "paged_attention_triton.paged_attention": [unified_attention.unscaled_attention],
    "shuffled_attention_triton.paged_attention": [unified_attention.shuffled_attention],
    "shuffled_rope_kv_write.rope_kv_write": [shuffled_rope_kv_write.writes_values_in_pieces],
}


# Code that kernels share names them, and calls them for others; behind a sum, MXFP4 that is rounded up
# has no case: its codes are those of a norm that is rounded first.
NOT_CALLED = {
    ("experts_mxfp4_triton.moe_experts_mxfp4", "fused_moe"),
    ("norm_quant.rms_norm_quant", "add_rmsnorm_quant"),
    ("norm_quant.add_rms_norm_quant", "rmsnorm_quant"),
    ("collective_quant_unfused.allreduce_add_rms_norm_quant", "dynamic_per_group_scaled_quant_fp4"),
}


def called(value: Any, seen: set[int]) -> Iterator[Function]:
    """The functions of AITER that code of atomc's kernels names, and the code that it calls."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Function):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from called(item, seen)
    elif isinstance(value, type) and value.__module__.startswith("atomc.kernels.aiter"):
        for item in vars(value).values():
            yield from called(item, seen)
    elif isinstance(value, types.FunctionType):
        function = inspect.unwrap(value)
        if function.__module__.startswith("atomc.kernels.aiter"):
            names = set(code_names(function.__code__))
            for name in sorted(names & function.__globals__.keys()):
                item = function.__globals__[name]
                if isinstance(item, types.ModuleType):
                    for attribute in sorted(names & vars(item).keys()):
                        yield from called(vars(item)[attribute], seen)
                else:
                    yield from called(item, seen)


def code_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_names(constant)


def kernel_functions() -> Iterator[Any]:
    by_place = {
        f"{kernel.function.__module__.rpartition('.')[2]}.{kernel.op}": kernel
        for op in REGISTRY.values()
        for kernel in op.kernels
        if kernel.provider == "aiter"
    }
    for name in KERNELS:
        kernel: Kernel = by_place[name]
        functions = [*called(kernel.function, set()), *VERSIONS.get(name, [])]
        if kernel.shared is not None:
            functions += called(kernel.shared.function, set())
        for function in dict.fromkeys(functions):
            if (name, function.name) not in NOT_CALLED:
                yield pytest.param(name, function, id=f"{name}-{function}")


@pytest.mark.parametrize(("name", "function"), list(kernel_functions()))
def test_a_call_of_a_missing_function_is_refused(name: str, function: Function) -> None:
    kernel = KERNELS[name]
    with stand_ins.installed("gfx950"):
        taken = [
            arguments
            for make in cases(kernel, "gfx950").values()
            for arguments in [make(Draw(torch.bfloat16, layout=kernel.layout or "paged"))]
            if refusal(kernel, HERE, arguments) is None
        ]
        function.found = "it is missing"
        refused = [refusal(kernel, HERE, arguments) for arguments in taken]
    assert "it is missing" in {reason.text for reason in refused if reason}
