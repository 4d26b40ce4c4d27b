"""Worker: the Executor in this process. Owns the model, caches and state of running requests."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from atomc.encoder import compile_encoder
from atomc.models.decoder import CausalLM
from atomc.models.stock import StockModel
from atomc.ops.inputs import TEXT, ModelInputs
from atomc.ops.state import StateSpec, block_size_of, groups_of
from atomc.options import Options
from atomc.parallel.group import Place
from atomc.parallel.stages import StageModel
from atomc.parallel.vocab import LogitsOfRank, VocabParallelHead, leave_apart
from atomc.program import Program, compile_model
from atomc.report.report import Report
from atomc.runtime import self_check
from atomc.runtime.capacity import GRAPH_SHARE, Capacity, capacity, free_memory
from atomc.runtime.config import EngineConfig
from atomc.runtime.draft import compile_draft, draft_model_of
from atomc.runtime.executor import Limits, Result, StepCounts
from atomc.runtime.graphs import step_shapes
from atomc.runtime.headless_model import headless_model
from atomc.runtime.hidden_states import WithHiddenStates
from atomc.runtime.image_encoder import Encode, ImageEncoder
from atomc.runtime.image_limits import ImageLimits
from atomc.runtime.image_model import ImageModel
from atomc.runtime.loading import LoadedModel, load
from atomc.runtime.phases import Phases, gc_disabled
from atomc.runtime.pipeline import Pipeline
from atomc.runtime.ranks.agreement import minimum, smallest
from atomc.runtime.ranks.block_groups import BlockGroups
from atomc.runtime.ranks.reports import compare_reports
from atomc.runtime.runner import Runner
from atomc.runtime.sampling.output_processor import OutputProcessor, StepOutputs
from atomc.runtime.sampling.sample_spec import SampleSpec
from atomc.runtime.sampling.sampling_params import SamplingParams
from atomc.runtime.slots import Slots
from atomc.runtime.state_rows import StateRows
from atomc.runtime.step import ScheduledStep
from atomc.runtime.step_kernels import StepKernels
from atomc.runtime.stock_head import separable_head
from atomc.runtime.threads import Threads, choose, use

log = logging.getLogger("atomc")

MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
# A step delays all its requests. On a CPU, a prompt of 1,000 tokens takes as long in chunks of 256
# as in one.
MAX_NUM_BATCHED_TOKENS = {"cpu": 256, "cuda": 2048}


class Worker:
    """Executes steps of one model on one device. Call `warm_up` once, before the first step.

    module, spare_cores   as in Engine
    place                 of this worker among the ranks of the model, if it has several
    phases                receives "load", "compile" and "allocate"

    Raises what Engine raises, and RuntimeError if memory runs out.
    """

    def __init__(
        self,
        config: EngineConfig,
        phases: Phases,
        *,
        module: nn.Module | None = None,
        progress: bool = True,
        spare_cores: int = 0,
        place: Place | None = None,
    ) -> None:
        self.config, self.place = config, place or Place()
        self.num_ranks = 1 if place is None else config.num_ranks
        self.progress = progress
        self.threads: Threads | None = None
        self._owns_weights = module is None  # the owner of a given module may change its weights
        self._borrowed: StockModel | None = None
        self._hidden: Program | None = None
        self._own_forward: self_check.OwnForward | None = None
        self._kernels = StepKernels(config)
        try:
            with phases.phase("load"):
                self.loaded = load(config, module, progress=progress, place=self.place)
                self.module = self.loaded.module
                if module is not self.module and isinstance(self.module, StockModel):
                    self._borrowed = None if self._owns_weights else self.module
                # Before compilation: CPU code is specialized to the number of threads.
                self._set_threads(spare_cores)
            with phases.phase("compile"), gc_disabled(), self._calling_ops():
                self._kernels.begin(self.module, self.loaded.vocab_size)
                self._compile()
                if self.threads is not None:
                    self.program.report.notes.append(str(self.threads))
            if self.num_ranks > 1:
                stage = self.place.stage
                compare_reports(self.program.report, 0 if stage is None else stage.index)
            with phases.phase("allocate"), gc_disabled():
                self._allocate(self.loaded)
        finally:
            self._kernels.end()

    @contextmanager
    def _calling_ops(self) -> Iterator[None]:
        """A module of transformers that was given calls ops in this context, where it is traced;
        elsewhere it computes as its class does, for its owner.
        """
        if self._borrowed is not None:
            self._borrowed.ours.set_in(self._borrowed.hf_model)
        try:
            yield
        finally:
            if self._borrowed is not None:
                self._borrowed.own.set_in(self._borrowed.hf_model)

    def _compile(self) -> None:
        """Compile the model, and its draft model if there is one."""
        config, options = self.config, Options.of(self.config.options)
        self._apart = self._leave_logits_apart()
        draft = draft_model_of(self.module) if config.speculative == "mtp" else None
        module = self.module if draft is None else WithHiddenStates(self.module, draft.reads)
        self._takes = TEXT
        self.pipeline: Pipeline | None = None
        if self.place.stage is not None:
            module = stage = StageModel(self.module)
            device = next(stage.parameters()).device
            self.pipeline = Pipeline(self.place.stage, stage.width, stage.dtype, device)
            if not self.place.stage.is_first:
                self._takes = ModelInputs(hidden=(stage.width, stage.dtype))
        options = replace(options, expert_load=options.expert_load or config.expert_load)
        if options.expert_load and self.place.experts is not None:
            raise ValueError(
                "the option expert_load is not supported with dp and ep, whose ranks send each "
                "other tokens: leave out one of them, or use tp with ep"
            )
        self.images = ImageModel.of(self.module)
        if self.images is not None and self.place.experts is not None:
            raise ValueError(
                "dp with ep is not supported for models with an image encoder: use tp with ep, or "
                "dp without ep"
            )
        self.program = compile_model(
            module,
            options,
            owned=self._owns_weights,
            before_free=self._before_free,
            takes=self._takes if self.images is None else self.images.takes(images=False),
        )
        if self._apart is not None:
            self.program.report.notes.append(
                "logits are gathered after the program, and not for steps of greedy requests: "
                "ranks exchange their largest ones"
            )
        if self.pipeline is not None:
            self.program.report.model = type(self.module).__name__
        self.image_program = None
        if self.images is not None:
            # A program of its own: decode steps, which are most of all steps, read no embeddings.
            self.image_program = compile_model(
                module,
                replace(options, expect={}),
                owned=self._owns_weights,
                takes=self.images.takes(images=True),
            )
            self.program.report.notes.append(
                "steps with tokens of images run a second program, without CUDA graphs"
            )
            self._encode = self._compile_encoder()
        self.draft = None
        if draft is not None:
            self.program.report.model = type(self.module).__name__
            self.draft = compile_draft(
                draft,
                self.program,
                options,
                config.speculative_tokens,
                owned=self._owns_weights,
                images=self.images,
            )
        if config.speculative_accept is not None:
            note = (
                f"speculative_accept is {config.speculative_accept}: drafts are accepted whether "
                "they are right or not, and the output is NOT that of the model"
            )
            self.program.report.notes.append(note)
            log.warning("%s", note)

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

    def _compile_encoder(self) -> Encode:
        """The vision encoder; as it is, if it has no form that can be compiled."""
        if hasattr(self.module, "encode_patches"):
            options = replace(Options.of(self.config.options), expect={})
            return compile_encoder(self.module, options, owned=self._owns_weights)
        encode: Encode = self.module.encode_images  # type: ignore[assignment]
        return encode

    @property
    def _specs(self) -> Sequence[StateSpec]:
        """The state of the model and of its draft model."""
        return (*self.program.specs, *(self.draft.specs if self.draft is not None else ()))

    def _before_free(self, key: str | None, specs: Sequence[StateSpec], report: Report) -> None:
        """Compute what the self check needs of weights that are going to be freed."""
        if self._checks_itself and isinstance(self.module, StockModel):
            options = Options.of(self.config.options)
            self._own_forward = self_check.before_free(
                self.module, options, key, specs, report, apart=self._apart
            )

    def _set_threads(self, spare_cores: int) -> None:
        if next(self.module.parameters()).device.type != "cpu":
            return
        self.threads = choose(
            self.config.threads, spare=spare_cores, processes=self.config.num_processes
        )
        use(self.threads)
        log.info("%s", self.threads)

    def _allocate(self, loaded: LoadedModel) -> None:
        """Size the caches, and create the runner and the output processor."""
        config, specs, device = self.config, self._specs, self.program.device
        if not specs:
            raise ValueError(
                f"{type(loaded.module).__name__} has no state: each attention layer must create a "
                "handle (ops.kv_state) and pass it to ops.attention"
            )
        no_prefix_cache = _no_prefix_cache(config, specs)
        max_num_seqs = config.max_num_seqs or MAX_NUM_SEQS.get(device.type, 256)
        max_num_batched_tokens = config.max_num_batched_tokens or max(
            MAX_NUM_BATCHED_TOKENS.get(device.type, 2048), max_num_seqs
        )
        self.outputs = OutputProcessor(device, max_num_seqs, self._apart)
        self.encoder = None
        if self.images is not None:
            self.encoder = ImageEncoder(self._encode, self.images, device)
        self.slots = Slots(self.outputs.sampler.counts)
        sized = config.kv_bytes is not None or config.num_blocks is not None
        fixed = next((spec for spec in specs if not spec.can_roll_back), None)
        rewinds = fixed is not None and config.speculative_tokens > 0
        self._groups = BlockGroups.of(specs, in_stages=self.pipeline is not None)
        own_size = self._capacity(
            max_num_seqs,
            max_num_batched_tokens,
            loaded.max_len,
            sized=sized,
            rewinds=rewinds,
            shares=not no_prefix_cache,
        )
        size = smallest(self._groups.whole(own_size), self.num_ranks, device)
        rows = None if fixed is None else StateRows(max_num_seqs, rewinds, size.snapshots)
        if fixed is not None and not (no_prefix_cache or size.snapshots):
            no_prefix_cache = (
                f"{fixed.why_snapshots}, and there is no memory for one: lower max_num_seqs, or "
                "set state_snapshots"
            )
            if config.enable_prefix_caching:
                raise ValueError(f"enable_prefix_caching: {no_prefix_cache}")
        if no_prefix_cache and config.enable_prefix_caching is None:
            self.program.report.notes.append(f"no prefix cache: {no_prefix_cache}")
            log.info("no prefix cache: %s", no_prefix_cache)
        # Before the scheduler's block pool: here, too many blocks fail before a list of them is
        # built.
        self.runner = Runner(
            self.program,
            num_blocks=self._groups.own_blocks(size),
            block_size=size.block_size,
            max_num_seqs=max_num_seqs,
            max_num_rows=max_num_batched_tokens,
            max_columns=-(-size.max_model_len // size.block_size),
            state_rows=rows,
            draft=self.draft,
            image_program=self.image_program,
            merge_size=1 if self.images is None else self.images.merge_size,
            pipeline=self.pipeline,
        )
        # Load kernels for this cache if none was measured, or only a small one: kernels use 64-bit
        # offsets in a large cache.
        large = any(
            tensor.numel() >= 2**31 for tensors in self.runner.caches for tensor in tensors.values()
        )
        if block_size_of(specs) is not None and (sized or large):
            self._load_kernels(self.runner, max_num_seqs)
        self.limits = Limits(
            size,
            self._groups.windows,
            max_num_seqs,
            max_num_batched_tokens,
            no_prefix_cache,
            can_roll_back=fixed is None,
            images=self._image_limits(),
            state_rows=rows,
        )

    def _load_kernels(self, runner: Runner, max_num_seqs: int) -> None:
        """Load the kernels of this runner's steps, and those that sample."""
        self._kernels.load(runner, self.outputs if self.samples else None, max_num_seqs)

    def _image_limits(self) -> ImageLimits | None:
        if self.images is None:
            return None
        return ImageLimits(
            self.images.token_ids,
            self.images.merge_size,
            self.images.patch_width,
            self.images.bytes_per_token,
            self.config.image_cache_bytes,
            self.config.max_image_patches,
        )

    def _capacity(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        longest: int,
        *,
        sized: bool,
        rewinds: bool,
        shares: bool,
    ) -> Capacity:
        """sized: the config sets the size of the cache; otherwise it depends on free memory.
        shares: there is a prefix cache.
        """
        config, specs, device = self.config, self._specs, self.program.device
        return capacity(
            groups=groups_of(specs),
            block_size=block_size_of(specs),
            available=0
            if sized
            else free_memory(
                device,
                config.gpu_memory_utilization,
                self._activations(max_num_seqs, max_num_batched_tokens, longest),
                processes=config.num_processes,
            ),
            image_bytes=self._image_bytes(max_num_batched_tokens),
            max_num_seqs=max_num_seqs,
            longest=longest,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=config.max_model_len,
            num_blocks=config.num_blocks,
            kv_bytes=config.kv_bytes,
            bytes_per_sequence=sum(spec.bytes_per_sequence() for spec in specs),
            rewinds=rewinds,
            snapshots=config.state_snapshots if shares else 0,
        )

    def _image_bytes(self, rows: int) -> int:
        """Bytes of the cache of embeddings, and of those of a step."""
        if self.images is None:
            return 0
        return self.config.image_cache_bytes + rows * self.images.bytes_per_token

    def _activations(self, max_num_seqs: int, rows: int, longest: int) -> int:
        """Bytes of activations of a step of `rows` rows on a GPU, measured with a cache of one
        block; 0 on a CPU.
        """
        device, block_size = self.program.device, block_size_of(self.program.specs)
        if device.type != "cuda" or block_size is None:
            return 0
        runner = Runner(
            self.program,
            num_blocks=1,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_rows=rows,
            max_columns=-(-longest // block_size),
            state_rows=StateRows(0),
            draft=self.draft,
            image_program=self.image_program,
        )
        self._load_kernels(runner, max_num_seqs)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        logits = runner.padding_only(min(rows, max_num_seqs))
        if self.samples:
            self.outputs.sampler(
                self.outputs.whole(logits),
                [SampleSpec(SamplingParams(temperature=1.0, top_p=0.9))] * len(logits),
            )
        if self.encoder is not None:
            self.encoder.encode_largest(self.config.max_image_patches)
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before

    def warm_up(self) -> None:
        """Run the self check of a transformers class, and capture CUDA graphs."""
        with gc_disabled():
            if self._checks_itself and isinstance(self.module, StockModel):
                self_check.self_check(
                    self.module,
                    self.program,
                    Options.of(self.config.options),
                    columns=self.runner.input_batch.columns,
                    own=self._own_forward,
                    apart=self._apart,
                )
                self._own_forward = None
                self.runner.bind()
            if not self.config.enforce_eager:
                self._capture()

    def _capture(self) -> None:
        """Capture CUDA graphs, within GRAPH_SHARE of the memory."""
        device, input_batch = self.program.device, self.runner.input_batch
        shapes = step_shapes(
            self.limits.max_num_seqs,
            input_batch.rows,
            input_batch.columns,
            self.config.speculative_tokens,
            rewinds=not self.limits.can_roll_back,
        )
        budget = (
            int(GRAPH_SHARE * torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else None
        )
        self.runner.capture(
            shapes,
            budget=budget,
            agree=lambda left: minimum([left], self.num_ranks, device)[0],
            kernels_loaded=self._kernels.kernels_loaded,
            progress=self.progress,
        )

    @property
    def samples(self) -> bool:
        """Whether this worker samples tokens and pools hidden states, and has the results of
        steps: not before the last stage of a pipeline.
        """
        return self.pipeline is None or self.pipeline.stage.is_last

    @property
    def _checks_itself(self) -> bool:
        """Whether a stock class is compared with its own forward: not a stage of one."""
        return self.config.self_check and self.pipeline is None

    def ready(self) -> None:
        """Nothing changes: no other process waits for this one."""

    def raise_failure(self) -> None:
        """There are no other processes."""

    def launch(self, step: ScheduledStep) -> "LaunchedStep":
        sampled = step.sample_rows(self.place.data_rank)
        step = self._groups.own_part(step.of_rank(self.place.data_rank))
        states = self.slots.update(step)
        if self.encoder is not None:
            self.encoder.update(step)
            embeddings = self.runner.input_batch.embeddings
            if embeddings is not None and step.has_images:
                self.encoder.place(step, states, embeddings)
        outputs = StepOutputs(step, states)
        if not step.pooled:
            return LaunchedStep(self, outputs, self.runner.logits(step), sampled)
        assert self._hidden is not None, "prepare_pooling was not called"
        hidden = self.runner.hidden(self._hidden, step)
        if self.samples:
            self.outputs.pool(outputs, hidden)
        return LaunchedStep(self, outputs)

    @property
    def pids(self) -> Mapping[int, int]:
        return {}

    @property
    def pools(self) -> bool:
        return self._hidden is not None

    def prepare_pooling(self) -> None:
        if not self.samples:
            self._hidden = self.program
        if self._hidden is None:
            model = self.module if self.pipeline is None else StageModel(self.module)
            with self._calling_ops():
                program = compile_model(
                    headless_model(model),
                    options=self.config.options,
                    owned=self._owns_weights,
                    takes=self._takes if self.images is None else self.images.takes(images=True),
                )
            program.bind(self.runner.caches)
            self._hidden = program

    def check(self) -> bool:
        return any([program.check() for program in self._programs])

    def counts(self) -> StepCounts:
        runner = self.runner
        # With hidden states, the model is a submodule of the program's module.
        load: dict[str, list[int]] = {}
        for program in self._programs:
            for path, counts in program.expert_load().items():
                name = path.removeprefix("module.")
                before = load.get(name, [0] * len(counts))
                load[name] = [a + b for a, b in zip(before, counts, strict=True)]
        return StepCounts(dict(runner.steps), runner.rows, runner.padding, load)

    def forget_counts(self) -> None:
        self.runner.forget_counts()
        for program in self._programs:
            program.forget_expert_load()

    def close(self) -> None:
        """There are no other processes."""

    @property
    def _programs(self) -> list[Program]:
        """Of steps without images, and of those with them if the model takes any."""
        return [self.program, *([] if self.image_program is None else [self.image_program])]


class LaunchedStep:
    """A launched step of a Worker.

    logits   None for a pooling step
    sampled  the rows of a mask that are those of this worker
    """

    def __init__(
        self,
        worker: Worker,
        outputs: StepOutputs,
        logits: Tensor | None = None,
        sampled: slice = slice(None),
    ) -> None:
        self._worker, self._outputs, self._logits = worker, outputs, logits
        self._sampled = sampled

    def sample(self, mask: Tensor | None = None) -> None:
        logits, self._logits = self._logits, None
        if logits is None:
            return
        mask = None if mask is None else mask[self._sampled]
        worker, outputs = self._worker, self._outputs
        # With speculation, the host knows all tokens before the next step.
        keeps, pipeline = not worker.config.speculative_tokens, worker.pipeline
        if pipeline is not None and not pipeline.stage.is_last:
            if keeps and pipeline.stage.is_first and outputs.step.num_samples:
                pipeline.expect_tokens(outputs.step.sampled_slots)
            return
        tokens = worker.outputs.sample(outputs, logits, mask)
        if tokens is not None and keeps:
            if pipeline is None:
                worker.runner.input_batch.keep_tokens(tokens)
            else:
                pipeline.send_tokens(tokens)
        worker.outputs.keep_drafts(outputs, worker.runner.propose(outputs.step, tokens))

    def results(self) -> list[Result]:
        return self._outputs.results() if self._worker.samples else []


def _no_prefix_cache(config: EngineConfig, specs: Sequence[StateSpec]) -> str:
    """Why there is no prefix cache; empty if there is one. Raises ValueError if the config requires
    one and the model does not support it, or snapshots of state that the model does not have.
    """
    fixed = next((spec for spec in specs if spec.per_sequence), None)
    if config.state_snapshots and fixed is None:
        raise ValueError(
            f"state_snapshots is {config.state_snapshots}, but the model keeps no state per "
            "sequence: leave it out"
        )
    if config.enable_prefix_caching is False:
        return "enable_prefix_caching is off"
    why = next((spec.why_unshared for spec in specs if spec.why_unshared), "")
    if fixed is not None and not why and config.state_snapshots == 0:
        why = f"{fixed.why_snapshots}, and state_snapshots is 0"
    if why and config.enable_prefix_caching:
        raise ValueError(f"enable_prefix_caching: {why}")
    return why
