"""How far apart the logits of two computations of one model may be, by rounding."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Relative error of one rounding: the unit roundoff of 16-bit dtypes; for fp32 and fp64, the error
# of sums of thousands of terms in another order.
ROUNDING = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-18,
    torch.float64: 2.0**-40,
}
TF32 = 2.0**-11
# Both computations round about ten times per layer, independently: the difference of their logits
# grows with the square root of the number of layers. Random and trained models show 0.3 to 2
# roundings times this root; a factor of 8 leaves a margin. Logits of wrong positions differ by 0.3
# to 1.4 times their spread (1.4: unrelated). The limit is at most 1e-4 in fp32; in bf16 it is 0.04
# for 2 layers and 0.25 for 64.
ROOM = 8.0
# Share of the rows of each kind that must agree. Not all: in a mixture of experts, a rounding may
# select another expert, which changes that row much and rows that attend to it a little. With wrong
# positions, no row agrees.
AGREEING = 0.25
# Minimum limit if the program's KV cache or its products per head have 8 bits or less, unlike those
# of the class.
IN_8_BITS = 0.25


def rounding_noise(dtype: torch.dtype, device: torch.device, num_layers: int) -> float:
    """Relative error that the roundings of all layers accumulate."""
    rounding = ROUNDING.get(dtype, ROUNDING[torch.bfloat16])
    if dtype == torch.float32 and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        rounding = TF32
    return rounding * math.sqrt(num_layers)


def agreed(errors: Sequence[float]) -> float:
    """The error that AGREEING of the rows do not exceed."""
    return float(
        torch.tensor(errors).nan_to_num(nan=math.inf).quantile(AGREEING, interpolation="higher")
    )


def difference(out: Tensor, expected: Tensor) -> float:
    """Relative difference of two rows of logits [V], as a share of their spread. Columns that the
    class masks with -inf or the smallest number are ignored."""
    real = expected > torch.finfo(expected.dtype).min / 1e8
    out, expected = out[real], expected[real]
    spread = float(torch.linalg.vector_norm(expected - expected.mean()))
    apart = float(torch.linalg.vector_norm(out - expected))
    return apart / spread if spread else 0.0 if apart == 0.0 else math.inf


def plain_tokens(config: Any, vocab_size: int, count: int, seed: int) -> list[int]:
    """Random tokens without special ones, which change positions (padding) or stand for images."""
    special = {
        value
        for name, value in config.to_dict().items()
        if name.endswith("token_id") and isinstance(value, int)
    }
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (count + 8 * len(special),), generator=generator).tolist()
    return ([token for token in tokens if token not in special] or tokens)[:count]
