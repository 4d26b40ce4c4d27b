"""State as a value: the handle a layer owns, the spec the compiler lists, and what one step of the runtime carries.

T new tokens, S sequences, R rows of which logits are wanted, B blocks of the longest sequence.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn


def kv_state(heads: int, head_dim: int) -> nn.Buffer:
    """The handle of a layer's key/value cache: an empty, non-persistent buffer [0, heads, head_dim].

    Assign it to the module (`self.kv = ops.kv_state(...)`) and pass it to `ops.attention`. Outside the runtime it is
    ignored; the runtime's compiler replaces it by the cache tensors.
    """
    return nn.Buffer(torch.empty(0, heads, head_dim), persistent=False)


class Layout(NamedTuple):
    """How a cache [blocks, block_size, K, D] lies in memory."""

    name: str
    order: tuple[int, ...]  # memory order of the dimensions, slowest first
    block_size: int | None  # tokens a block; None: one block holds the longest sequence


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("paged", (0, 1, 2, 3), 16),
        # Each head's keys of one sequence are one dense matrix: what SDPA on a CPU wants.
        Layout("contiguous", (0, 2, 1, 3), None),
    )
}


ROLES = {"kv": ("k_cache", "v_cache")}  # by kind of state


def kv_shape(k: Tensor, v: Tensor) -> tuple[int, ...]:
    """StateSpec.shape of a layer with keys and values [T, heads, head_dim].

    Raises ValueError if they differ in width: the runtime's key and value caches have one shape.
    """
    if k.shape[-1] != v.shape[-1]:
        raise ValueError(f"keys are {k.shape[-1]} wide, values {v.shape[-1]}")
    return tuple(k.shape[-2:])


@dataclass(frozen=True)
class StateSpec:
    """What one layer keeps between steps; the runtime allocates from these, in groups of equal window.

    kind    "kv": two tensors [blocks, block_size, *shape], for keys and for values
    shape   per token: (heads, head_dim)
    window  0: every token is kept; n: only the last n are read
    layout  a name in LAYOUTS
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    window: int = 0
    layout: str = "paged"
    group: int = 0

    @property
    def roles(self) -> tuple[str, ...]:
        """The tensors that `allocate` returns, in its order."""
        return ROLES[self.kind]

    def bytes_per_token(self) -> int:
        size = torch.empty((), dtype=self.dtype).element_size() * 2
        for extent in self.shape:
            size *= extent
        return size

    def allocate(self, blocks: int, block_size: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Zeroed key and value caches [blocks, block_size, heads, head_dim] with the strides of the layout."""
        order = LAYOUTS[self.layout].order
        shape = (blocks, block_size, *self.shape)
        inverse = [order.index(d) for d in range(len(order))]
        caches = [torch.zeros([shape[d] for d in order], dtype=self.dtype, device=device).permute(inverse)
                  for _ in range(2)]
        return caches[0], caches[1]


class GroupStep(NamedTuple):
    """One step's view of a group of caches that are paged alike."""

    slots: Tensor  # [T] i64: where row t is written; -1: nowhere
    block_tables: Tensor  # [S, B] i32
    state_slots: Tensor  # [S] i64: the sequence's slot in per-sequence state


class Step(NamedTuple):
    """What one call of the compiled model gets. A sequence may have any number of new tokens."""

    input_ids: Tensor  # [T] i64
    positions: Tensor  # [T] or [3, T] i64
    query_start: Tensor  # [S + 1] i32
    seq_lens: Tensor  # [S] i32, including the new tokens
    logits_rows: Tensor  # [R] i64: rows of the hidden states of which logits are wanted
    groups: tuple[GroupStep, ...]
