"""Gated activations."""

import torch
import torch.nn.functional as F
from torch import Tensor

from spellings import Spelling

RANDOM = torch.Generator().manual_seed(0)
T, I = 7, 37  # noqa: E741


def gated(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """gate and up."""
    gate, up = (torch.randn(T, I, generator=RANDOM).to(dtype) for _ in range(2))
    return gate, up


SPELLINGS = (
    Spelling(
        "silu(gate) * up",
        "Llama, Qwen3, most",
        "silu_and_mul",
        lambda gate, up: F.silu(gate) * up,
        gated,
    ),
)
