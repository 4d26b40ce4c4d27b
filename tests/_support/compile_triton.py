"""Compile the Triton kernels that cases call, for a GPU that need not be here: python
compile_triton.py sm90 op/case ...

Triton's interpreter takes what its compiler does not, such as a name with two types in two
branches. Prints a line for each kernel: its name, and "compiled" or the compiler's error.
"""

import argparse
import os
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from kernel_cases import CASES
from kernel_cases.draw import Draw
from kernel_cases.prepared import with_prepared
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from atomc import kernels, ops
from atomc.kernels.triton.attention import attention_tiles
from atomc.kernels.triton.w4a16 import w4a16_mma_pair
from atomc.ops.op import refusal
from atomc.platform import Platform

# An op may have kernels for several cases: those are compiled that take this one here.
TAKING = Platform.named("sm90")
TARGETS = {"sm90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}
SHARED_BYTES = {90: 227 * 2**10, "gfx942": 64 * 2**10}
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
}
OPTIONS = ("num_warps", "num_stages")


def compiling(target: GPUTarget) -> Any:
    """What stands in for the launch of a kernel: it is compiled for these arguments."""

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given = dict(zip([p.name for p in self.params], args, strict=False)) | kwargs
        signature, constants, aligned = {}, {}, {}
        for p in self.params:
            value = given[p.name]
            signature[p.name] = _type(value, p)
            if signature[p.name] == "constexpr":
                constants[(p.num,)] = value
            elif _is_aligned(value, p):
                aligned[(p.num,)] = [["tt.divisibility", 16]]
        options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
        try:
            source = ASTSource(self, signature, constants, aligned)
            shared = triton.compile(source, target=target, options=options).metadata.shared
            limit = SHARED_BYTES[target.arch]
            small = f"needs {shared} bytes of shared memory, there are {limit}"
            print(self.__name__, "compiled" if shared <= limit else small)
        except Exception as error:
            print(self.__name__, type(error).__name__, str(error)[-500:])

    return run


def _is_aligned(value: Any, parameter: Any) -> bool:
    """Whether Triton compiles for a multiple of 16, which decides what it pipelines."""
    if isinstance(value, Tensor):
        return value.data_ptr() % 16 == 0
    return isinstance(value, int) and not parameter.do_not_specialize and value % 16 == 0


def _type(value: Any, parameter: Any) -> str:
    if parameter.is_constexpr or value is None:
        return "constexpr"
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "constexpr" if value == 1 and not parameter.do_not_specialize else "i32"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=list(TARGETS))
    parser.add_argument("cases", nargs="*", metavar="op/case")
    args = parser.parse_args()
    target = TARGETS[args.target]
    JITFunction.run = compiling(target)
    assert kernels.load("triton") is None
    patched: Any = attention_tiles, w4a16_mma_pair
    patched[0].shared_memory = lambda device: SHARED_BYTES[target.arch]
    patched[1].overlap = lambda device: {"PDL": args.target == "sm90"}  # it is for such GPUs
    for name in args.cases:
        op, case = name.split("/")
        arguments = CASES[op][case](Draw(torch.bfloat16))
        for kernel in ops.REGISTRY[op].kernels:
            if kernel.provider == "triton" and not refusal(kernel, TAKING, arguments):
                shared = {} if kernel.shared is None else {"shared": kernel.shared.of(arguments)}
                kernel.function(**with_prepared(kernel, arguments) | shared)
