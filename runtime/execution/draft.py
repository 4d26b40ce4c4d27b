"""A draft model on the device: proposes tokens after each step, from the step's hidden states.

It has state of its own in the blocks of the model's sequences: each step writes the rows that the
model has computed, prefill too, so that chunks, preemption and rejected drafts are the same case as
for the model. The state of a row depends on the token after it. In a block that the prefix cache
shares, the last row has seen the next token of the request that computed it, which may differ from
that of another request: this may change drafts, and results by rounding at most. The same is true
of the last row of a chunk before a token of an image, which has the embedding of the token's id.

Of several draft layers, each drafts one token, and the last one all further ones. Each computes the
rows of the step, from the hidden states of the layer before and one token further. So the state of
a row in layer i, counted from 1, depends on i tokens after it. Those that were drafts when it was
computed are known after the next step, which computes the row again (draft_history.py). In the last
i - 1 rows of a chunk of a prompt, tokens behind the chunk are missing: the last one is repeated,
which again may change drafts only.

S sequences, k draft tokens, D width of the hidden states.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from atomc.ops.inputs import ModelInputs
from atomc.ops.state import StateSpec, layout_of
from atomc.options import Options
from atomc.platform import Platform
from atomc.program import Program, compile_model
from atomc.runtime.execution.draft_history import DraftHistory
from atomc.runtime.execution.graphs import StepGraphs
from atomc.runtime.execution.images.model import ImageModel
from atomc.runtime.execution.input_batch import InputBatch, StepShape
from atomc.runtime.scheduling.state_rows import SPARE_SLOTS

if TYPE_CHECKING:
    from atomc.models.mtp import DraftModel


@dataclass(frozen=True)
class DraftProgram:
    """The compiled draft layers of a model, in their order.

    layers        for each, the programs of draft steps after a step of "text", and of "images" if
                  the model reads any
    layer_specs   for each, its state, with the group numbers of the model
    count         draft tokens per step
    width, dtype  of the hidden states
    """

    layers: Sequence[Mapping[str, Program]]
    layer_specs: Sequence[Sequence[StateSpec]]
    count: int
    width: int
    dtype: torch.dtype

    @property
    def specs(self) -> list[StateSpec]:
        return list(chain.from_iterable(self.layer_specs))

    @property
    def programs(self) -> list[Program]:
        """Those of all layers."""
        return [program for programs in self.layers for program in programs.values()]

    @property
    def text_programs(self) -> list[Program]:
        """Of draft steps of text, that of each layer."""
        return [programs["text"] for programs in self.layers]


def draft_models_of(module: nn.Module, count: int) -> "list[DraftModel]":
    """The first `count` draft layers of a model at most. Raises ValueError if it has none."""
    from atomc.models.mtp import WithDraftLayers

    if not isinstance(module, WithDraftLayers):
        raise ValueError(
            f"speculative is 'mtp', but {type(module).__name__} has no draft layers: leave it out, "
            "or set it to 'ngram'"
        )
    return module.draft_models(count)


def compile_draft(
    drafts: "Sequence[DraftModel]",
    target: Program,
    options: Options,
    count: int,
    *,
    owned: bool,
    images: ImageModel | None = None,
    platform: Platform | None = None,
) -> DraftProgram:
    """Compile draft layers, with their state in the blocks of the target; for this platform, by
    default that of their weights. images: of a target that reads them.

    Raises ValueError if their state needs another window than each layer of the target.
    """
    layout, first = layout_of(target.specs), drafts[0]
    width, dtype = first.hidden_size * len(first.reads), first.dtype
    options = replace(options, layout=layout, expert_load=False, expect={})
    takes = ModelInputs(hidden=(width, dtype), mrope=target.takes.mrope)
    inputs = {"text": takes}
    if images is not None:
        inputs["images"] = replace(takes, embeddings=images.embeddings)
    layers = [
        {
            name: compile_model(draft, options, platform, owned=owned, takes=takes)
            for name, takes in inputs.items()
        }
        for draft in drafts
    ]
    specs = [draft_specs(programs["text"].specs, target.specs) for programs in layers]
    return DraftProgram(layers, specs, count, width, dtype)


def draft_specs(specs: Sequence[StateSpec], target: Sequence[StateSpec]) -> list[StateSpec]:
    """The state of a draft layer with the group numbers of its target. Raises ValueError for state
    that needs blocks of its own.
    """
    groups = {spec.paging: spec.group for spec in target}
    for spec in specs:
        if spec.paging is None or spec.paging not in groups:
            raise ValueError(
                f"the draft layer's {spec.name} has state of kind {spec.kind!r} with "
                f"{spec.paging}, and no layer of the model has: its blocks cannot be shared"
            )
    return [replace(spec, group=groups[spec.paging]) for spec in specs]


def _target_groups(specs: Sequence[StateSpec], renumbered: Sequence[StateSpec]) -> list[int]:
    """The number in the target of each group of a draft layer."""
    groups = {
        (spec.group, target.group)
        for spec, target in zip(specs, renumbered, strict=True)
        if spec.group is not None and target.group is not None
    }
    return [target for _, target in sorted(groups)]


class DraftRunner:
    """Runs draft layers over the steps of an input batch.

    num_blocks   of each group of the target
    hidden       the hidden states of the step written last, one row for each row of the step
    """

    def __init__(
        self, draft: DraftProgram, batch: InputBatch, num_blocks: Sequence[int], slots: int
    ) -> None:
        self.layers, self.batch = draft.layers, batch
        self.count, self._layer_specs = draft.count, draft.layer_specs
        self.graphs: StepGraphs | None = None  # of draft steps of text
        self._num_blocks, self._slots = num_blocks, slots + SPARE_SLOTS
        # For each layer, the number in the target of each group of it.
        self._groups = [
            _target_groups(program.specs, specs)
            for program, specs in zip(draft.text_programs, draft.layer_specs, strict=True)
        ]
        self.hidden = torch.zeros(batch.rows, draft.width, dtype=draft.dtype, device=batch.device)
        self._history: DraftHistory | None = None
        # Blocks outside of a window are released: rows before the step may read other requests'.
        windowed = any(spec.paging and spec.paging.window for spec in draft.specs)
        if len(self.layers) > 1 and not windowed:
            self._history = DraftHistory(len(self.layers) - 1, batch, draft.width, draft.dtype)

    def allocate(self) -> None:
        """Create the caches, zeroed, and bind the programs to them."""
        self.caches = [
            [
                spec.allocate(
                    0 if spec.group is None else self._num_blocks[spec.group],
                    self.batch.block_size,
                    self.batch.device,
                    slots=self._slots,
                )
                for spec in specs
            ]
            for specs in self._layer_specs
        ]
        for programs, caches in zip(self.layers, self.caches, strict=True):
            for program in programs.values():
                program.bind(caches)

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
        hidden, last = self.hidden[: shape.rows], len(self.layers) - 1
        step, indices = self.batch.draft_step(shape, hidden, images=kind == "images")
        if self._history is not None:
            step = self._history.moved_back(step)
        drafts: list[Tensor] = []
        with torch.no_grad():
            for number in range(self.count):
                if number > last:
                    indices, hidden = indices + 1, hidden.index_select(0, step.logits_rows)
                    step = self.batch.next_draft_step(shape, drafts[-1], indices, hidden)
                elif number:
                    step = self.batch.next_layer_step(step, drafts[-1], hidden)
                layer = min(number, last)
                program = self.layers[layer][kind if number <= last else "text"]
                groups = tuple(step.groups[group] for group in self._groups[layer])
                logits, hidden = program.outputs(step._replace(groups=groups))
                drafts.append(logits.argmax(-1))
        return torch.stack(drafts, 1)
