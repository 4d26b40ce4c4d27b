"""The kinds of steps of a model: each is run by a program of its own, over the same caches."""

from collections.abc import Sequence

from atomc.program import Program
from atomc.runtime.execution.graphs import StepGraphs
from atomc.runtime.execution.input_batch import InputBatch, StepShape
from atomc.runtime.scheduling.step import ScheduledStep


class StepVariant:
    """Steps of text, which are all that no other variant runs: their program and its CUDA graphs.

    label   of these steps in Runner.steps
    graphs  None: steps run as calls
    """

    label = ""

    def __init__(self, program: Program, input_batch: InputBatch) -> None:
        self.program, self.input_batch = program, input_batch
        self.graphs: StepGraphs | None = None

    def runs(self, step: ScheduledStep) -> bool:
        """Whether the step needs this program."""
        return True

    def has_shape(self, shape: StepShape) -> bool:
        """Whether there may be such steps."""
        return True

    def shapes(self, captured: Sequence[StepShape]) -> list[StepShape]:
        """Which of the shapes captured for text to capture for this program."""
        return list(captured)


class AdapterSteps(StepVariant):
    """A row has a LoRA adapter."""

    label = ", with adapters"

    def runs(self, step: ScheduledStep) -> bool:
        rows = self.input_batch.lora
        return rows is not None and rows.update(step)


class ImageSteps(StepVariant):
    """A row is a token of an image, which is in a prompt."""

    label = ", with images"

    def runs(self, step: ScheduledStep) -> bool:
        return step.has_images

    def has_shape(self, shape: StepShape) -> bool:
        return shape.rows > shape.sequences

    def shapes(self, captured: Sequence[StepShape]) -> list[StepShape]:
        """Those of a prompt alone first, whose logits take less memory than of all sequences."""
        prompts = [s for s in captured if self.has_shape(s) and not s.is_decode]
        return sorted(prompts, key=lambda shape: shape.wanted)


# The first one that runs a step is its variant.
VARIANTS = {"images": ImageSteps, "adapters": AdapterSteps, "text": StepVariant}
