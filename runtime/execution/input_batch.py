"""InputBatch: converts a scheduled step to tensors at fixed addresses.

T rows (new tokens, then padding), S sequences, R rows whose logits are computed, B columns of block
tables.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from atomc.ops import GroupStep, Step
from atomc.ops.inputs import TEXT, ModelInputs
from atomc.runtime.execution.device_times import DeviceTimes
from atomc.runtime.execution.lora.rows import Array, LoraRows
from atomc.runtime.execution.rope_positions import RopePositions
from atomc.runtime.scheduling.step import Chunk, ScheduledStep

Rows = TypeVar("Rows", Array, Tensor)
Sizes = dict[str, int]
Arrays = dict[str, Array]


class StepShape(NamedTuple):
    """Padded size of a step.

    rows        tokens
    wanted      rows whose logits are computed
    columns     of block tables
    """

    rows: int
    sequences: int
    wanted: int
    columns: int

    @property
    def is_decode(self) -> bool:
        """Equal numbers of rows per sequence, by which kernels recognize decode steps."""
        return self.rows % self.sequences == 0


class InputBatch:
    """The input tensors of steps, at fixed addresses.

    A step is written to pinned host memory and copied to the device at once. There are several host
    buffers, because the copy of one step may be pending while the next one is written. The device
    keeps the block tables, which receive only new blocks, and the last sampled token of each slot,
    so that a step can start before the host knows that token.

    rows, sequences, columns   of the largest step
    slots   number of slots; None: as many as sequences. One more, the last, is used by padding
            sequences
    drafts  draft tokens that a draft model proposes after each step; 0: there is none
    takes   what steps have besides tokens and positions
    merge_size   patches of an image in a row and a column for one token
    host_buffers   one for each step that may be pending, and for the next one
    device_times   a span begins with the copy of a step

    row_inputs  tensors of one row per token, by the name of their field in Step. The caller writes
                "embeddings" (ImageEncoder.place) and "hidden" (PipelineLinks.receive)
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
        drafts: int = 0,
        takes: ModelInputs = TEXT,
        merge_size: int = 1,
        host_buffers: int = 2,
        device: torch.device | str = "cpu",
        device_times: DeviceTimes | None = None,
    ) -> None:
        self.drafts = drafts
        self.rows, self.sequences, self.columns = rows, sequences, columns
        self.slots = sequences if slots is None else slots
        self.rope = RopePositions(self.slots, merge_size) if takes.mrope else None
        self.lora = LoraRows(self.slots) if takes.lora else None
        self.block_size, self.num_groups = block_size, num_groups
        self.device = torch.device(device)
        self.device_times = device_times or DeviceTimes(self.device)
        self.num_updates = 2 * sequences + rows // block_size + 16
        self._fields = _field_layout(*self._field_sizes(images=takes.embeddings is not None))
        size = max(end for _, _, end in self._fields.values())
        pinned = self.device.type == "cuda"
        self._hosts = [
            torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(host_buffers)
        ]
        self._views = [self._arrays(host) for host in self._hosts]
        memory = torch.zeros(size + 8 * (self.slots + 1), dtype=torch.uint8, device=self.device)
        self._copied = memory[:size]
        self.on_device = {
            name: memory[start:end].view(dtype)
            for name, (dtype, start, end) in self._fields.items()
        }
        self.row_inputs: dict[str, Tensor] = {
            name: self.on_device[name]
            for name in ("is_image", "lora_rows")
            if name in self.on_device
        }
        for name, values in (("embeddings", takes.embeddings), ("hidden", takes.hidden)):
            if values is not None:
                width, dtype = values
                self.row_inputs[name] = torch.zeros(rows, width, dtype=dtype, device=self.device)
        self.last_tokens = memory[size:].view(torch.int64)
        self._ids = memory[self._fields["tokens"][1] :].view(torch.int64)
        # End of each slot's blocks in tokens.
        self._ends = np.zeros((num_groups, self.slots + 1), np.int64)
        # The position from which on the request of each slot was computed in it.
        self._begins = np.zeros(self.slots + 1, np.int64)
        self._tables = [np.zeros((self.slots + 1, columns), np.int32) for _ in range(num_groups)]
        self.tables = [
            torch.zeros((self.slots + 1, columns), dtype=torch.int32, device=self.device)
            for _ in range(num_groups)
        ]
        self._turn = 0

    def write(
        self,
        step: ScheduledStep | None,
        shape: StepShape | None = None,
        *,
        num_rows: int = 0,
        num_sequences: int = 1,
    ) -> StepShape:
        """Copy a step to the device, padded to `shape`, or to num_rows and num_sequences; None:
        padding only. Returns the padded shape.

        A padding row has token 0, position 0 and slot -1, and belongs to no sequence: it is after
        query_start[-1]. A padding sequence has no rows, length 0 and the padding slot.
        """
        self._turn = (self._turn + 1) % len(self._hosts)
        to = self._views[self._turn]
        step = step or ScheduledStep(())
        chunks, decoding = step.chunks, step.decoding
        S = len(chunks) + step.num_decoding
        slots, starts, *sizes = np.ones((5, S), np.int64)  # a decode row has one of each
        counts, num_outputs, num_samples = sizes
        slots[len(chunks) :], starts[len(chunks) :] = decoding.slots, decoding.starts
        for i, chunk in enumerate(chunks):
            slots[i], starts[i], counts[i] = chunk.slot, chunk.start, chunk.num_tokens
            num_outputs[i], num_samples[i] = chunk.num_output_rows, chunk.num_samples
        bounds = np.zeros(S + 1, np.int64)
        counts.cumsum(out=bounds[1:])
        T = int(bounds[-1])
        ends, number = bounds[1:].repeat(num_outputs), num_outputs.cumsum().repeat(num_outputs)
        wanted = ends - number + np.arange(len(ends))
        lens = starts + counts
        if shape is None:
            longest = int(lens.max(initial=0)) + max(self.drafts - 1, 0)
            shape = StepShape(
                max(T, num_rows),
                max(S, num_sequences),
                len(wanted),
                min(max(1, -(-longest // self.block_size)), self.columns),
            )
        rows, sequences = shape.rows, shape.sequences

        _fill(to["query_start"], bounds, sequences + 1, T)
        _fill(to["seq_lens"], lens, sequences, 0)
        _fill(to["sequence_slots"], slots, sequences, self.slots)
        _fill(to["logits_rows"], wanted, shape.wanted, 0)
        indices = np.arange(T) + (starts - bounds[:-1]).repeat(counts)
        self._write_positions(chunks, slots, to, rows, indices, bounds)
        if "is_image" in to:
            self._write_image_masks(chunks, to, rows, bounds)
        if self.lora is not None:
            _fill(to["lora_rows"], np.repeat(self.lora.adapters(slots), counts), rows, -1)
        tokens = [*chain.from_iterable([chunk.tokens for chunk in chunks])]
        _fill(to["tokens"], _i64(tokens), rows, 0)
        to["sources"][:rows] = np.arange(rows)
        to["sources"][len(tokens) : T] = self.rows + slots[len(chunks) :]
        to["sample_slots"][: num_samples.sum()] = slots.repeat(num_samples)
        self._update_tables(step, to)
        if self.drafts:
            self._write_drafts(chunks, slots, to, shape, bounds)
        sequence = slots.repeat(counts)
        block, offset = np.divmod(indices, self.block_size)
        for g, table in enumerate(self._tables):
            first = table[sequence, block].astype(np.int64) * self.block_size
            _fill(to[f"slots_{g}"], first + offset, rows, -1)
        self.device_times.begin()  # not before: the device waits while the host writes
        self._copied.copy_(self._hosts[self._turn], non_blocking=True)
        return shape

    def step(self, shape: StepShape) -> Step:
        """The tensors of the step written last. Updates the block tables."""
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
            positions=at["positions"][:rows]
            if self.rope is None
            else _position_rows(at["positions"], rows),
            query_start=at["query_start"][: sequences + 1],
            seq_lens=at["seq_lens"][:sequences],
            logits_rows=at["logits_rows"][:wanted],
            groups=tuple(groups),
            state_slots=slots,
            **{name: values[:rows] for name, values in self.row_inputs.items()},
        )

    def keep_tokens(self, tokens: Tensor, slots: Tensor | None = None) -> None:
        """Keep sampled tokens as inputs of the next step: one for each of these slots, by default
        of the chunks that sample in the step written last.
        """
        if slots is None:
            slots = self.on_device["sample_slots"][: len(tokens)]
        self.last_tokens.index_copy_(0, slots, tokens)

    def draft_step(
        self, shape: StepShape, hidden: Tensor, *, images: bool = False
    ) -> tuple[Step, Tensor]:
        """The first draft step after the step written last: its rows, each with the next token.
        Logits are those of the row with the last accepted token of each sequence that samples.
        `keep_samples` was called for the step.

        hidden  [rows, D], the hidden states of the step
        images  the step has tokens of images: with the embeddings of the next tokens

        Returns the step and the indices [S] of the tokens with logits in their sequences.
        """
        at, rows, step = self.on_device, shape.rows, self.step(shape)
        tokens, first = at["next_tokens"][:rows], at["draft_rows"][: shape.sequences]
        depth = torch.arange(self.drafts, device=self.device)
        drafted = (first[:, None] + depth).clamp(max=rows - 1)
        equal = tokens[drafted] == step.input_ids[(drafted + 1).clamp(max=rows - 1)]
        equal &= depth < at["most_accepted"][: shape.sequences, None]
        last = first + equal.long().cumprod(-1).sum(-1)
        step = step._replace(input_ids=tokens, logits_rows=last, hidden=hidden)
        if images:
            following = self.row_inputs["embeddings"][:rows].roll(-1, 0)
            step = step._replace(embeddings=following, is_image=at["next_is_image"][:rows])
        return step, (step.positions if self.rope is None else at["indices"])[last]

    def drafting(self, sequences: int) -> Tensor:
        """[S] bool: which of the sequences that sample, in their order, are no padding."""
        return self.on_device["draft_slots"][:sequences] < self.slots

    def next_layer_step(self, step: Step, tokens: Tensor, hidden: Tensor) -> Step:
        """The draft step of the next draft layer: the same rows, each with the token after that of
        `step`.

        tokens   [S] i64, behind the rows with logits
        hidden   [rows, D]
        """
        ids, rows = step.input_ids, len(step.input_ids)
        ends = (step.query_start[1:].long() - 1).clamp(min=0)
        following = torch.cat([ids.roll(-1), ids[:1]]).index_copy(0, ends, ids[ends])
        drafting = self.drafting(len(tokens))
        following.index_copy_(0, step.logits_rows.where(drafting, rows), tokens)
        return step._replace(input_ids=following[:rows], hidden=hidden)

    def next_draft_step(
        self, shape: StepShape, tokens: Tensor, indices: Tensor, hidden: Tensor
    ) -> Step:
        """A further draft step: one row for each sequence that samples.

        tokens, indices   [S] i64; a row beyond the sequence's blocks writes nothing
        hidden            [S, D]
        """
        at, (_, sequences, _, columns) = self.on_device, shape
        slots, ends = at["draft_slots"][:sequences], at["draft_ends"][:sequences]
        drafting = self.drafting(sequences)
        written = drafting & (indices < ends)
        block, offset = indices // self.block_size, indices % self.block_size
        groups = []
        for table in self.tables:
            blocks = table[:, :columns].index_select(0, slots)
            place = blocks.gather(1, block.clamp(max=columns - 1)[:, None])[:, 0]
            groups.append(
                GroupStep(torch.where(written, place * self.block_size + offset, -1), blocks)
            )
        count = torch.arange(sequences + 1, dtype=torch.int32, device=self.device)
        positions = indices
        if self.rope is not None:
            positions = (indices + at["draft_deltas"][:sequences]).repeat(3, 1)
        return Step(
            input_ids=tokens,
            positions=positions,
            query_start=torch.minimum(count, drafting.sum().int()),
            seq_lens=torch.where(drafting, torch.minimum(indices + 1, ends), 0).int(),
            logits_rows=count[:-1].long(),
            groups=tuple(groups),
            state_slots=slots,
            hidden=hidden,
        )

    def keep_samples(self, tokens: Tensor) -> None:
        """Keep the tokens sampled by the step written last, for the draft step."""
        self.on_device["next_tokens"].index_copy_(
            0, self.on_device["sample_rows"][: len(tokens)], tokens
        )

    def _write_drafts(
        self, chunks: Sequence[Chunk], slots: Array, to: Arrays, shape: StepShape, bounds: Array
    ) -> None:
        """Write what draft steps need. The sequences that sample come first, then padding."""
        for chunk in chunks:
            if chunk.admission is not None:
                self._begins[chunk.slot] = chunk.start
        _fill(to["begins"], self._begins[slots], shape.sequences, 0)
        following: list[int] = []
        for chunk in chunks:
            following.extend(chunk.tokens[1:])
            following.append(chunk.next_token)
        _fill(to["next_tokens"], _i64(following), shape.rows, 0)
        drafting = [i for i, chunk in enumerate(chunks) if chunk.num_samples]
        first = _i64([bounds[i + 1] - chunks[i].num_samples for i in drafting])
        rows = [np.arange(start, bounds[i + 1]) for i, start in zip(drafting, first, strict=True)]
        slots = slots[drafting]
        most = _i64([chunks[i].most_accepted for i in drafting])
        if rows:
            sampled = np.concatenate(rows)
            to["sample_rows"][: len(sampled)] = sampled
        _fill(to["draft_rows"], first, shape.sequences, 0)
        _fill(to["most_accepted"], most, shape.sequences, 0)
        _fill(to["draft_slots"], slots, shape.sequences, self.slots)
        if self.rope is not None:
            _fill(to["draft_deltas"], self.rope.deltas[slots], shape.sequences, 0)
        _fill(to["draft_ends"], self._ends[:, slots].min(0, initial=2**31), shape.sequences, 0)

    def _write_positions(
        self,
        chunks: Sequence[Chunk],
        slots: Array,
        to: Arrays,
        rows: int,
        indices: Array,
        bounds: Array,
    ) -> None:
        """Write the positions of the tokens with these indices in their sequences."""
        if self.rope is None:
            _fill(to["positions"], indices, rows, 0)
            return
        positions = _position_rows(to["positions"], rows)
        positions[:, : len(indices)] = self.rope.positions(chunks, slots, indices, bounds)
        positions[:, len(indices) :] = 0
        if self.drafts:
            _fill(to["indices"], indices, rows, 0)

    def _write_image_masks(
        self, chunks: Sequence[Chunk], to: Arrays, rows: int, bounds: Array
    ) -> None:
        """Write which rows are tokens of images, and which are before one in the same chunk."""
        mask = _image_mask(chunks, bounds)
        _fill(to["is_image"], mask, rows, False)
        if self.drafts:
            following = np.roll(mask, -1)
            following[bounds[1:] - 1] = False
            _fill(to["next_is_image"], following, rows, False)

    def _update_tables(self, step: ScheduledStep, to: Arrays) -> None:
        """Write new blocks to the host tables, and their positions to the step."""
        new_blocks = [(chunk.slot, chunk.blocks) for chunk in step.chunks]
        new_blocks += step.decoding.blocks
        for g, table in enumerate(self._tables):
            places: list[int] = []
            blocks: list[int] = []
            for slot, of_groups in new_blocks:
                start, new = of_groups[g]
                if new:
                    end = start + len(new)
                    table[slot, start:end] = new
                    self._ends[g, slot] = end * self.block_size
                    places += range(slot * self.columns + start, slot * self.columns + end)
                    blocks += new
            where, what = _i64(places), np.array(blocks, np.int32)
            if len(where) > self.num_updates:  # many long cached prompts in one step
                self.tables[g].view(-1)[torch.from_numpy(where).to(self.device)] = torch.from_numpy(
                    what
                ).to(self.device)
                where, what = where[:0], what[:0]
            padding = self.slots * self.columns
            _fill(to[f"new_places_{g}"], where, self.num_updates, padding)
            _fill(to[f"new_blocks_{g}"], what, self.num_updates, 0)

    def _field_sizes(self, *, images: bool) -> tuple[Sizes, Sizes, Sizes]:
        """The sizes of the fields that are flags, int32 and int64."""
        rows, sequences = self.rows, self.sequences
        flags = {"is_image": rows} if images else {}
        i32 = {"query_start": sequences + 1, "seq_lens": sequences}
        if self.lora is not None:
            i32["lora_rows"] = rows
        i64 = {
            "positions": rows if self.rope is None else 3 * rows,
            "logits_rows": rows,
            "sources": rows,
            "sequence_slots": sequences,
            "sample_slots": rows,
        }
        for g in range(self.num_groups):
            i32[f"new_blocks_{g}"] = self.num_updates
            i64 |= {f"slots_{g}": rows, f"new_places_{g}": self.num_updates}
        if self.drafts:
            i64 |= {
                "next_tokens": rows,
                "sample_rows": rows,
                "draft_rows": sequences,
                "most_accepted": sequences,
                "draft_slots": sequences,
                "draft_ends": sequences,
                "begins": sequences,
            }
            if self.rope is not None:
                i64 |= {"indices": rows, "draft_deltas": sequences}
            if images:
                flags["next_is_image"] = rows
        i64["tokens"] = rows  # last field: `last_tokens` follows it on the device
        return flags, i32, i64

    def _arrays(self, memory: Tensor) -> Arrays:
        return {
            name: memory[start:end].view(dtype).numpy()
            for name, (dtype, start, end) in self._fields.items()
        }


def _i64(values: Sequence[int]) -> Array:
    return np.array(values, np.int64)


def _fill(to: Array, values: Array, size: int, padding: int) -> None:
    count = len(values)
    to[:count] = values
    to[count:size] = padding


def _position_rows(positions: Rows, rows: int) -> Rows:
    """[3, rows], contiguous, at the beginning of an array with room for more."""
    return positions[: 3 * rows].reshape(3, rows)


def _image_mask(chunks: Sequence[Chunk], bounds: Array) -> Array:
    """[T] bool: which rows are tokens of images."""
    mask = np.zeros(int(bounds[-1]), bool)
    for chunk, start in zip(chunks, bounds.tolist(), strict=False):
        for image in chunk.images:
            mask[start + image.row : start + image.row + image.length] = True
    return mask


def _field_layout(flags: Sizes, i32: Sizes, i64: Sizes) -> dict[str, tuple[torch.dtype, int, int]]:
    """Dtype, start and end byte of each field, packed with 16-byte alignment."""
    fields, at = {}, 0
    for dtype, sizes in ((torch.bool, flags), (torch.int32, i32), (torch.int64, i64)):
        width = dtype.itemsize
        for name, size in sizes.items():
            at = -(-at // 16) * 16
            fields[name] = dtype, at, at + width * size
            at += width * size
    return fields
