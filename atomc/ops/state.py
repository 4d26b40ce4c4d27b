"""State as a value: the handle a layer owns, the spec the compiler lists, and what one step of the
runtime carries.

T new tokens, S sequences, R rows of which logits are wanted, B blocks of the longest sequence.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atomc.ops.formats import FP8


def state_handle(*shape: int) -> nn.Buffer:
    """The handle of a layer's state: an empty, non-persistent buffer [0, *shape].

    Assign it to the module and pass it to the op that has the state. Outside the runtime it is
    ignored; the runtime's compiler replaces it by the tensors of the state.
    """
    return nn.Buffer(torch.empty(0, *shape), persistent=False)


def kv_state(heads: int, head_dim: int) -> nn.Buffer:
    """The handle of a layer's key/value cache, for `ops.attention`: `self.kv =
    ops.kv_state(...)`.
    """
    return state_handle(heads, head_dim)


class Layout(NamedTuple):
    """How a cache [blocks, block_size, K, D] is laid out in memory; one without heads is contiguous
    in all layouts.

    shuffled  the numbers of a block are in the order of AMD's kernels, in pieces of x numbers or 16
              bytes: keys [K, D/x, block_size, x], values [K, block_size/x, D, x]. The tensor has
              the same shape; only kernels of this layout know where in it a number is
    """

    name: str
    order: tuple[int, ...]  # memory order of the dimensions, slowest first
    block_size: int | None  # tokens a block; None: one block holds the longest sequence
    shuffled: bool = False


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("paged", (0, 1, 2, 3), 16),
        # Each head's keys of one sequence are one dense matrix: what SDPA on a CPU wants.
        Layout("contiguous", (0, 2, 1, 3), None),
        Layout("shuffled", (0, 1, 2, 3), 16, shuffled=True),
    )
}


class StateKind(NamedTuple):
    """What all states of a kind have in common.

    roles   their tensors: what the runtime allocates
    scales  further tensors, [1] fp32, where the state is kept in 8 bits: what its codes are
            multiplied by
    per_sequence  False: a row for each token, in blocks. True: one row for each sequence, which
                  each step replaces
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
    """How state of tokens is kept in blocks. Layers of equal paging share their block tables: they
    are a group.

    window  0: every token is kept; n: only the last n are read
    layout  a name in LAYOUTS
    """

    window: int
    layout: str


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a layer's state. shape: of one token, or of one sequence."""

    role: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of one token, or of one sequence."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StateSpec:
    """What one layer keeps between steps, and all that the runtime asks about it. `StateSpec.of`
    makes one.

    name     the layer's module path
    kind     a name in KINDS
    paging   how it is kept in blocks; None: it is kept per sequence
    group    the number of the group, None per sequence
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
        """shapes: of each role of the kind. window and layout are ignored by state that is kept per
        sequence.
        """
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
        """Of what `to_plain` gave."""
        tensors = tuple(StateTensor(**tensor) for tensor in plain["tensors"])
        paging = plain["paging"] and Paging(*plain["paging"])
        return cls(plain["name"], plain["kind"], tensors, paging, plain["group"])

    def to_plain(self) -> dict[str, Any]:
        """As plain data, for the cache of compiled graphs."""
        paging = self.paging and tuple(self.paging)
        return {
            **vars(self),
            "tensors": [dict(vars(tensor)) for tensor in self.tensors],
            "paging": paging,
        }

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
        """The tensors that `allocate` returns."""
        return tuple(tensor.role for tensor in self.tensors)

    @property
    def scales(self) -> tuple[str, ...]:
        """The roles of its scales, which belong to the model; () if it is not kept in 8 bits."""
        return (
            KINDS[self.kind].scales if any(tensor.dtype in FP8 for tensor in self.tensors) else ()
        )

    @property
    def block_size(self) -> int | None:
        """Tokens a block; None: one block holds the longest sequence, or there are no blocks."""
        return None if self.paging is None else LAYOUTS[self.paging.layout].block_size

    @property
    def why_unshared(self) -> str:
        """Why requests cannot share it for equal beginnings of their tokens; "": they can."""
        if self.paging is None:
            return (
                f"{self.name} keeps one state a sequence (kind {self.kind!r}), not one a "
                "token, so that nothing of it "
                "can be shared"
            )
        if self.block_size is None:
            return (
                f"in layout {self.paging.layout!r} a block holds a whole sequence, so none can "
                "be shared; layout "
                "'paged' has one"
            )
        return ""

    @property
    def can_roll_back(self) -> bool:
        """Whether tokens that a step computed can be computed again, or replaced: what they wrote
        is overwritten.
        """
        return not self.per_sequence

    def bytes_per_token(self) -> int:
        return 0 if self.per_sequence else self._nbytes

    def bytes_per_sequence(self) -> int:
        """Whatever its length."""
        return self._nbytes if self.per_sequence else 0

    @property
    def _nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def in_layout(self, layout: str) -> "StateSpec":
        """The same, laid out like this if it is kept in blocks."""
        paging = self.paging and self.paging._replace(layout=layout)
        return StateSpec(self.name, self.kind, self.tensors, paging, self.group)

    def leading(self, blocks: Any, block_size: Any, slots: Any) -> tuple[Any, ...]:
        """The dimensions of each tensor before those of one token or sequence; any of them may be
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
        return torch.zeros([shape[d] for d in order], dtype=dtype, device=device).permute(inverse)

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ValueError if these are no tensors for it."""
        leading = self.leading("blocks", "block_size", "slots")
        for tensor in self.tensors:
            given = tensors.get(tensor.role)
            found = None if given is None else (tuple(given.shape[len(leading) :]), given.dtype)
            if found != (tensor.shape, tensor.dtype):
                came = "missing" if given is None else f"{given.dtype} {list(given.shape)}"
                raise ValueError(
                    f"bind: {tensor.role} of {self.name} is {came}, expected "
                    f"{tensor.dtype} [{', '.join(map(str, (*leading, *tensor.shape)))}]"
                )


class StateGroup(NamedTuple):
    """Layers that share their block tables: the bytes of a token in all of them together, and their
    window.
    """

    bytes_per_token: int
    window: int


def groups_of(specs: Sequence[StateSpec]) -> list[StateGroup]:
    """The groups of a program, by number; [] if it keeps nothing per token."""
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


def block_size_of(specs: Sequence[StateSpec]) -> int | None:
    """Tokens a block, in all groups of a program; None: one block holds the longest sequence."""
    return next(
        (spec.block_size for spec in specs if not spec.per_sequence), LAYOUTS["paged"].block_size
    )


def state_before(
    state: Tensor, query_start: Tensor, seq_lens: Tensor, state_slots: Tensor
) -> Tensor:
    """The states [S, ...] of a step's sequences before its tokens, from `state` [slots, ...] of all
    slots.

    Zeros for a sequence whose tokens are all new: it begins with this step, and its slot may hold
    the state of another.
    """
    begins = seq_lens == query_start.diff()
    return state[state_slots].masked_fill(begins.view(-1, *[1] * (state.dim() - 1)), 0)


class GroupStep(NamedTuple):
    """One step's view of a group of caches that are paged alike."""

    slots: Tensor  # [T] i64: where row t is written; -1: nowhere
    block_tables: Tensor  # [S, B] i32


class Step(NamedTuple):
    """What one call of the compiled model gets. A sequence may have any number of new tokens; where
    there are as many rows as sequences, row s is of sequence s, or both are padding.
    """

    input_ids: Tensor  # [T] i64
    positions: Tensor  # [T] or [3, T] i64
    query_start: Tensor  # [S + 1] i32
    seq_lens: Tensor  # [S] i32, including the new tokens
    logits_rows: Tensor  # [R] i64: rows of the hidden states of which logits are wanted
    groups: tuple[GroupStep, ...]
    state_slots: Tensor  # [S] i64: each sequence's row in state that is kept per sequence
