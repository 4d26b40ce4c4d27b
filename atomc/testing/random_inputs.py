"""Random arguments of ops: tensors of one dtype on one device.

T tokens, D width, M width of the MLP and of an expert, N query heads, K key/value heads, H head
width; of latent attention, L latent width, R rotated width, P width of a key that is not rotated.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from atomc.ops.op import Op, OpFunction
from atomc.ops.state import LAYOUTS, StateSpec

D, M, N, K, H = 256, 512, 4, 2, 128
L, R, P = 512, 64, 128
CONTEXT = 40
EXPERTS, CHOSEN = 8, 2
EPS = 1e-6
Quantizer = OpFunction[..., tuple[Tensor, Tensor]]
Argument = Tensor | float | str | torch.dtype | list[int] | None
Arguments = dict[str, Argument]


class RandomInputs:
    """Random tensors of one dtype on one device, from a fixed seed; T rows, caches of one
    layout.
    """

    def __init__(self, dtype: torch.dtype, device: str, rows: int, layout: str = "paged"):
        self.dtype, self.device, self.T, self.layout = dtype, device, rows, layout
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype).to(self.device)

    def below(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(high, shape, generator=self.generator).to(dtype).to(self.device)

    def quantized(self, op: Quantizer, *shape: int) -> tuple[Tensor, Tensor]:
        """Codes and scales of random numbers, by one of the quantizers."""
        return op.reference(self(*shape))

    def heads(self, *counts: int) -> tuple[Tensor, ...]:
        """[T, count, H] each, as views of the output of one projection."""
        rows = self(self.T, sum(counts) * H)
        parts = torch.split(rows, [count * H for count in counts], -1)
        return tuple(part.view(self.T, -1, H) for part in parts)

    def angles(self, width: int = H) -> dict[str, Tensor]:
        angle = 3 * torch.randn(self.T, 1, width // 2, generator=self.generator).repeat(1, 1, 2)
        return {
            "cos": angle.cos().to(self.dtype).to(self.device),
            "sin": angle.sin().to(self.dtype).to(self.device),
        }

    def slots(self) -> Tensor:
        """A slot for each row; the last of several is -1, which is not written."""
        slots = torch.randperm(CONTEXT, generator=self.generator)[: self.T]
        slots[self.T - 1] = -1 if self.T > 1 else slots[0]
        return slots.to(self.device)

    def caches(self) -> dict[str, Tensor]:
        """Caches of one sequence, with random keys and values."""
        spec = StateSpec.of("kv", "kv", ((K, H), (K, H)), self.dtype, layout=self.layout)
        size = LAYOUTS[self.layout].block_size or CONTEXT
        allocated = spec.allocate(-(-CONTEXT // size), size, self.device)
        return {name: cache.copy_(self(*cache.shape)) for name, cache in allocated.items()}


# By op and the name of the example, "" for the first.
Examples = dict[Op, dict[str, Callable[[RandomInputs], Arguments]]]
