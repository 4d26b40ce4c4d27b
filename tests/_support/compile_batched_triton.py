"""Compile the kernel of atomc/kernels/moe/combinations/batched_triton.py for a GPU that need not be here: python
compile_batched_triton.py sm90. Prints as compile_triton.py does, which removes the interpreter.
"""

import argparse

import torch
from compile_triton import TARGETS, compiling
from triton.runtime.jit import JITFunction

from atomc.kernels.moe.combinations.batched_triton import batched_product
from atomc.kernels.triton.rows.gate import GateConstants
from atomc.ops.experts import ACTIVATIONS

L, C, K, N = 4, 32, 256, 128


def compile_gates(codes: torch.dtype, block: int, gates: tuple[str, ...]) -> None:
    """With these gates, and with none."""
    quantized = codes.itemsize == 1
    x, w13, w2 = (torch.zeros(L, rows, K, dtype=codes) for rows in (C, 2 * N, N))
    x_scale = torch.zeros(L, C, 2 if block else 1) if quantized else None
    scales = [
        torch.zeros(L, rows // block, 2) if block else torch.zeros(L, rows, 1)
        for rows in (2 * N, N)
    ]
    of_w13, of_w2 = scales if quantized else (None, None)
    out, num_tokens = torch.zeros(L, C, N, dtype=torch.bfloat16), torch.zeros(L, dtype=torch.int32)
    bias = torch.zeros(L, 2 * N, dtype=torch.bfloat16)
    for activation in gates:
        batched_product(
            x, x_scale, w13, of_w13, bias, num_tokens, out,
            block=block, gate=GateConstants(activation, activation == "swiglu_oai", 1.702, 2.0),
        )  # fmt: skip
    batched_product(x, x_scale, w2, of_w2, None, num_tokens, out, block=block)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=list(TARGETS))
    target = parser.parse_args().target
    JITFunction.run = compiling(TARGETS[target])
    compile_gates(torch.bfloat16, 0, ACTIVATIONS)
    for codes in (torch.float32, torch.int8):
        compile_gates(codes, 0, ("silu",))
    if target == "sm90":
        for block in (0, 128):
            compile_gates(torch.float8_e4m3fn, block, ("silu",))
