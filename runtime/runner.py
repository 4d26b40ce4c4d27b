"""Runs steps: owns the caches, and keeps tensors from the scheduler."""

import torch
from torch import Tensor

from atomc.program import Program
from atomc.runtime.batch import step_tensors
from atomc.runtime.graphs import StepGraphs, step_shapes
from atomc.runtime.sampler import Sampler
from atomc.runtime.scheduler import ScheduledStep


class Runner:
    """Steps of a program over caches of num_blocks blocks of block_size tokens, which it allocates.

    Raises ValueError if a layer keeps a kind of state that cannot be paged.
    """

    def __init__(self, program: Program, *, num_blocks: int, block_size: int, max_num_seqs: int = 256) -> None:
        for spec in program.specs:
            if spec.kind != "kv":
                raise ValueError(f"{spec.name} keeps state of kind {spec.kind!r}, the runtime has only 'kv'")
        self.program = program
        self.num_groups = max((spec.group for spec in program.specs), default=0) + 1
        self.caches = [spec.allocate(num_blocks, block_size, program.device) for spec in program.specs]
        program.bind(self.caches)
        self.sampler = Sampler(program.device, max_num_seqs)
        self.graphs: StepGraphs | None = None
        self.steps = {"graph": 0, "eager": 0}

    def capture(self, *, max_num_seqs: int, max_num_rows: int, max_blocks: int, progress: bool = True) -> None:
        """Capture CUDA graphs of steps of so many sequences and rows, on a GPU, where that can be done."""
        if self.program.device.type != "cuda":
            return
        if self.program.syncing:
            self.program.report.notes.append(f"no CUDA graphs: {', '.join(self.program.syncing)} wait for the device")
        else:
            self.graphs = StepGraphs(self.program, step_shapes(max_num_seqs, max_num_rows), max_blocks=max_blocks,
                                     num_groups=self.num_groups, progress=progress)  # fmt: skip

    def logits(self, step: ScheduledStep, *, num_rows: int = 0) -> Tensor:
        """Logits [R, V], one row for each of step.draws, on the device; num_rows as in step_tensors."""
        tensors = step_tensors(step, num_groups=self.num_groups, device=self.program.device, num_rows=num_rows)
        # A module of somebody else may still want gradients.
        with torch.no_grad():
            shape = self.graphs.shape_for(tensors) if self.graphs is not None else None
            if self.graphs is not None and shape is not None:
                self.steps["graph"] += 1
                return self.graphs(tensors, shape)
            self.steps["eager"] += 1
            return self.program(tensors)

    def run(self, step: ScheduledStep) -> list[int]:
        """The drawn tokens, one for each of step.draws."""
        logits = self.logits(step)
        return self.sampler(logits, step.draws).tokens.tolist() if step.draws else []
