"""Glue around fused quantizers: results of one call that are read before and behind a kernel."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import atomc
from atomc.quantization import QuantizedLinear


class Gated(nn.Module):
    """A product of a linear layer in 16 bits and a quantized one, which read the same norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(128))
        self.router = nn.Linear(128, 8)
        self.up = nn.Linear(128, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x, (128,), self.weight, 1e-6)
        chosen = self.router(y).softmax(-1)
        return self.up(y * 1.0) * chosen


def test_a_norm_that_quantizes_is_read_on_both_sides_of_a_kernel() -> None:
    torch.manual_seed(0)
    model = atomc.quantize(Gated().requires_grad_(False), "fp8", ignore=["router"])
    assert isinstance(model.up, QuantizedLinear)
    x = torch.randn(7, 128)
    options = {"strict": True, "glue": "inductor"}
    compiled = torch.compile(model, backend="atom", options=options, fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=0.05, atol=0.02)
    assert atomc.reports()[-1].matches["rms_norm_quant"] == 1
