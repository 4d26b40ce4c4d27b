"""State of layers: the handle that a layer owns, its specification, and the inputs of one step of
the runtime.

T new tokens, S sequences, R rows whose logits are computed, B blocks of the longest sequence.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from atomc.ops.formats import FP8

# Of the tensors that torch allocates on a CPU, in bytes.
ALIGNMENT = 64

T = TypeVar("T")


def state_handle(*shape: int) -> nn.Buffer:
    """The handle of a layer's state: an empty, non-persistent buffer [0, *shape].

    Assign it to the module and pass it to the op that uses the state. Outside the runtime it is
    ignored; the compiler for the runtime replaces it with the tensors of the state.
    """
    return nn.Buffer(torch.empty(0, *shape), persistent=False)


def kv_state(heads: int, head_dim: int) -> nn.Buffer:
    """The handle of a layer's key/value cache, for `ops.attention`: `self.kv =
    ops.kv_state(...)`.
    """
    return state_handle(heads, head_dim)


class Layout(NamedTuple):
    """The memory layout of a cache [blocks, block_size, K, D]; a cache without heads is contiguous
    in all layouts.

    shuffled  the numbers of a block are in the order of AMD's kernels, in pieces of x numbers or 16
              bytes: keys [K, D/x, block_size, x], values [K, block_size/x, D, x]. The tensor has
              the same shape; only kernels of this layout know where in it a number is
    """

    name: str
    order: tuple[int, ...]  # memory order of the dimensions, slowest first
    block_size: int | None  # tokens per block; None: a block has room for the longest sequence
    shuffled: bool = False


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("paged", (0, 1, 2, 3), 16),
        # The keys of a head in one sequence are one dense matrix, as required by SDPA on a CPU.
        Layout("contiguous", (0, 2, 1, 3), None),
        Layout("shuffled", (0, 1, 2, 3), 16, shuffled=True),
    )
}


class StateKind(NamedTuple):
    """A kind of state.

    roles   the tensors that the runtime allocates
    scales  additional tensors, [1] fp32, of a state in 8 bits: the factors of its codes
    per_sequence  False: one row per token, in blocks. True: one row per sequence, which each step
                  replaces
    """

    roles: tuple[str, ...]
    scales: tuple[str, ...] = ()
    per_sequence: bool = False


KINDS = {
    "kv": StateKind(("k_cache", "v_cache"), ("k_scale", "v_scale")),
    "latent": StateKind(("kv_cache",), ("kv_scale",)),  # keys and values of all heads in one
    "indexer": StateKind(("index_cache",)),  # keys that select which tokens attention reads
    "recurrent": StateKind(("recurrent_state",), per_sequence=True),
    "conv": StateKind(("conv_state",), per_sequence=True),  # the last inputs of a short convolution
}


class Paging(NamedTuple):
    """How state per token is stored in blocks. Layers with equal paging form a group, which shares
    its block tables.

    window  0: all tokens are read; n: only the last n
    layout  a name in LAYOUTS
    """

    window: int
    layout: str


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a layer's state. shape: per token, or per sequence."""

    role: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes per token, or per sequence."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StateSpec:
    """The state of one layer between steps. `StateSpec.of` creates one.

    name     the layer's module path
    kind     a name in KINDS
    paging   how it is stored in blocks; None: per sequence
    group    the number of the group; None: per sequence
    """

    name: str
    kind: str
    tensors: tuple[StateTensor, ...]
    paging: Paging | None = None
    group: int | None = None

    @classmethod
    def of(
        cls,
        name: str,
        kind: str,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        *,
        window: int = 0,
        layout: str = "paged",
    ) -> "StateSpec":
        """shapes: of each role of the kind. State per sequence ignores window and layout."""
        roles, _, per_sequence = KINDS[kind]
        tensors = tuple(
            StateTensor(role, tuple(shape), dtype)
            for role, shape in zip(roles, shapes, strict=True)
        )
        return (
            cls(name, kind, tensors)
            if per_sequence
            else cls(name, kind, tensors, Paging(window, layout), 0)
        )

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> "StateSpec":
        """The spec of a result of `to_plain`."""
        tensors = tuple(StateTensor(**tensor) for tensor in plain["tensors"])
        paging = plain["paging"] and Paging(*plain["paging"])
        return cls(**{**plain, "tensors": tensors, "paging": paging})

    def to_plain(self) -> dict[str, Any]:
        """Its fields, of builtin types, for the cache of compiled graphs."""
        return {**asdict(self), "paging": self.paging and (*self.paging,)}

    def __str__(self) -> str:
        alike = {(tensor.shape, tensor.dtype) for tensor in self.tensors}
        shapes = [
            ("" if len(alike) == 1 else f"{tensor.role} ") + f"{list(tensor.shape)} {tensor.dtype}"
            for tensor in self.tensors[: 1 if len(alike) == 1 else None]
        ]
        kept = "per sequence" if self.paging is None else f"layout {self.paging.layout}"
        return f"{self.name}: {self.kind} {', '.join(shapes)} {kept}"

    @property
    def per_sequence(self) -> bool:
        return self.paging is None

    @property
    def roles(self) -> tuple[str, ...]:
        """The names of the tensors of `allocate`."""
        return tuple(tensor.role for tensor in self.tensors)

    @property
    def scales(self) -> tuple[str, ...]:
        """The roles of its scales, which belong to the model; () unless it is stored in 8 bits."""
        return (
            KINDS[self.kind].scales if any(tensor.dtype in FP8 for tensor in self.tensors) else ()
        )

    @property
    def block_size(self) -> int | None:
        """Tokens per block; None: a block has room for the longest sequence, or state per
        sequence.
        """
        return None if self.paging is None else LAYOUTS[self.paging.layout].block_size

    @property
    def why_unshared(self) -> str:
        """Why requests with a common prefix cannot share it; "": they can, state per sequence by
        snapshots.
        """
        if self.paging is not None and self.block_size is None:
            return (
                f"in layout {self.paging.layout!r} a block holds a whole sequence, so none can "
                "be shared; use layout 'paged'"
            )
        return ""

    @property
    def why_snapshots(self) -> str:
        """Why a prefix of state per sequence is shared by a snapshot only."""
        return (
            f"{self.name} keeps one state per sequence (kind {self.kind!r}), not one per token, so "
            "that requests with a common prefix share only snapshots of it"
        )

    @property
    def can_roll_back(self) -> bool:
        """Whether computed tokens can be computed again or replaced: their state is overwritten."""
        return not self.per_sequence

    def bytes_per_token(self) -> int:
        return 0 if self.per_sequence else self._nbytes

    def bytes_per_sequence(self) -> int:
        """Independent of the length of the sequence."""
        return self._nbytes if self.per_sequence else 0

    @property
    def _nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def in_layout(self, layout: str) -> "StateSpec":
        """The same state in another layout, if it is stored in blocks."""
        paging = self.paging and self.paging._replace(layout=layout)
        return StateSpec(self.name, self.kind, self.tensors, paging, self.group)

    def leading(self, blocks: T, block_size: T, slots: T) -> tuple[T, ...]:
        """The leading dimensions of each tensor, before those of a token or sequence; they may be
        symbolic.
        """
        return (slots,) if self.per_sequence else (blocks, block_size)

    def allocate(
        self, blocks: int, block_size: int, device: torch.device | str, *, slots: int = 1
    ) -> dict[str, Tensor]:
        """Zeroed tensors by role: [blocks, block_size, *shape] with the strides of the layout, or
        [slots, *shape].
        """
        return {
            tensor.role: self._zeros(
                (*self.leading(blocks, block_size, slots), *tensor.shape), tensor.dtype, device
            )
            for tensor in self.tensors
        }

    def _zeros(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        order = tuple(range(len(shape)))
        if self.paging is not None and len(shape) == 4:
            order = LAYOUTS[self.paging.layout].order
        inverse = [order.index(d) for d in range(len(order))]
        return _zeros([shape[d] for d in order], dtype, device).permute(inverse)

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ValueError for missing tensors, or other shapes or dtypes."""
        leading = self.leading("blocks", "block_size", "slots")
        for tensor in self.tensors:
            value = tensors.get(tensor.role)
            actual = None if value is None else (tuple(value.shape[len(leading) :]), value.dtype)
            if actual != (tensor.shape, tensor.dtype):
                came = "missing" if value is None else f"{value.dtype} {list(value.shape)}"
                raise ValueError(
                    f"bind: {tensor.role} of {self.name} is {came}, expected "
                    f"{tensor.dtype} [{', '.join(map(str, (*leading, *tensor.shape)))}]"
                )


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros, of which a CPU holds the pages that were written: the system gives a page at the first
    write, so that blocks that no request needs take neither memory nor time. Raises RuntimeError,
    as torch does, for more than the system can promise.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    try:
        memory = np.zeros(size + ALIGNMENT, np.uint8)
    except MemoryError as error:
        raise RuntimeError(f"can't allocate memory: {size} bytes of state") from error
    start = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(*shape)


class StateGroup(NamedTuple):
    """Layers that share their block tables. bytes_per_token: of all these layers together."""

    bytes_per_token: int
    window: int


def groups_of(specs: Sequence[StateSpec]) -> list[StateGroup]:
    """The groups of a program, by number; [] without state per token."""
    pagings = {
        spec.group: spec.paging
        for spec in specs
        if spec.group is not None and spec.paging is not None
    }
    return [
        StateGroup(
            sum(spec.bytes_per_token() for spec in specs if spec.group == group),
            pagings[group].window,
        )
        for group in sorted(pagings)
    ]


def layout_of(specs: Sequence[StateSpec]) -> str | None:
    """The layout of all state per token of a program; None without any."""
    return next((spec.paging.layout for spec in specs if spec.paging), None)


def block_size_of(specs: Sequence[StateSpec]) -> int | None:
    """Tokens per block in all groups of a program; None: a block has room for the longest
    sequence.
    """
    return next(
        (spec.block_size for spec in specs if not spec.per_sequence), LAYOUTS["paged"].block_size
    )


def state_before(
    state: Tensor, query_start: Tensor, seq_lens: Tensor, state_slots: Tensor
) -> Tensor:
    """The states [S, ...] of the sequences of a step before its tokens; state: [slots, ...].

    Zeros for a sequence that begins with this step: its slot may still contain the state of another
    sequence.
    """
    begins = seq_lens == query_start.diff()
    return state[state_slots].masked_fill(begins.view(-1, *[1] * (state.dim() - 1)), 0)


def rows_of(query_start: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """[T] each: the number of each row of a step, its sequence, and whether it has one. Rows after
    the last sequence are padding, with the number of the last sequence.
    """
    row = torch.arange(num_rows, device=query_start.device)
    owner = torch.searchsorted(query_start[1:].long(), row, right=True)
    last = query_start.shape[0] - 2
    return row, owner.clamp(max=last), owner <= last


class GroupStep(NamedTuple):
    """The inputs of a step for one group of caches."""

    slots: Tensor  # [T] i64: the slot to which row t is written; -1: none
    block_tables: Tensor  # [S, B] i32


class Step(NamedTuple):
    """The inputs of one call of the compiled model. A sequence has any number of new tokens; in a
    step of as many rows as sequences, row s is of sequence s, or both are padding.
    """

    input_ids: Tensor  # [T] i64
    positions: Tensor  # [T] or [3, T] i64
    query_start: Tensor  # [S + 1] i32
    seq_lens: Tensor  # [S] i32, including the new tokens
    logits_rows: Tensor  # [R] i64: rows of the hidden states whose logits are computed
    groups: tuple[GroupStep, ...]
    state_slots: Tensor  # [S] i64: the row of each sequence in state per sequence
    hidden: Tensor | None = None  # [T, D]: the hidden states that a draft model reads
    # [T, E]: what the encoder gives for the tokens of images, D columns for each place in the model
    # that reads it; zero in other rows
    embeddings: Tensor | None = None
    is_image: Tensor | None = None  # [T] bool: which rows are tokens of images
    lora_rows: Tensor | None = None  # [T] i32: the adapter of each row; -1: none
