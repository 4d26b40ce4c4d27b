"""Compiles the programs of a model: steps, hidden states, the draft layer, the vision encoder."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from atomc.encoder import compile_encoder
from atomc.models.decoder import CausalLM
from atomc.models.mtp import DraftModel
from atomc.ops.inputs import TEXT, LoraShape, ModelInputs
from atomc.ops.state import layout_of
from atomc.options import Options
from atomc.parallel.process_group import Place
from atomc.parallel.stages import StageModel
from atomc.parallel.vocab import LogitsOfRank, VocabParallelHead, leave_apart
from atomc.program import Program, compile_model
from atomc.runtime.config import EngineConfig
from atomc.runtime.execution.draft import compile_draft, draft_models_of
from atomc.runtime.execution.images.encoder import Encode, ImageEncoder
from atomc.runtime.execution.images.model import ImageModel
from atomc.runtime.execution.lora.program import LoraProgram
from atomc.runtime.execution.pipeline import PipelineLinks
from atomc.runtime.execution.programs import Programs
from atomc.runtime.execution.runner import Runner
from atomc.runtime.execution.self_check import SelfCheck
from atomc.runtime.execution.views.evaluation_mode import evaluation_mode
from atomc.runtime.execution.views.headless_model import headless_model
from atomc.runtime.execution.views.hidden_states import WithHiddenStates
from atomc.runtime.execution.views.stock_head import separable_head
from atomc.runtime.execution.views.user_module import UserModule
from atomc.runtime.scheduling.step import Grid
from atomc.stock.adapter import StockModel

EAGER_NOTE = "glue=auto is eager in the runtime on a CPU: the start needs no C++ compiler"


class ProgramCompiler:
    """Compiles a model for the runtime.

    module       of a stage, with the model's names, if there are several
    place        of this process among the ranks of the model
    user_module  what is known of a module of a caller, who may write its weights; None: they are
                 those of the runtime, which may free and replace them
    lora         the LoRA adapters that the model has room for

    Raises ValueError for settings that the model does not support.
    """

    def __init__(
        self,
        config: EngineConfig,
        module: nn.Module,
        place: Place,
        user_module: UserModule | None = None,
        lora: LoraShape | None = None,
    ) -> None:
        self.config, self.module, self.place = config, module, place
        self.user_module, self.owned = user_module, user_module is None
        self.images = ImageModel.of(module)
        options = Options.of(config.options)
        self._options = _runtime_options(options, module)
        self._chose_eager = self._options is not options
        self._takes = TEXT if self.images is None else ModelInputs(mrope=self.images.mrope)
        self._check(lora)
        with self._traced():
            self.programs = self._compile(lora)

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
        return nullcontext() if self.user_module is None else self.user_module.traced()

    def _compile(self, lora: LoraShape | None) -> Programs:
        config, pipeline = self.config, PipelineLinks()
        apart = self._leave_logits_apart()
        self._check_of_stock = check = self._new_self_check(apart)
        stage, drafts, module = self.place.stage, list[DraftModel](), self.module
        if config.speculative == "mtp" and (stage is None or stage.is_last):
            drafts = draft_models_of(module, config.speculative_tokens)
            module = WithHiddenStates(module, drafts[0].reads)
        if stage is not None:
            module = part = StageModel(module)
            device = next(part.parameters()).device
            pipeline = PipelineLinks(stage, part.width, part.dtype, device)
            if not stage.is_first:
                self._takes = ModelInputs(hidden=(part.width, part.dtype))
        options = replace(
            self._options, expert_load=self._options.expert_load or config.expert_load
        )
        main = compile_model(
            module,
            options,
            owned=self.owned,
            before_free=check.record if check is not None else None,
            takes=self._takes,
        )
        options = replace(options, layout=layout_of(main.specs))
        steps, report, encoder, adapters = dict[str, Program](), main.report, None, None
        if self._chose_eager:
            report.notes.append(EAGER_NOTE)
        if apart is not None:
            report.notes.append(
                "logits are gathered after the program, and not for steps of greedy requests: "
                "ranks exchange their largest ones"
            )
        if stage is not None or drafts:  # which wrap the model
            report.model = type(self.module).__name__
        if self.images is not None:
            steps["images"] = self._variant(module, options, self._takes_images)
            report.notes.append("steps with tokens of images run a second program")
            encoder = ImageEncoder(self._encode(), self.images, main.device)
        if lora is not None:
            steps["adapters"] = self._variant(module, options, replace(self._takes, lora=lora))
            adapters = LoraProgram(steps["adapters"], lora)
            report.notes.append(adapters.note)
        return Programs(
            {**steps, "text": main},
            encoder,
            adapters,
            compile_draft(
                drafts,
                main,
                options,
                config.speculative_tokens,
                owned=self.owned,
                images=self.images,
            )
            if drafts
            else None,
            pipeline=pipeline,
            apart=apart,
        )

    def _new_self_check(self, apart: LogitsOfRank | None) -> SelfCheck | None:
        """Of a class of transformers that is no stage."""
        model = self.module if self.config.self_check and self.place.stage is None else None
        return SelfCheck(model, self._options, apart) if isinstance(model, StockModel) else None

    def _variant(self, module: nn.Module, options: Options, takes: ModelInputs) -> Program:
        """A program of its own for some steps: the others cost nothing more."""
        return compile_model(module, replace(options, expect={}), owned=self.owned, takes=takes)

    @property
    def _takes_images(self) -> ModelInputs:
        """With those of images, if the model reads any."""
        return replace(
            self._takes, embeddings=None if self.images is None else self.images.embeddings
        )

    def _encode(self) -> Encode:
        """The vision encoder, compiled if it has a form that can be."""
        if hasattr(self.module, "encode_patches"):
            return compile_encoder(self.module, replace(self._options, expect={}), owned=self.owned)
        return self._encode_uncompiled

    def _encode_uncompiled(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        module: Any = self.module
        with evaluation_mode(module):
            embeddings: Tensor = module.encode_images(pixels, grids)
        return embeddings

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

    def prepare_pooling(self, caches: Sequence[Mapping[str, Tensor]]) -> None:
        """Compile the model without its head, over these caches. Raises ValueError for a model
        whose head is not known.
        """
        if self.programs.hidden is not None:
            return
        if not self.programs.samples:
            self.programs.hidden = self.programs.main
            return
        model = self.module if self.place.stage is None else StageModel(self.module)
        options = replace(self._options, layout=layout_of(self.programs.main.specs))
        with self._traced():
            hidden = compile_model(
                headless_model(model), options, owned=self.owned, takes=self._takes_images
            )
        hidden.bind(caches)
        self.programs.hidden = hidden

    def self_check(self, runner: Runner) -> None:
        """Compare a stock class with its own forward. Raises ValueError if they differ."""
        if self._check_of_stock is not None:
            self._check_of_stock.run(self.programs.main, runner.input_batch.columns)
            runner.bind()


def _runtime_options(options: Options, module: nn.Module) -> Options:
    """With glue="auto", eager on a CPU. Demo model on 2 cores, cold: 3.6 s from import to the
    first request, with Inductor 7.5; decoding 740 tokens/s, with Inductor 776.
    """
    if options.glue != "auto" or next(module.parameters()).device.type != "cpu":
        return options
    return replace(options, glue="eager")
