"""Products in fp32 of 16-bit operands, as routers have them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from spellings import Spelling


def stored(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [7, 33], and a weight [5, 33]."""
    return torch.randn(7, 33).to(dtype), torch.randn(5, 33).to(dtype)


def kept_in_fp32(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, weight = stored(dtype)
    return x, weight.float()


def by_type(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.type(torch.float32), weight.type(torch.float32))


def by_float(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.float(), weight.float())


def of_x_alone(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.float(), weight)


HALVES = (torch.bfloat16,)
SPELLINGS = (
    Spelling(
        "F.linear(x.type(torch.float32), w.type(torch.float32)), of 16-bit operands",
        "DeepSeek-V3, GLM-4.5, dots.llm1",
        "linear_fp32",
        by_type,
        stored,
        dtypes=HALVES,
    ),
    Spelling(
        "F.linear(x.float(), w.float())", "HY-V3", "linear_fp32", by_float, stored, dtypes=HALVES
    ),
    Spelling(
        "F.linear(x.float(), w), w in fp32",
        "ERNIE 4.5",
        "linear_fp32",
        of_x_alone,
        kept_in_fp32,
        reason="in fp32",
        table="the product is of fp32",
        dtypes=HALVES,
    ),
)
