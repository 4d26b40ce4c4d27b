"""What every case draws its arguments with: random tensors of one dtype on one device, and caches
of one layout.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from atomc import ops

EPS = 1e-5
E4M3, E4M3FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
FNUZ = {"dtype": E4M3FNUZ}
# What lies in a cache where no key was written: large, so that reading it shows, and finite, so
# that masking it works.
GARBAGE = 1e4


@dataclass
class Draw:
    """Random inputs of one dtype on one device, and caches of one layout."""

    dtype: torch.dtype
    device: str = "cpu"
    layout: str = "paged"
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype).to(self.device)

    def below(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(high, shape, generator=self.generator).to(dtype).to(self.device)

    def packed(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Two tensors of this shape, neighbours in the last dimension of one storage."""
        first, second = self.normal(*shape[:-1], 2 * shape[-1]).chunk(2, -1)
        return first, second

    def heads(self, tokens: int, *counts: int, width: int) -> tuple[Tensor, ...]:
        """[T, count, D] each, cut from one projection's output, as merged q, k and v are."""
        rows = self.normal(tokens, sum(counts) * width)
        return tuple(
            part.unflatten(-1, (-1, width)) for part in rows.split([n * width for n in counts], -1)
        )

    def tables(self, *shape: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        angle = 10 * torch.randn(shape, generator=self.generator)
        cos, sin = angle.cos().to(dtype or self.dtype), angle.sin().to(dtype or self.dtype)
        return cos.to(self.device), sin.to(self.device)

    def ints(self, values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def caches(
        self, lengths: list[int], heads: int, width: int, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor, list[list[int]]]:
        """Caches of garbage that have room for sequences of these lengths, and the blocks of each,
        in no order.
        """
        longest = max(lengths, default=1)
        block_size = ops.LAYOUTS[self.layout].block_size or longest + 3
        per_sequence = -(-longest // block_size) or 1
        count = 2 + per_sequence * len(lengths)
        spec = ops.StateSpec.of(
            "kv", "kv", ((heads, width),) * 2, dtype or self.dtype, layout=self.layout
        )
        k_cache, v_cache = spec.allocate(count, block_size, self.device).values()
        order = torch.randperm(count, generator=self.generator).tolist()
        blocks = [order[s * per_sequence : (s + 1) * per_sequence] for s in range(len(lengths))]
        garbage = min(GARBAGE, torch.finfo(k_cache.dtype).max)
        return k_cache.fill_(garbage), v_cache.fill_(garbage), blocks


Make = Callable[[Draw], dict[str, Any]]
Cases = dict[str, Make]


def slots_of(blocks: list[int], positions: range, block_size: int) -> list[int]:
    return [blocks[p // block_size] * block_size + p % block_size for p in positions]


def cache_scales(draw: Draw) -> dict[str, Any]:
    return {
        name: (0.02 + draw.normal(1, dtype=torch.float32).abs() / 50)
        for name in ("k_scale", "v_scale")
    }
