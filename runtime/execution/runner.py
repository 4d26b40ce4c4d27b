"""Model runner: owns the caches and input tensors, and runs steps on them."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from atomc.errors import first_line
from atomc.ops.state import groups_of
from atomc.program import Program
from atomc.replay.cudagraphs import Capturing, Pool, why_syncing
from atomc.runtime.execution.device_times import DeviceTimes
from atomc.runtime.execution.draft import DraftRunner
from atomc.runtime.execution.graphs import StepGraphs, smallest_shape
from atomc.runtime.execution.input_batch import InputBatch, StepShape
from atomc.runtime.execution.programs import Programs
from atomc.runtime.execution.sequence_states import SequenceStates
from atomc.runtime.execution.variants import VARIANTS
from atomc.runtime.processes.garbage_collection import gc_disabled
from atomc.runtime.scheduling.state_rows import StateRows
from atomc.runtime.scheduling.step import ScheduledStep, StepSize

SPARE_SEQUENCES = 8  # used by the shapes of mixed steps, see graphs.step_shapes


class Runner:
    """Runs steps of programs over caches that it allocates: blocks of block_size tokens, and slots
    of per-sequence state.

    num_blocks       per group of the programs' state, or one number for all groups
    max_num_seqs, max_num_rows, max_columns   maximum sequences and tokens of a step, and blocks of
                                              a sequence
    state_rows       rows of per-sequence state; None: max_num_seqs slots. Padding steps need none
    device_times     as in InputBatch

    caches    tensors by role, for each layer with state
    variants  by name, that of text last
    draft     proposes tokens after each step, for which the programs also return the hidden states
              that it reads
    shapes    of steps, in ascending order, to which those without a graph are padded if a program
              repeats them
    missing   shapes to capture later, and the number of steps that were padded to larger ones
    steps     number of steps by kind: "full graph", or "eager: " with the reason; then the label of
              their variant
    rows, padding   rows of steps that ran as a graph, and padding rows added to them
    """

    def __init__(
        self,
        programs: Programs,
        *,
        num_blocks: int | Sequence[int],
        block_size: int,
        max_num_seqs: int,
        max_num_rows: int,
        max_columns: int,
        state_rows: StateRows | None = None,
        device_times: DeviceTimes | None = None,
    ) -> None:
        self.programs, self.program, self.pipeline = programs, programs.main, programs.pipeline
        num_groups, rows = len(groups_of(self.program.specs)), state_rows or StateRows(max_num_seqs)
        counts = [num_blocks] * num_groups if isinstance(num_blocks, int) else list(num_blocks)
        self._num_blocks, self._block_size, self._state_rows = counts, block_size, rows
        self.input_batch = InputBatch(
            rows=max_num_rows,
            sequences=max_num_seqs + SPARE_SEQUENCES,
            columns=max_columns,
            block_size=block_size,
            num_groups=num_groups,
            slots=rows.slots,
            drafts=0 if programs.draft is None else programs.draft.count,
            takes=programs.takes,
            merge_size=programs.merge_size,
            host_buffers=2 * self.pipeline.most_micro_batches,
            device=self.program.device,
            device_times=device_times,
        )
        self.variants = {
            name: VARIANTS[name](program, self.input_batch)
            for name, program in programs.steps.items()
        }
        self.draft: DraftRunner | None = None
        if programs.draft is not None:
            self.draft = DraftRunner(programs.draft, self.input_batch, counts, rows.slots)
        self.allocate()
        self.pool: Pool | None = None  # of all graphs
        self.missing: dict[StepShape, int] = {}
        self.shapes: Sequence[StepShape] = ()
        self._shape = StepShape(0, 0, 0, 0)  # of the step that ran last
        self._kind = "text"  # its variant
        self.why_eager = "on a CPU" if self.program.device.type != "cuda" else "not captured"
        self.steps: Counter[str] = Counter()
        self.rows = self.padding = 0

    def allocate(self) -> None:
        """Create the caches, zeroed, and bind the programs to them; also again after `free`."""
        specs, device = self.program.specs, self.program.device
        self._states = SequenceStates(specs, self._state_rows, device)
        self.caches = [
            self._states.of(index)
            if spec.group is None
            else spec.allocate(self._num_blocks[spec.group], self._block_size, device)
            for index, spec in enumerate(specs)
        ]
        self.bind()
        if self.draft is not None:
            self.draft.allocate()

    def drop_graphs(self) -> None:
        """Drop the CUDA graphs. Further steps run without."""
        for variant in self.variants.values():
            variant.graphs = None
        if self.draft is not None:
            self.draft.graphs = None
        self.pool = None
        self.missing.clear()

    def free(self) -> None:
        """Drop the caches and the CUDA graphs, which read them. No step may run until `allocate`;
        then graphs are captured again.
        """
        self._states, self.caches = SequenceStates((), self._state_rows, "cpu"), []
        self.drop_graphs()
        if self.draft is not None:
            self.draft.caches = []
        for program in self.programs.all:
            program.unbind()
            program.report.cuda_graphs.clear()

    def bind(self) -> None:
        """Let the programs use the caches of this runner."""
        for program in self.programs.target:
            program.bind(self.caches)

    def capture(
        self,
        shapes: Sequence[StepShape],
        later: Sequence[StepShape] = (),
        *,
        budget: int | None = None,
        agree: Callable[[int], int] = lambda left: left,
        kernels_loaded: bool = False,
        capturing: Capturing = nullcontext,
    ) -> None:
        """Capture CUDA graphs of these shapes; on a CPU, and if an op synchronizes, do nothing.
        later: missing then. budget, agree, kernels_loaded: as in StepGraphs; capturing: as in Pool.
        """
        if self.program.device.type != "cuda":
            return
        if self.program.syncing:
            self.why_eager = why_syncing(self.program.syncing)
            note = f"no CUDA graphs: {self.why_eager}"
            if note not in self.program.report.notes:  # of a capture before the engine slept
                self.program.report.notes.append(note)
            return
        self.input_batch.write(
            None,
            shapes[0]._replace(rows=self.input_batch.rows, sequences=self.input_batch.sequences),
        )
        self.pool = Pool(self.program.device, capturing)
        graphs = partial(
            StepGraphs,
            pool=self.pool,
            budget=budget,
            agree=agree,
            kernels_loaded=kernels_loaded,
        )
        *others, text = self.variants.values()
        text.graphs = graphs(partial(self._run, text.program), shapes, text.program.report)
        captured = [shape for shape in shapes if shape in text.graphs.captured]
        if self.draft is not None:
            report = self.draft.layers[0]["text"].report
            self.draft.graphs = graphs(self.draft.propose, captured, report)
        # Last: what graphs save in a prompt with images, the others save in each of its tokens.
        for variant in others:
            if not variant.program.syncing:
                run = partial(self._run, variant.program)
                variant.graphs = graphs(run, variant.shapes(captured), variant.program.report)
        self.missing = dict.fromkeys(later if captured else (), 0)

    def capture_missing(self, shape: StepShape) -> None:
        """Capture the graphs of a missing shape, between two steps: runs nothing. If it fails,
        those of the missing shapes are left out, with a note.
        """
        del self.missing[shape]
        graphs = [one.graphs for one in self.variants.values() if one.shapes([shape])]
        if self.draft is not None:
            graphs.insert(0, self.draft.graphs)  # steps of this shape propose with it
        try:
            with gc_disabled():
                for one in graphs:
                    if one is not None and one.captured:
                        one.capture(shape)
        except RuntimeError as error:  # out of memory, or what cannot be captured
            self.missing.clear()
            why = first_line(error) or type(error).__name__
            self.program.report.notes.append(f"CUDA graphs are left out: {why}")

    def empty_step(self, shape: StepShape) -> Tensor:
        """Logits of a padding step of text of this shape, after those of the other variants that
        may have it. The draft model runs after each.
        """
        padded = self.input_batch.write(None, shape)
        for name, variant in self.variants.items():
            if variant.has_shape(shape):
                logits = self._run(variant.program, padded)
                if self.draft is not None:
                    self.draft.propose(shape, name)
        return logits

    def logits(self, step: ScheduledStep) -> Tensor:
        """Logits [R, V] of the output rows of the step's chunks, on the device; the next call may
        overwrite them. Before the last stage of a pipeline, which has them: its states [T, D].
        """
        return self._staged(step, self._logits)

    def _staged(self, step: ScheduledStep, run: Callable[[ScheduledStep], Tensor]) -> Tensor:
        """The results of `run`, for the whole step or in micro-batches."""
        if copies := step.copies_before:
            self.input_batch.device_times.begin()
            self._states.copy(copies)
        pipeline, stage = self.pipeline, self.pipeline.stage
        if (expected := pipeline.expected_tokens()) is not None:
            self.input_batch.keep_tokens(*expected)
        results, states = [], []
        parts = pipeline.micro_batches(step)
        draft = self.draft if len(parts) > 1 else None
        for part in parts:
            if not stage.is_first:
                pipeline.receive(self.input_batch.row_inputs["hidden"], part.num_tokens)
            result = run(part)
            if not stage.is_last:
                pipeline.send(result[: part.num_tokens])
            results.append(result.clone() if part is not parts[-1] else result)
            if draft is not None:
                states.append(draft.hidden[: part.num_tokens].clone())
        self._states.copy(step.snapshots)
        if draft is not None:  # it reads the whole step
            self._shape = self.input_batch.write(step)
            draft.keep([torch.cat(states)])
        return results[0] if len(results) == 1 else torch.cat(results)

    def _logits(self, step: ScheduledStep) -> Tensor:
        self._kind, variant = next(
            (name, variant) for name, variant in self.variants.items() if variant.runs(step)
        )
        graphs, size = variant.graphs, step.padded_size
        if graphs is None:
            captured = self.variants["text"].graphs is not None
            reason = why_syncing(variant.program.syncing) if captured else self.why_eager
        elif size.pooled:
            reason = "another rank computes hidden states"
        elif shape := self._captured_shape(graphs, size):
            self.steps[f"full graph{variant.label}"] += 1
            return self._replay(graphs, step, shape)
        elif size.wanted > size.sequences:
            reason = f"{size.rows} rows, {size.wanted} of them wanted"
        else:
            reason = "more rows than any graph"
        self.steps[f"eager: {reason}{variant.label}"] += 1
        return self._eager(variant.program, step, size)

    def _captured_shape(self, graphs: StepGraphs, size: StepSize) -> StepShape | None:
        """The smallest captured shape for such a step, or None; a smaller one that is missing is
        counted.
        """
        needs = (size.rows, size.sequences, size.wanted, size.longest)
        smallest = smallest_shape(self.shapes, *needs)
        if smallest in graphs.captured:
            return smallest
        if smallest in self.missing:
            self.missing[smallest] += 1
        return graphs.shape_for(*needs)

    def _replay(self, graphs: StepGraphs, step: ScheduledStep, shape: StepShape) -> Tensor:
        self.rows += step.num_tokens
        self.padding += shape.rows - step.num_tokens
        return self._padded(step, shape, graphs)

    def _padded(
        self, step: ScheduledStep, shape: StepShape, run: Callable[[StepShape], Tensor]
    ) -> Tensor:
        """The results of a step that runs with this shape, without those of padding."""
        rows = step.num_tokens
        self._shape = self.input_batch.write(step, shape)
        if self._kind == "images":
            # Those of an earlier step.
            self.input_batch.row_inputs["embeddings"][rows : shape.rows].zero_()
        results = run(shape)
        if not self.pipeline.stage.is_last:
            return results[:rows]
        return results[: step.num_output_rows]

    def propose(self, step: ScheduledStep, tokens: Tensor | None) -> Tensor | None:
        """Draft tokens [chunks that sample, k] i64 after the step that ran last, on the device;
        None without a draft model.

        tokens  sampled in this step; None: none were
        """
        if self.draft is None:
            return None
        if tokens is not None:
            self.input_batch.keep_samples(tokens)
        graphs = self.draft.graphs
        if graphs is not None and self._kind == "text" and self._shape in graphs.captured:
            drafts = graphs(self._shape)
        else:  # draft steps with images have no graphs: one in a prompt, of a single layer
            drafts = self.draft.propose(self._shape, self._kind)
        return drafts[: sum(chunk.num_samples > 0 for chunk in step.chunks)].clone()

    def forget_counts(self) -> None:
        self.steps.clear()
        self.missing = dict.fromkeys(self.missing, 0)
        self.rows = self.padding = 0

    def hidden(self, step: ScheduledStep) -> Tensor:
        """Hidden states [R, D] of the output rows of the step's chunks."""
        program = self.programs.hidden
        assert program is not None, "prepare_pooling was not called"
        self.steps["eager: hidden states"] += 1
        return self._staged(step, lambda part: self._eager(program, part, part.padded_size))

    def _eager(self, program: Program, step: ScheduledStep, size: StepSize) -> Tensor:
        if program.repeats:
            shape = smallest_shape(self.shapes, *size[:4])
            if shape is not None:
                return self._padded(step, shape, partial(self._run, program, repeat=True))
        # Draft steps have a row for each sequence.
        sequences = 1 if self.draft is None else size.sequences
        self._shape = self.input_batch.write(step, num_rows=size.rows, num_sequences=sequences)
        return self._run(program, self._shape)

    def _run(self, program: Program, shape: StepShape, *, repeat: bool = False) -> Tensor:
        # A user's module may have parameters that require gradients.
        with torch.no_grad():
            first, *hidden = program.outputs(self.input_batch.step(shape), repeat=repeat)
        if self.draft is not None and hidden:
            self.draft.keep(hidden)
        return first
