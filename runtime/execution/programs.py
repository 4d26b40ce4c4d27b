"""The compiled programs of a model, by what they run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from atomc.ops.inputs import ModelInputs
from atomc.ops.state import StateSpec
from atomc.parallel.vocab import LogitsOfRank
from atomc.program import Program
from atomc.runtime.execution.draft import DraftProgram
from atomc.runtime.execution.images.encoder import ImageEncoder
from atomc.runtime.execution.lora.program import LoraProgram
from atomc.runtime.execution.pipeline import PipelineLinks


@dataclass
class Programs:
    """Programs over the caches of one model.

    steps     of steps, by the names of VARIANTS in their order; the report of "text" is that of
              the model
    encoder   reads images; None: the model reads none
    lora      the adapters of steps["adapters"]; None: it has none
    draft     the draft layers of the checkpoint
    hidden    returns hidden states instead of logits, after `prepare_pooling`
    pipeline  what sends states to the next stage
    apart     logits are those of this rank's part of the vocabulary, and gathered after the program
    """

    steps: Mapping[str, Program]
    encoder: ImageEncoder | None = None
    lora: LoraProgram | None = None
    draft: DraftProgram | None = None
    hidden: Program | None = None
    pipeline: PipelineLinks = field(default_factory=PipelineLinks)
    apart: LogitsOfRank | None = None

    @property
    def main(self) -> Program:
        """Of steps of text."""
        return self.steps["text"]

    @property
    def takes(self) -> ModelInputs:
        """What all steps take, of which each program reads its part."""
        images, adapters = (self.steps.get(name, self.main) for name in ("images", "adapters"))
        return replace(
            self.main.takes, embeddings=images.takes.embeddings, lora=adapters.takes.lora
        )

    @property
    def merge_size(self) -> int:
        """Patches of an image in a row and a column for one token."""
        return 1 if self.encoder is None else self.encoder.images.merge_size

    @property
    def specs(self) -> Sequence[StateSpec]:
        """The state of the model and of its draft model."""
        return (*self.main.specs, *(self.draft.specs if self.draft is not None else ()))

    @property
    def samples(self) -> bool:
        """Whether this process samples tokens and pools hidden states, and has the results of
        steps: not before the last stage of a pipeline.
        """
        return self.pipeline.stage.is_last

    @property
    def target(self) -> list[Program]:
        """All but those of the draft model, which has caches of its own."""
        return [*self.steps.values(), *([] if self.hidden is None else [self.hidden])]

    @property
    def all(self) -> list[Program]:
        """Those of steps, of hidden states, and of the draft model."""
        return [*self.target, *(self.draft.programs if self.draft is not None else ())]
