"""Linear layers in fp32 of two and more rows; one row is as fast with the unpacked weight."""

from functools import partial

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal
from atomc.kernels.onednn.blocked import blocked, multiply, unfit
from atomc.ops.op import Prepared

# Zen 4, one thread, speedup over F.linear at 1024->2048, 1024->5632 and 2816->1024. 1 row: 0.9,
# 1.0, 0.9; 2: 1.3, 1.6, 1.4; 3: 2.2, 3.4, 2.7; 8: 1.7, 2.3, 1.8; 64: 1.3, 1.5, 1.3; 512: 1.1, 1.2,
# 1.2. Cascade Lake: 1: 0.9; 8: 1.6 to 2.2.
FEWEST_ROWS = 2
# Zen 4, the layout for 1 row: 1.2, 1.3, 1.1 with 1 row, but 1.2, 1.5, 1.1 with 8. The layouts for 2
# to 512 rows are the same.
LAID_OUT_FOR = 8


def _relayout(weight: Tensor) -> Prepared:
    return blocked(weight, LAID_OUT_FOR)


@ops.linear.kernel(
    "onednn",
    tokens=ops.Tokens(FEWEST_ROWS),
    refuses=first_refusal(partial(unfit, torch.float32)),
    prepare={"weight": _relayout},
)
def linear(x: Tensor, weight: tuple[Tensor], bias: Tensor | None) -> Tensor:
    return multiply(x, weight[0], bias)
