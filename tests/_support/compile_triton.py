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
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from atomc import kernels, ops
from atomc.kernels.triton.attention import attention_tiles
from atomc.kernels.triton.w4a16 import w4a16_mma_pair
from atomc.ops.op import refusal
from atomc.platform import Platform

# An op may have kernels for several cases: those are compiled that take this one here.
TAKING = Platform.named("sm90")
TARGETS = {"sm90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}
SHARED_BYTES = {90: 227 * 2**10, "gfx942": 64 * 2**10}
OPTIONS = ("num_warps", "num_stages")


def compiling(target: GPUTarget) -> Any:
    """What stands in for the launch of a kernel: it is compiled for these arguments."""

    backend = make_backend(target)

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        binder = create_function_from_signature(self.signature, self.params, backend)
        bound, specialization, options = binder(*args, **kwargs)
        _, *source = self._pack_args(backend, kwargs, bound, specialization, options)
        options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
        try:
            compiled = triton.compile(ASTSource(self, *source), target=target, options=options)
            shared, limit = compiled.metadata.shared, SHARED_BYTES[target.arch]
            small = f"needs {shared} bytes of shared memory, there are {limit}"
            print(self.__name__, "compiled" if shared <= limit else small)
        except Exception as error:
            print(self.__name__, type(error).__name__, str(error)[-500:])

    return run


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
