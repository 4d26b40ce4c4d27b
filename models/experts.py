"""Experts of a mixture (Shazeer et al. 2017) in plain PyTorch: the weights of the chosen experts
are gathered for each token.

T tokens, k experts of each token, E experts, H width of the model, I width of an expert. The
compiler replaces this by one op without a gather; eager needs k experts' weights per token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Experts(nn.Module):
    """Gated MLPs, stacked. Parameters are named and shaped as in Hugging Face: gate_up_proj
    [E, 2I, H], the rows of gate over those of up, and down_proj [E, H, I].
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_up_proj = nn.Parameter(
            torch.empty(num_experts, 2 * intermediate_size, hidden_size)
        )
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        nn.init.normal_(self.gate_up_proj, std=0.02)
        nn.init.normal_(self.down_proj, std=0.02)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, H] through experts ids [T, k], summed with weights [T, k] in fp32 -> [T, H]."""
        h = torch.einsum("tkih,th->tki", self.gate_up_proj[ids], x)
        gate, up = h.chunk(2, -1)
        h = F.silu(gate) * up
        y = torch.einsum("tkhi,tki->tkh", self.down_proj[ids], h)
        return (y * weights.unsqueeze(-1)).sum(1, dtype=torch.float32).to(x.dtype)


class MoE(nn.Module):
    """Experts and their router `gate`: x [T, H] -> ids [T, k], weights [T, k]."""

    def __init__(self, gate: nn.Module, experts: Experts):
        super().__init__()
        self.gate, self.experts = gate, experts

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.flatten(0, -2)
        ids, weights = self.gate(x_TD)
        y: Tensor = self.experts(x_TD, ids, weights)
        return y.view_as(x)
