"""The compiled programs of a model: steps, hidden states, the draft layer, the vision encoder."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from atomc.encoder import compile_encoder
from atomc.models.decoder import CausalLM
from atomc.ops.inputs import TEXT, LoraShape, ModelInputs
from atomc.ops.state import StateSpec
from atomc.options import Options
from atomc.parallel.process_group import Place
from atomc.parallel.stages import StageModel
from atomc.parallel.vocab import LogitsOfRank, VocabParallelHead, leave_apart
from atomc.program import Program, compile_model
from atomc.report.report import Report
from atomc.runtime.config import EngineConfig
from atomc.runtime.execution import self_check
from atomc.runtime.execution.draft import DraftProgram, compile_draft, draft_model_of
from atomc.runtime.execution.images.encoder import Encode
from atomc.runtime.execution.images.model import ImageModel
from atomc.runtime.execution.lora.program import LoraProgram
from atomc.runtime.execution.pipeline import Pipeline
from atomc.runtime.execution.runner import Runner
from atomc.runtime.execution.views.evaluation_mode import evaluation_mode
from atomc.runtime.execution.views.headless_model import headless_model
from atomc.runtime.execution.views.hidden_states import WithHiddenStates
from atomc.runtime.execution.views.stock_head import separable_head
from atomc.runtime.execution.views.user_module import GivenModule
from atomc.runtime.scheduling.step import Grid
from atomc.stock.adapter import StockModel

log = logging.getLogger("atomc")

EAGER_NOTE = "glue=auto is eager in the runtime on a CPU: the start needs no C++ compiler"


class Programs:
    """Compiles a model for the runtime.

    module   of a stage, with the model's names, if there are several
    place    of this process among the ranks of the model
    given    what is known of a module of a caller, who may write its weights; None: they are those
             of the runtime, which may free and replace them
    lora     the LoRA adapters that the model has room for

    main     the program of steps without images and adapters, whose report is that of the model
    images   what the model reads images with, image_program the program of steps with images, and
             encode its vision encoder; None: it reads none
    lora     the program of steps with adapters
    draft    the draft layer of the checkpoint
    hidden   the program of hidden states, after `prepare_pooling`
    pipeline what sends states to the next stage
    apart    logits are those of this rank's part of the vocabulary, and gathered after the program

    Raises ValueError for settings that the model does not support.
    """

    def __init__(
        self,
        config: EngineConfig,
        module: nn.Module,
        place: Place,
        given: GivenModule | None = None,
        lora: LoraShape | None = None,
    ) -> None:
        self.config, self.module, self.place = config, module, place
        self.given, self.owned = given, given is None
        self.images = ImageModel.of(module)
        self.hidden: Program | None = None
        self.encode: Encode | None = None
        self.image_program: Program | None = None
        self.pipeline: Pipeline | None = None
        self._own_forward: self_check.OwnForward | None = None
        options = Options.of(config.options)
        self._options = _runtime_options(options, module)
        self._chose_eager = self._options is not options
        self._takes = TEXT
        self._check(lora)
        with self._traced():
            self._compile(lora)

    def _check(self, lora: LoraShape | None) -> None:
        shares_experts = self.place.experts is not None
        if shares_experts and self._options.batch_invariant:
            raise ValueError(
                "the option batch_invariant is not supported with dp and ep: the order in which "
                "results of ranks are added depends on the rank that has the request"
            )
        if shares_experts and self.images is not None:
            raise ValueError(
                "dp with ep is not supported for models with an image encoder: use tp with ep, or "
                "dp without ep"
            )
        if lora is not None and self.images is not None:
            raise ValueError(
                "LoRA adapters (lora, max_loras) are not supported for models that read images"
            )

    def _traced(self) -> AbstractContextManager[None]:
        """The context in which the module is traced."""
        return nullcontext() if self.given is None else self.given.traced()

    def _compile(self, lora: LoraShape | None) -> None:
        config = self.config
        self.apart = self._leave_logits_apart()
        draft = draft_model_of(self.module) if config.speculative == "mtp" else None
        module = self.module if draft is None else WithHiddenStates(self.module, draft.reads)
        if self.place.stage is not None:
            module = stage = StageModel(self.module)
            device = next(stage.parameters()).device
            self.pipeline = Pipeline(self.place.stage, stage.width, stage.dtype, device)
            if not self.place.stage.is_first:
                self._takes = ModelInputs(hidden=(stage.width, stage.dtype))
        options = replace(
            self._options, expert_load=self._options.expert_load or config.expert_load
        )
        self.main = compile_model(
            module,
            options,
            owned=self.owned,
            before_free=self._before_free,
            takes=self._takes if self.images is None else self.images.takes(images=False),
        )
        report = self.main.report
        if self._chose_eager:
            report.notes.append(EAGER_NOTE)
        if self.apart is not None:
            report.notes.append(
                "logits are gathered after the program, and not for steps of greedy requests: "
                "ranks exchange their largest ones"
            )
        if self.pipeline is not None or draft is not None:  # which wrap the model
            report.model = type(self.module).__name__
        if self.images is not None:
            self._compile_images(self.images, module, options)
        self.lora = None if lora is None else self._compile_lora(lora, module, options)
        self.draft: DraftProgram | None = None
        if draft is not None:
            self.draft = compile_draft(
                draft,
                self.main,
                options,
                config.speculative_tokens,
                owned=self.owned,
                images=self.images,
            )
        if config.speculative_accept is not None:
            note = (
                f"speculative_accept is {config.speculative_accept}: drafts are accepted whether "
                "they are right or not, and the output is NOT that of the model"
            )
            report.notes.append(note)
            log.warning("%s", note)

    def _compile_images(self, images: ImageModel, module: nn.Module, options: Options) -> None:
        # A program of its own: decode steps, which are most of all steps, read no embeddings.
        self.image_program = compile_model(
            module,
            replace(options, expect={}),
            owned=self.owned,
            takes=images.takes(images=True),
        )
        self.main.report.notes.append("steps with tokens of images run a second program")
        if hasattr(self.module, "encode_patches"):
            encoder_options = replace(self._options, expect={})
            self.encode = compile_encoder(self.module, encoder_options, owned=self.owned)
        else:  # it has no form that can be compiled
            self.encode = self._encode_uncompiled

    def _encode_uncompiled(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        module: Any = self.module
        with evaluation_mode(module):
            found: Tensor = module.encode_images(pixels, grids)
        return found

    def _compile_lora(self, shape: LoraShape, module: nn.Module, options: Options) -> LoraProgram:
        """A program of its own: steps without adapters cost nothing more."""
        program = compile_model(
            module,
            replace(options, expect={}),
            owned=self.owned,
            takes=replace(self._takes, lora=shape),
        )
        found = LoraProgram(program, shape)
        self.main.report.notes.append(found.note)
        return found

    def _leave_logits_apart(self) -> LogitsOfRank | None:
        """Have the model return the logits of this rank's part of the vocabulary. None if it
        returns all: one rank, a model that may compute something of all logits, and one whose head
        a draft layer shares.
        """
        tp, model, head = self.place.tp, self.module, None
        if tp is None or self.config.speculative == "mtp":
            return None
        if isinstance(model, CausalLM) and type(model).forward is CausalLM.forward:
            head = model.lm_head
        elif type(model) is StockModel:
            head = separable_head(model)
        return leave_apart(head, tp.rank) if type(head) is VocabParallelHead else None

    def prepare_pooling(self, runner: Runner) -> None:
        """Compile the model without its head, over the caches of this runner. Raises ValueError for
        a model whose head is not known.
        """
        if self.hidden is not None:
            return
        if not self.samples:
            self.hidden = self.main
            return
        model = self.module if self.pipeline is None else StageModel(self.module)
        with self._traced():
            hidden = compile_model(
                headless_model(model),
                options=self._options,
                owned=self.owned,
                takes=self._takes if self.images is None else self.images.takes(images=True),
            )
        hidden.bind(runner.caches)
        self.hidden = hidden

    @property
    def specs(self) -> Sequence[StateSpec]:
        """The state of the model and of its draft model."""
        return (*self.main.specs, *(self.draft.specs if self.draft is not None else ()))

    @property
    def samples(self) -> bool:
        """Whether this process samples tokens and pools hidden states, and has the results of
        steps: not before the last stage of a pipeline.
        """
        return self.pipeline is None or self.pipeline.stage.is_last

    @property
    def lora_program(self) -> Program | None:
        return None if self.lora is None else self.lora.program

    @property
    def of_steps(self) -> list[Program]:
        """Of all steps that sample: without images and adapters, with images, with adapters."""
        found = (self.main, self.image_program, self.lora_program)
        return [program for program in found if program is not None]

    @property
    def all(self) -> list[Program]:
        """Those of steps, of hidden states, and of the draft model."""
        draft = self.draft
        others = [] if draft is None else [draft.program, draft.image_program]
        return [
            *self.of_steps,
            *[program for program in (self.hidden, *others) if program is not None],
        ]

    def self_check(self, runner: Runner) -> None:
        """Compare a stock class with its own forward. Raises ValueError if they differ."""
        if not (self._checks_itself and isinstance(self.module, StockModel)):
            return
        self_check.self_check(
            self.module,
            self.main,
            self._options,
            columns=runner.input_batch.columns,
            own=self._own_forward,
            apart=self.apart,
        )
        self._own_forward = None
        runner.bind()

    def _before_free(self, key: str | None, specs: Sequence[StateSpec], report: Report) -> None:
        """Compute what the self check needs of weights that are going to be freed."""
        if self._checks_itself and isinstance(self.module, StockModel):
            self._own_forward = self_check.before_free(
                self.module, self._options, key, specs, report, apart=self.apart
            )

    @property
    def _checks_itself(self) -> bool:
        """Not a stage of a model."""
        return self.config.self_check and self.pipeline is None


def _runtime_options(options: Options, module: nn.Module) -> Options:
    """With glue="auto", eager on a CPU. Demo model on 2 cores, cold: 3.6 s from import to the
    first request, with Inductor 7.5; decoding 740 tokens/s, with Inductor 776.
    """
    if options.glue != "auto" or next(module.parameters()).device.type != "cpu":
        return options
    return replace(options, glue="eager")
