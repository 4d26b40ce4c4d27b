"""RMSNorm, alone."""

import torch
import torch.nn.functional as F
from torch import Tensor

from spellings import Spelling

RANDOM = torch.Generator().manual_seed(0)
T, D, EPS = 7, 37, 1e-6


def row(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows and a weight."""
    x, weight = (torch.randn(*shape, generator=RANDOM) for shape in ((T, D), (D,)))
    return x.to(dtype), weight.to(dtype)


def stock(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
    return w * y.to(x.dtype)


SPELLINGS = (
    Spelling("w * (x * rsqrt(mean + eps))", "Llama, Qwen3, most", "rms_norm", stock, row),
    Spelling(
        "F.rms_norm(x, shape, w)",
        "`nn.RMSNorm`",
        "rms_norm",
        lambda x, w: F.rms_norm(x, w.shape, w, EPS),
        row,
    ),
)
