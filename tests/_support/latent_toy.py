"""A toy model with latent attention, whose greedy tokens rounding does not decide.

T tokens, D width.
"""

import torch
from torch import Tensor, nn

from atomc import ops

VOCAB, WIDTH = 61, 16
HEADS, NOPE, VALUES, LATENT, ROTATED = 3, 12, 10, 24, 8


class LatentAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * (NOPE + ROTATED), bias=False)
        self.kv_a = nn.Linear(WIDTH, LATENT + ROTATED, bias=False)
        self.norm = nn.Parameter(torch.ones(LATENT))
        self.kv_b = nn.Linear(LATENT, HEADS * (NOPE + VALUES), bias=False)
        self.out = nn.Linear(HEADS * VALUES, WIDTH, bias=False)
        self.kv = ops.latent_state(LATENT, ROTATED)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return ops.rope(x, cos, sin, "half")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, NOPE + ROTATED))
        latent, k_rope = self.kv_a(x).split([LATENT, ROTATED], -1)
        q_rope, k_rope = (
            self.rotate(each, cos, sin) for each in (q[..., NOPE:], k_rope.unsqueeze(-2))
        )
        latent = ops.rms_norm(latent, self.norm, 1e-6)
        found = ops.mla_attention(
            q[..., :NOPE], q_rope, latent, k_rope, self.kv_b.weight, self.kv, scale=0.3
        )
        return self.out(found.flatten(-2))


class LatentToy(nn.Module):
    def __init__(self, layers: int):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(LatentAttention() for _ in range(layers))
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(
        self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor | None = None
    ) -> Tensor:
        x = self.embed(input_ids) + positions[:, None].to(self.embed.weight.dtype).sin()
        angles = positions[:, None, None].to(x.dtype) / (
            10.0 ** torch.arange(ROTATED // 2, device=x.device)
        ).to(x.dtype)
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            x = x + torch.tanh(layer(x, cos, sin))
        return self.lm_head(x if logits_rows is None else x.index_select(0, logits_rows))


def latent_toy(
    layers: int = 2, device: str = "cpu", dtype: torch.dtype = torch.float64
) -> nn.Module:
    """In fp64, so that rounding decides about no token."""
    torch.manual_seed(layers)
    model = LatentToy(layers).to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.normal_(0, 0.5)
    return model.eval().requires_grad_(False).to(device)
