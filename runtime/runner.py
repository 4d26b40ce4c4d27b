"""Runs steps: owns the state, and keeps tensors from the scheduler."""

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from atomc.ops.state import groups_of
from atomc.program import Program
from atomc.runtime.batch import InputBatch, Shape
from atomc.runtime.capacity import SPARE_SLOTS
from atomc.runtime.graphs import StepGraphs
from atomc.runtime.step import ScheduledStep

SPARE_SEQUENCES = 8  # for the shapes of mixed steps, see graphs.step_shapes


class Runner:
    """Steps of a program over state that it allocates: in blocks of block_size tokens, and in slots
    of sequences.

    num_blocks       for each group of the program's state, or the same for all
    max_num_seqs, max_num_rows, max_columns   sequences, tokens and blocks of a sequence in the
                                              largest step
    num_slots        of sequences; None: max_num_seqs. Fewer are enough for steps of padding

    caches  the tensors by role, for each layer with state
    steps counts how they ran: "full graph", or "eager: " and the reason. rows counts the rows of
    those that ran as a graph, padding the rows that were added to fit one.
    """

    def __init__(
        self,
        program: Program,
        *,
        num_blocks: int | Sequence[int],
        block_size: int,
        max_num_seqs: int,
        max_num_rows: int,
        max_columns: int,
        num_slots: int | None = None,
    ) -> None:
        self.program = program
        num_groups, slots = (
            len(groups_of(program.specs)),
            max_num_seqs if num_slots is None else num_slots,
        )
        counts = [num_blocks] * num_groups if isinstance(num_blocks, int) else list(num_blocks)
        self.caches = [
            spec.allocate(
                0 if spec.group is None else counts[spec.group],
                block_size,
                program.device,
                slots=slots + SPARE_SLOTS,
            )
            for spec in program.specs
        ]
        program.bind(self.caches)
        self.staging = InputBatch(
            rows=max_num_rows,
            sequences=max_num_seqs + SPARE_SEQUENCES,
            columns=max_columns,
            block_size=block_size,
            num_groups=num_groups,
            slots=slots,
            device=program.device,
        )
        self.graphs: StepGraphs | None = None
        self.why_eager = "on a CPU" if program.device.type != "cuda" else "not captured"
        self.steps: Counter[str] = Counter()
        self.rows = self.padding = 0

    def capture(
        self,
        shapes: Sequence[Shape],
        *,
        budget: int | None = None,
        met: bool = False,
        progress: bool = True,
    ) -> None:
        """Capture CUDA graphs of steps of these shapes, on a GPU, where that can be done. budget,
        met: as in StepGraphs.
        """
        if self.program.device.type != "cuda":
            return
        if self.program.syncing:
            self.why_eager = f"{', '.join(self.program.syncing)} wait for the device"
            self.program.report.notes.append(f"no CUDA graphs: {self.why_eager}")
            return
        self.staging.write(
            None, shapes[0]._replace(rows=self.staging.rows, sequences=self.staging.sequences)
        )
        self.graphs = StepGraphs(
            partial(self._run, self.program),
            shapes,
            self.program.report,
            self.program.device,
            budget=budget,
            met=met,
            progress=progress,
        )

    def padding_only(self, num_output_rows: int) -> Tensor:
        """Logits of a step as large as any, all padding."""
        return self.empty_step(
            Shape(self.staging.rows, self.staging.sequences, num_output_rows, self.staging.columns)
        )

    def empty_step(self, shape: Shape) -> Tensor:
        """Logits of a step of this shape that is all padding."""
        return self._run(self.program, self.staging.write(None, shape))

    def logits(self, step: ScheduledStep, *, num_rows: int = 0) -> Tensor:
        """Logits [R, V] of the rows that the step's chunks want, on the device; the next call may
        overwrite them.

        num_rows > the step's tokens pads to so many, which changes no result.
        """
        rows, sequences = step.num_tokens, len(step.chunks)
        wanted = sum(chunk.num_output_rows for chunk in step.chunks)
        if self.graphs is not None:
            longest = max(chunk.num_tokens for chunk in step.chunks)
            shape = self.graphs.shape_for(rows, sequences, wanted, longest)
            if shape is not None:
                self.staging.write(step, shape)
                self.steps["full graph"] += 1
                self.rows += rows
                self.padding += shape.rows - rows
                return self.graphs(shape)[:wanted]
            reason = (
                f"{rows} rows, {wanted} of them wanted"
                if wanted > sequences
                else "more rows than any graph"
            )
        else:
            reason = self.why_eager
        self.steps[f"eager: {reason}"] += 1
        return self._eager(self.program, step, num_rows)

    def forget_counts(self) -> None:
        self.steps.clear()
        self.rows = self.padding = 0

    def hidden(self, program: Program, step: ScheduledStep) -> Tensor:
        """Hidden states [R, D] of the rows that the step's chunks want, by a program that returns
        them.
        """
        self.steps["eager: hidden states"] += 1
        return self._eager(program, step)

    def _eager(self, program: Program, step: ScheduledStep, num_rows: int = 0) -> Tensor:
        return self._run(program, self.staging.write(step, num_rows=num_rows))

    def _run(self, program: Program, shape: Shape) -> Tensor:
        # A module of somebody else may still want gradients.
        with torch.no_grad():
            return program(self.staging.step(shape))
