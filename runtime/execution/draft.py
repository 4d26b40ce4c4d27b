"""A draft model on the device: proposes tokens after each step, from the step's hidden states.

It has state of its own in the blocks of the model's sequences: each step writes the rows that the
model has computed, prefill too, so that chunks, preemption and rejected drafts are the same case as
for the model. The state of a row depends on the token after it. In a block that the prefix cache
shares, the last row has seen the next token of the request that computed it, which may differ from
that of another request: this may change drafts, and results by rounding at most. The same is true
of the last row of a chunk before a token of an image, which has the embedding of the token's id.

S sequences, k draft tokens, D width of the hidden states.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from atomc.ops.inputs import ModelInputs
from atomc.ops.state import StateSpec, layout_of
from atomc.options import Options
from atomc.platform import Platform
from atomc.program import Program, compile_model
from atomc.runtime.execution.graphs import StepGraphs
from atomc.runtime.execution.images.model import ImageModel
from atomc.runtime.execution.input_batch import InputBatch, StepShape
from atomc.runtime.scheduling.state_rows import SPARE_SLOTS

if TYPE_CHECKING:
    from atomc.models.mtp import DraftModel


@dataclass(frozen=True)
class DraftProgram:
    """A compiled draft model.

    programs      of draft steps after a step of "text", and of "images" if the model reads any
    count         draft tokens per step
    width, dtype  of the hidden states
    specs         its state, with the group numbers of the model
    """

    programs: Mapping[str, Program]
    count: int
    width: int
    dtype: torch.dtype
    specs: Sequence[StateSpec]

    @property
    def program(self) -> Program:
        """Of draft steps of text."""
        return self.programs["text"]


def draft_model_of(module: nn.Module) -> "DraftModel":
    """The draft model of a model. Raises ValueError if it has none."""
    from atomc.models.mtp import WithDraftLayer

    if not isinstance(module, WithDraftLayer):
        raise ValueError(
            f"speculative is 'mtp', but {type(module).__name__} has no draft layers: leave it out, "
            "or set it to 'ngram'"
        )
    return module.draft_model()


def compile_draft(
    draft: "DraftModel",
    target: Program,
    options: Options,
    count: int,
    *,
    owned: bool,
    images: ImageModel | None = None,
    platform: Platform | None = None,
) -> DraftProgram:
    """Compile a draft model, with its state in the blocks of the target; for this platform, by
    default that of its weights. images: of a target that reads them.

    Raises ValueError if its state needs another window than each layer of the target.
    """
    layout = layout_of(target.specs)
    width, dtype = draft.hidden_size * len(draft.reads), draft.dtype
    options = replace(options, layout=layout, expert_load=False, expect={})
    takes = ModelInputs(hidden=(width, dtype), mrope=target.takes.mrope)
    inputs = {"text": takes}
    if images is not None:
        inputs["images"] = replace(takes, embeddings=images.embeddings)
    programs = {
        name: compile_model(draft, options, platform, owned=owned, takes=takes)
        for name, takes in inputs.items()
    }
    specs = _renumbered(programs["text"].specs, target.specs)
    return DraftProgram(programs, count, width, dtype, specs)


def _renumbered(specs: Sequence[StateSpec], target: Sequence[StateSpec]) -> list[StateSpec]:
    """The state of a draft model with the group numbers of its target."""
    groups = {spec.paging: spec.group for spec in target}
    for spec in specs:
        if spec.paging is None or spec.paging not in groups:
            raise ValueError(
                f"the draft layer's {spec.name} has state of kind {spec.kind!r} with "
                f"{spec.paging}, and no layer of the model has: its blocks cannot be shared"
            )
    return [replace(spec, group=groups[spec.paging]) for spec in specs]


class DraftRunner:
    """Runs a draft model over the steps of an input batch.

    num_blocks   of each group of the target
    hidden       the hidden states of the step written last, one row for each row of the step
    """

    def __init__(
        self, draft: DraftProgram, batch: InputBatch, num_blocks: Sequence[int], slots: int
    ) -> None:
        self.programs, self.program, self.batch = draft.programs, draft.program, batch
        self.count, self._specs = draft.count, draft.specs
        self.graphs: StepGraphs | None = None  # of draft steps of text
        self._num_blocks, self._slots = num_blocks, slots + SPARE_SLOTS
        # The number in the target of each group of the draft.
        self._groups = [
            group
            for _, group in sorted(
                {
                    draft_spec.group: spec.group
                    for draft_spec, spec in zip(draft.program.specs, draft.specs, strict=True)
                    if draft_spec.group is not None and spec.group is not None
                }.items()
            )
        ]
        self.hidden = torch.zeros(batch.rows, draft.width, dtype=draft.dtype, device=batch.device)

    def allocate(self) -> None:
        """Create the caches, zeroed, and bind the programs to them."""
        self.caches = [
            spec.allocate(
                0 if spec.group is None else self._num_blocks[spec.group],
                self.batch.block_size,
                self.batch.device,
                slots=self._slots,
            )
            for spec in self._specs
        ]
        for program in self.programs.values():
            program.bind(self.caches)

    def keep(self, hidden: Sequence[Tensor]) -> None:
        """Keep the hidden states [rows, D] of a step, for each layer that the draft reads."""
        start = 0
        for states in hidden:
            width = states.shape[-1]
            self.hidden[: len(states), start : start + width].copy_(states)
            start += width

    def propose(self, shape: StepShape, kind: str = "text") -> Tensor:
        """Draft tokens [S, k] i64 after the step written last, greedily: first for the sequences
        that sample, in order; the others are meaningless. `keep` and, if tokens were sampled,
        InputBatch.keep_samples were called for the step.

        kind  the variant of the step
        """
        hidden, program = self.hidden[: shape.rows], self.programs[kind]
        step, indices = self.batch.draft_step(shape, hidden, images=kind == "images")
        drafts: list[Tensor] = []
        with torch.no_grad():
            while True:
                groups = tuple(step.groups[group] for group in self._groups)
                logits, hidden = program.outputs(step._replace(groups=groups))
                drafts.append(logits.argmax(-1))
                if len(drafts) == self.count:
                    return torch.stack(drafts, 1)
                program = self.program
                indices = indices + 1
                step = self.batch.next_draft_step(shape, drafts[-1], indices, hidden)
