"""A small decoder whose embedding and head are cut by vocabulary."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomc.parallel.process_group import TensorParallel
from atomc.parallel.shard_slice import ShardSlice
from atomc.parallel.sharding import cut_parameters
from atomc.parallel.vocab import gather_logits, sum_lookups

IDS = torch.tensor([[0, 33, 34, 63, 66, 5, 31, 32]])
WIDTH = 16


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * normed.to(x.dtype)


class Decoder(nn.Module):
    """[B, T] -> logits [B, T, size]; one layer, which is an MLP. Weights depend on the size only."""

    def __init__(self, size: int, tied: bool) -> None:
        torch.manual_seed(size)
        super().__init__()
        self.embed = nn.Embedding(size, WIDTH)
        self.norm, self.last_norm = Norm(), Norm()
        self.mlp = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, size, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        self.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + F.silu(self.mlp(self.norm(x)))
        return self.head(self.last_norm(x))


def rows(tp: TensorParallel) -> ShardSlice:
    return ShardSlice(0, tp.size, tp.rank, padded=True)


def divided(model: Decoder, tp: TensorParallel) -> Decoder:
    """The part of one process, in place."""
    cut_parameters(model, {name: rows(tp) for name in ("embed.weight", "head.weight", "head.bias")})
    sum_lookups(model.embed, tp)
    gather_logits(model.head, tp)
    return model
