"""Linear layers in bf16, of any number of rows, on CPUs with bf16 instructions."""

from functools import partial

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal
from atomc.kernels.onednn.blocked import blocked, multiply, unfit
from atomc.ops.op import Prepared, Refusal
from atomc.platform import Platform

# Zen 4, one thread, speedup over F.linear at 1024->2048, 1024->5632 and 2816->1024. 1 row: 1.7,
# 1.7, 1.6; 2: 1.4, 1.3, 1.2; 8: 1.9, 1.8, 1.7; 64: 1.2, 1.2, 1.2; 512: 1.0, 1.1, 1.0. With the
# layout for 8 rows: 1: 1.3, 1.3, 1.5; 8: 1.4, 1.6, 1.7.
LAID_OUT_FOR = 1


def _relayout(weight: Tensor) -> Prepared:
    return blocked(weight, LAID_OUT_FOR)


# Cascade Lake: the speedup is 0.8 to 1.0 with 8 rows, and many rows in bf16 take four times as long
# as in fp32.
def _without_bf16(platform: Platform) -> Refusal | None:
    if not platform.has("avx512_bf16"):
        return Refusal("hardware", "in bf16 it is not faster on a CPU without avx512_bf16")
    return None


@ops.linear.kernel(
    "onednn",
    refuses=first_refusal(partial(unfit, torch.bfloat16), _without_bf16),
    prepare={"weight": _relayout},
)
def linear(x: Tensor, weight: tuple[Tensor], bias: Tensor | None) -> Tensor:
    return multiply(x, weight[0], bias)
