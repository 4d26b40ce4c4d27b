"""Model runner: owns the caches and input tensors, and runs steps on them."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from atomc.compiler.cudagraphs import Pool, why_syncing
from atomc.ops.state import groups_of
from atomc.program import Program
from atomc.runtime.execution.draft import DraftProgram, DraftRunner
from atomc.runtime.execution.graphs import StepGraphs
from atomc.runtime.execution.input_batch import InputBatch, StepShape
from atomc.runtime.execution.pipeline import Pipeline
from atomc.runtime.execution.sequence_states import SequenceStates
from atomc.runtime.scheduling.state_rows import StateRows
from atomc.runtime.scheduling.step import ScheduledStep

SPARE_SEQUENCES = 8  # used by the shapes of mixed steps, see graphs.step_shapes


class Runner:
    """Runs a program's steps over caches that it allocates: blocks of block_size tokens, and slots
    of per-sequence state.

    num_blocks       per group of the program's state, or one number for all groups
    max_num_seqs, max_num_rows, max_columns   maximum sequences and tokens of a step, and blocks of
                                              a sequence
    state_rows       rows of per-sequence state; None: max_num_seqs slots. Padding steps need none
    draft            proposes tokens after each step; the program then also returns the hidden
                     states that it reads
    image_program    the program of steps with images, over the same caches; merge_size: patches of
                     an image in a row and a column for one token
    lora_program     the program of steps in which a row has a LoRA adapter, over the same caches
    pipeline         the program is that of a stage: its steps run in micro-batches, from the states
                     of the previous stage

    caches   tensors by role, for each layer with state
    steps    number of steps by kind: "full graph", or "eager: " with the reason; ", with images" or
             ", with adapters" if it ran one of these programs
    rows, padding   rows of steps that ran as a graph, and padding rows added to them
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
        state_rows: StateRows | None = None,
        draft: DraftProgram | None = None,
        image_program: Program | None = None,
        merge_size: int = 1,
        lora_program: Program | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        self.program, self.image_program, self.pipeline = program, image_program, pipeline
        self.lora_program = lora_program
        num_groups, rows = len(groups_of(program.specs)), state_rows or StateRows(max_num_seqs)
        slots = rows.slots
        counts = [num_blocks] * num_groups if isinstance(num_blocks, int) else list(num_blocks)
        self._num_blocks, self._block_size, self._state_rows = counts, block_size, rows
        self._allocate()
        self.input_batch = InputBatch(
            rows=max_num_rows,
            sequences=max_num_seqs + SPARE_SEQUENCES,
            columns=max_columns,
            block_size=block_size,
            num_groups=num_groups,
            slots=slots,
            drafts=draft.count if draft is not None else 0,
            mrope=program.takes.mrope,
            merge_size=merge_size,
            embeddings=None if image_program is None else image_program.takes.embeddings,
            lora=lora_program is not None,
            host_buffers=2 if pipeline is None else 2 * pipeline.most_micro_batches,
            device=program.device,
        )
        self.received: Tensor | None = None
        if program.takes.hidden is not None:
            width, dtype = program.takes.hidden
            self.received = torch.zeros(max_num_rows, width, dtype=dtype, device=program.device)
        self.draft = None if draft is None else DraftRunner(draft, self.input_batch, counts, slots)
        self.draft_graphs: StepGraphs | None = None
        self.lora_graphs: StepGraphs | None = None
        self.image_graphs: StepGraphs | None = None
        self.pool: Pool | None = None  # of all graphs
        self._shape = StepShape(0, 0, 0, 0)  # of the step that ran last
        self.graphs: StepGraphs | None = None
        self.why_eager = "on a CPU" if program.device.type != "cuda" else "not captured"
        self.steps: Counter[str] = Counter()
        self.rows = self.padding = 0

    def _allocate(self) -> None:
        """Create the caches, zeroed, and bind the programs to them."""
        specs, device = self.program.specs, self.program.device
        self._states = SequenceStates(specs, self._state_rows, device)
        self.caches = [
            self._states.of(index)
            if spec.group is None
            else spec.allocate(self._num_blocks[spec.group], self._block_size, device)
            for index, spec in enumerate(specs)
        ]
        self.bind()

    def drop_graphs(self) -> None:
        """Drop the CUDA graphs. Further steps run without."""
        self.graphs = self.lora_graphs = self.draft_graphs = self.image_graphs = None
        self.pool = None

    def free(self) -> None:
        """Drop the caches and the CUDA graphs, which read them. No step may run until `allocate`;
        then graphs are captured again.
        """
        self._states, self.caches = SequenceStates((), self._state_rows, "cpu"), []
        self.drop_graphs()
        programs = [self.program, self.image_program, self.lora_program]
        if self.draft is not None:
            self.draft.caches = []
            programs += [self.draft.program, self.draft.image_program]
        for program in programs:
            if program is not None:
                program.unbind()
                program.report.cuda_graphs.clear()

    def allocate(self) -> None:
        """Create the caches again after `free`, zeroed."""
        self._allocate()
        if self.draft is not None:
            self.draft.allocate()

    def bind(self) -> None:
        """Let the programs use the caches of this runner."""
        for program in (self.program, self.image_program, self.lora_program):
            if program is not None:
                program.bind(self.caches)

    def capture(
        self,
        shapes: Sequence[StepShape],
        *,
        budget: int | None = None,
        agree: Callable[[int], int] = lambda left: left,
        kernels_loaded: bool = False,
        progress: bool = True,
    ) -> None:
        """Capture CUDA graphs of these shapes; on a CPU, and if an op synchronizes, do nothing.
        budget, agree, kernels_loaded: as in StepGraphs.
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
        self.pool = Pool(self.program.device)
        graphs = partial(
            StepGraphs,
            pool=self.pool,
            budget=budget,
            agree=agree,
            kernels_loaded=kernels_loaded,
            progress=progress,
        )
        self.graphs = graphs(partial(self._run, self.program), shapes, self.program.report)
        captured = [shape for shape in shapes if shape in self.graphs.captured]
        if self.lora_program is not None:
            self.lora_graphs = graphs(
                partial(self._run, self.lora_program), captured, self.lora_program.report
            )
        if self.draft is not None:
            self.draft_graphs = graphs(self.draft.propose, captured, self.draft.program.report)
        # Last: what they save in a prompt, the others save in each of its tokens. Those of a prompt
        # alone first, whose logits take less memory than those of all sequences.
        if self.image_program is not None and not self.image_program.syncing:
            captured.sort(key=lambda shape: shape.wanted)
            prompts = [s for s in captured if s.rows > s.sequences and not s.is_decode]
            self.image_graphs = graphs(
                partial(self._run, self.image_program), prompts, self.image_program.report
            )

    def padding_only(self, num_output_rows: int) -> Tensor:
        """Logits of a padding step of maximum size."""
        return self.empty_step(
            StepShape(
                self.input_batch.rows,
                self.input_batch.sequences,
                num_output_rows,
                self.input_batch.columns,
            )
        )

    def empty_step(self, shape: StepShape) -> Tensor:
        """Logits of a padding step of this shape, after which the draft model ran too, and before
        that the program of steps with adapters, and, unless it is a decode step, those of steps
        with images.
        """
        padded = self.input_batch.write(None, shape)
        if self.lora_program is not None:
            self._run(self.lora_program, padded)
        if self.image_program is not None and shape.rows > shape.sequences:
            self._run(self.image_program, padded)
            if self.draft is not None:
                self.draft.propose(shape, images=True)
        logits = self._run(self.program, padded)
        if self.draft is not None:
            self.draft.propose(shape)
        return logits

    def logits(self, step: ScheduledStep, *, num_rows: int = 0) -> Tensor:
        """Logits [R, V] of the output rows of the step's chunks, on the device; the next call may
        overwrite them. Before the last stage of a pipeline, which has them: its states [T, D].

        num_rows   pad to this many rows, which does not change the results
        """
        return self._in_stage(step, partial(self._logits, num_rows=num_rows))

    def _in_stage(self, step: ScheduledStep, run: Callable[[ScheduledStep], Tensor]) -> Tensor:
        """The results of `run`, for the whole step or in micro-batches."""
        self._states.copy(step.copies_before)
        if self.pipeline is None:
            results = run(step)
        else:
            self._keep_expected_tokens(self.pipeline)
            results = self._in_micro_batches(self.pipeline, step, run)
        self._states.copy(step.copies_after)
        return results

    def _in_micro_batches(
        self, pipeline: Pipeline, step: ScheduledStep, run: Callable[[ScheduledStep], Tensor]
    ) -> Tensor:
        results = []
        parts = pipeline.micro_batches(step)
        for part in parts:
            if self.received is not None:
                pipeline.receive(self.received, part.num_tokens)
            result = run(part)
            if not pipeline.stage.is_last:
                pipeline.send(result[: part.num_tokens])
            results.append(result.clone() if part is not parts[-1] else result)
        return results[0] if len(results) == 1 else torch.cat(results)

    def _keep_expected_tokens(self, pipeline: Pipeline) -> None:
        expected = pipeline.expected_tokens()
        if expected is not None:
            self.input_batch.keep_tokens(*expected)

    def _logits(self, step: ScheduledStep, num_rows: int) -> Tensor:
        program, graphs, kind = self._program_of(step)
        size = step.padded_size
        if graphs is None:
            reason = self.why_eager if self.graphs is None else why_syncing(program.syncing)
        elif size.pooled:
            reason = "another rank computes hidden states"
        elif shape := graphs.shape_for(size.rows, size.sequences, size.wanted, size.longest):
            self.steps[f"full graph{kind}"] += 1
            return self._in_graph(graphs, step, shape)
        elif size.wanted > size.sequences:
            reason = f"{size.rows} rows, {size.wanted} of them wanted"
        else:
            reason = "more rows than any graph"
        self.steps[f"eager: {reason}{kind}"] += 1
        return self._eager(program, step, num_rows)

    def _program_of(self, step: ScheduledStep) -> tuple[Program, StepGraphs | None, str]:
        """The program of this step, its graphs, and what `steps` says of it."""
        if self.image_program is not None and step.has_images:
            return self.image_program, self.image_graphs, ", with images"
        lora = self.input_batch.lora
        if lora is not None and lora.update(step.chunks):
            assert self.lora_program is not None, "the rows of adapters are those of its steps"
            return self.lora_program, self.lora_graphs, ", with adapters"
        return self.program, self.graphs, ""

    def _in_graph(self, graphs: StepGraphs, step: ScheduledStep, shape: StepShape) -> Tensor:
        rows = step.num_tokens
        self._shape = self.input_batch.write(step, shape)
        self.rows += rows
        self.padding += shape.rows - rows
        if self.input_batch.embeddings is not None and step.has_images:
            self.input_batch.embeddings[rows : shape.rows].zero_()  # of an earlier step
        results = graphs(shape)
        if self.pipeline is not None and not self.pipeline.stage.is_last:
            return results[:rows]
        return results[: sum(chunk.num_output_rows for chunk in step.chunks)]

    def propose(self, step: ScheduledStep, tokens: Tensor | None) -> Tensor | None:
        """Draft tokens [chunks that sample, k] i64 after the step that ran last, on the device;
        None without a draft model.

        tokens  sampled in this step; None: none were
        """
        if self.draft is None:
            return None
        if tokens is not None:
            self.input_batch.keep_samples(tokens)
        graphs = self.draft_graphs
        images = self.image_program is not None and step.has_images
        if graphs is not None and not images and self._shape in graphs.captured:
            found = graphs(self._shape)
        else:  # draft steps with images have no graphs: one in a prompt, of a single layer
            found = self.draft.propose(self._shape, images=images)
        return found[: sum(chunk.num_samples > 0 for chunk in step.chunks)].clone()

    def forget_counts(self) -> None:
        self.steps.clear()
        self.rows = self.padding = 0

    def hidden(self, program: Program, step: ScheduledStep) -> Tensor:
        """Hidden states [R, D] of the output rows of the step's chunks. program: returns hidden
        states instead of logits.
        """
        self.steps["eager: hidden states"] += 1
        return self._in_stage(step, lambda part: self._eager(program, part, num_rows=0))

    def _eager(self, program: Program, step: ScheduledStep, num_rows: int) -> Tensor:
        num_rows = max(num_rows, step.padded_size.rows)
        self._shape = self.input_batch.write(step, num_rows=num_rows)
        return self._run(program, self._shape)

    def _run(self, program: Program, shape: StepShape) -> Tensor:
        # A user's module may have parameters that require gradients.
        with torch.no_grad():
            step = self.input_batch.step(shape)
            if self.received is not None:
                step = step._replace(hidden=self.received[: shape.rows])
            first, *hidden = program.outputs(step)
        if self.draft is not None and hidden:
            self.draft.keep(hidden)
        return first
