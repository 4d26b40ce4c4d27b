"""From the scheduler's decision to the tensors of one step, in places that never change.

T rows (new tokens, and padding behind them), S sequences, R rows of which logits are wanted, B
columns of block tables.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from atomc.ops import GroupStep, Step
from atomc.runtime.step import Chunk, ScheduledStep

Array = npt.NDArray[Any]


class Shape(NamedTuple):
    """Room for so many rows, sequences, and rows of which logits are wanted; columns of block
    tables.
    """

    rows: int
    sequences: int
    wanted: int
    columns: int


class InputBatch:
    """What steps are made of, on the host and on the device.

    A step is written into pinned memory and copied at once; there are two such places, because the
    copy of one step may still wait for the device while the next step is written. On the device
    stay the block tables, which are only told what is new, and the token that was drawn last for
    each slot, so that a step can begin before the host knows it.

    rows, sequences, columns   of the largest step
    slots   of requests; None: as many as sequences. One more, the last, is that of all padding
            sequences
    """

    def __init__(
        self,
        *,
        rows: int,
        sequences: int,
        columns: int,
        block_size: int,
        num_groups: int = 1,
        slots: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.rows, self.sequences, self.columns = rows, sequences, columns
        self.slots = sequences if slots is None else slots
        self.block_size, self.num_groups = block_size, num_groups
        self.device = torch.device(device)
        self.num_updates = 2 * sequences + rows // block_size + 16
        i32 = {"query_start": sequences + 1, "seq_lens": sequences}
        i64 = {
            "positions": rows,
            "logits_rows": rows,
            "sources": rows,
            "sequence_slots": sequences,
            "drawn_slots": rows,
        }
        for g in range(num_groups):
            i32[f"new_blocks_{g}"] = self.num_updates
            i64 |= {f"slots_{g}": rows, f"new_places_{g}": self.num_updates}
        i64["tokens"] = rows  # the last: `drawn` follows it on the device
        self._fields = _places(i32, i64)
        size = max(end for _, _, end in self._fields.values())
        pinned = self.device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._views = [self._arrays(host) for host in self._hosts]
        memory = torch.zeros(size + 8 * (self.slots + 1), dtype=torch.uint8, device=self.device)
        self._copied = memory[:size]
        self.on_device = {
            name: memory[start:end].view(dtype)
            for name, (dtype, start, end) in self._fields.items()
        }
        self.drawn = memory[size:].view(torch.int64)
        self._ids = memory[self._fields["tokens"][1] :].view(torch.int64)
        self._tables = [np.zeros((self.slots + 1, columns), np.int32) for _ in range(num_groups)]
        self.tables = [
            torch.zeros((self.slots + 1, columns), dtype=torch.int32, device=self.device)
            for _ in range(num_groups)
        ]
        self._turn = 0

    def write(
        self, step: ScheduledStep | None, shape: Shape | None = None, *, num_rows: int = 0
    ) -> Shape:
        """Bring a step to the device, padded to `shape` or to num_rows; None: padding only. The
        shape that it has now.

        A padding row has token 0 at position 0, slot -1, and belongs to no sequence: it lies beyond
        query_start[-1]. A padding sequence has no row and no token, and the spare slot.
        """
        self._turn ^= 1
        to = self._views[self._turn]
        chunks = step.chunks if step is not None else ()
        S = len(chunks)
        counts = np.array([chunk.num_tokens for chunk in chunks], np.int64)
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        slots = np.array([chunk.slot for chunk in chunks], np.int64)
        bounds = np.concatenate(([0], counts.cumsum()))
        T = int(bounds[-1])
        wanted = self._wanted(chunks, bounds)
        lens = starts + counts
        if shape is None:
            shape = Shape(
                max(T, num_rows),
                S,
                len(wanted),
                max(1, -(-int(lens.max(initial=0)) // self.block_size)),
            )
        rows, sequences = shape.rows, shape.sequences

        _fill(to["query_start"], bounds, sequences + 1, T)
        _fill(to["seq_lens"], lens, sequences, 0)
        _fill(to["sequence_slots"], slots, sequences, self.slots)
        _fill(to["logits_rows"], wanted, shape.wanted, 0)
        positions = np.arange(T) + np.repeat(starts - bounds[:-1], counts)
        _fill(to["positions"], positions, rows, 0)
        _fill(to["tokens"], self._known(chunks, T), rows, 0)
        to["sources"][:rows] = np.arange(rows)
        fed = np.array([chunk.fed for chunk in chunks], bool)
        to["sources"][bounds[1:][fed] - 1] = self.rows + slots[fed]
        draws = np.array([chunk.num_samples for chunk in chunks], np.int64)
        to["drawn_slots"][: draws.sum()] = np.repeat(slots, draws)

        self._tell(chunks, to)
        sequence = np.repeat(slots, counts)
        block, offset = np.divmod(positions, self.block_size)
        for g, table in enumerate(self._tables):
            _fill(
                to[f"slots_{g}"],
                table[sequence, block].astype(np.int64) * self.block_size + offset,
                rows,
                -1,
            )
        self._copied.copy_(self._hosts[self._turn], non_blocking=True)
        return shape

    def step(self, shape: Shape) -> Step:
        """The Step that was written last; the block tables take in what is new."""
        at, (rows, sequences, wanted, columns) = self.on_device, shape
        slots = at["sequence_slots"][:sequences]
        groups = []
        for g, table in enumerate(self.tables):
            table.view(-1).scatter_(0, at[f"new_places_{g}"], at[f"new_blocks_{g}"])
            groups.append(
                GroupStep(at[f"slots_{g}"][:rows], table[:, :columns].index_select(0, slots))
            )
        return Step(
            input_ids=self._ids.index_select(0, at["sources"][:rows]),
            positions=at["positions"][:rows],
            query_start=at["query_start"][: sequences + 1],
            seq_lens=at["seq_lens"][:sequences],
            logits_rows=at["logits_rows"][:wanted],
            groups=tuple(groups),
            state_slots=slots,
        )

    def keep(self, tokens: Tensor) -> None:
        """These were drawn by the step written last, one for each chunk that draws: the next step
        may be fed them.
        """
        self.drawn.index_copy_(0, self.on_device["drawn_slots"][: len(tokens)], tokens)

    def _tell(self, chunks: Sequence[Chunk], to: dict[str, Array]) -> None:
        """The blocks that tables have more than before."""
        for g, table in enumerate(self._tables):
            places, blocks = [], []
            for chunk in chunks:
                start, new = chunk.blocks[g]
                if new:
                    table[chunk.slot, start : start + len(new)] = new
                    places.append(chunk.slot * self.columns + start + np.arange(len(new)))
                    blocks.append(new)
            where = np.concatenate(places) if places else np.zeros(0, np.int64)
            what = np.fromiter(chain.from_iterable(blocks), np.int32, len(where))
            if len(where) > self.num_updates:  # many long prompts at once, all cached
                self.tables[g].view(-1)[torch.from_numpy(where).to(self.device)] = torch.from_numpy(
                    what
                ).to(self.device)
                where, what = where[:0], what[:0]
            padding = self.slots * self.columns
            _fill(to[f"new_places_{g}"], where, self.num_updates, padding)
            _fill(to[f"new_blocks_{g}"], what, self.num_updates, 0)

    def _known(self, chunks: Sequence[Chunk], T: int) -> Array:
        """The tokens of all rows, 0 where the device knows more."""
        tokens: list[int] = []
        for chunk in chunks:
            tokens.extend(chunk.tokens)
            if chunk.fed:
                tokens.append(0)
        return np.array(tokens, np.int64)

    def _wanted(self, chunks: Sequence[Chunk], bounds: Array) -> Array:
        counts = np.array([chunk.num_output_rows for chunk in chunks], np.int64)
        if counts.max(initial=0) <= 1:
            rows: Array = bounds[1:][counts > 0] - 1
            return rows
        return np.concatenate(
            [np.arange(end - count, end) for end, count in zip(bounds[1:], counts, strict=True)]
        )

    def _arrays(self, memory: Tensor) -> dict[str, Array]:
        return {
            name: memory[start:end].view(dtype).numpy()
            for name, (dtype, start, end) in self._fields.items()
        }


def _fill(to: Array, values: Array, size: int, padding: int) -> None:
    to[: len(values)] = values
    to[len(values) : size] = padding


def _places(i32: dict[str, int], i64: dict[str, int]) -> dict[str, tuple[torch.dtype, int, int]]:
    """For each field its dtype, and its first and last byte: one behind the other, at addresses
    that kernels like.
    """
    fields, at = {}, 0
    for dtype, width, sizes in ((torch.int32, 4, i32), (torch.int64, 8, i64)):
        for name, size in sizes.items():
            at = -(-at // 16) * 16
            fields[name] = dtype, at, at + width * size
            at += width * size
    return fields
