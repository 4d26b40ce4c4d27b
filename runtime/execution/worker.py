"""Worker: the Executor in this process. Owns the model, caches and state of running requests."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from atomc import kernels
from atomc.ops.state import StateSpec, block_size_of, groups_of
from atomc.options import Options
from atomc.parallel.process_group import Place
from atomc.program import Program
from atomc.replay.cudagraphs import Capturing
from atomc.runtime.config import EngineConfig
from atomc.runtime.execution.block_groups import BlockGroups, minimum, smallest
from atomc.runtime.execution.capacity import (
    GRAPH_SHARE,
    Capacity,
    capacity,
    check_free,
    free_memory,
)
from atomc.runtime.execution.compile_programs import ProgramCompiler
from atomc.runtime.execution.device_times import DeviceTimes
from atomc.runtime.execution.executor import Limits, StepResults
from atomc.runtime.execution.expert_load import ExpertLoad, expert_counts, rows_of_experts
from atomc.runtime.execution.graphs import shapes_for_later, step_shapes
from atomc.runtime.execution.input_batch import StepShape
from atomc.runtime.execution.loading.load import LoadedModel, load, present_device
from atomc.runtime.execution.lora.program import lora_shape
from atomc.runtime.execution.output_processor import OutputProcessor, StepOutputs
from atomc.runtime.execution.reports import compare_reports
from atomc.runtime.execution.runner import Runner
from atomc.runtime.execution.slots import Slots
from atomc.runtime.execution.step_kernels import StepKernels
from atomc.runtime.execution.threads import Threads, choose, use
from atomc.runtime.execution.timings import Phases
from atomc.runtime.execution.views.evaluation_mode import evaluation_mode
from atomc.runtime.execution.views.user_module import UserModule, check_logits
from atomc.runtime.processes.garbage_collection import gc_disabled
from atomc.runtime.requests.sample_spec import SampleSpec
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.scheduling.image_limits import ImageLimits
from atomc.runtime.scheduling.state_rows import StateRows
from atomc.runtime.scheduling.stats import StepCounts, sum_of_loads
from atomc.runtime.scheduling.step import ScheduledStep
from atomc.stock.adapter import StockModel

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
        spare_cores: int = 0,
        place: Place | None = None,
    ) -> None:
        self.config, self.place = config, place or Place()
        self.num_ranks = 1 if place is None else config.num_ranks
        self.threads: Threads | None = None
        self._user_module: UserModule | None = None
        self._kernels = StepKernels(config)
        # Before the model is loaded: what they refuse would be refused minutes later.
        _check_names(Options.of(config.options))
        lora = lora_shape(config)
        try:
            with phases.phase("load"):
                if module is None and present_device(config.device).startswith("cuda"):
                    kernels.start_triton()
                self.loaded = load(config, module, progress=phases.progress, place=self.place)
                self.module = self.loaded.module
                if module is not None:
                    self._user_module = UserModule(self.module, self._borrowed(module))
                # Before compilation: CPU code is specialized to the number of threads.
                self._set_threads(spare_cores)
            with phases.phase("compile"), gc_disabled():
                self._kernels.begin(self.module, self.loaded.vocab_size)
                self._compiler = ProgramCompiler(
                    config, self.module, self.place, self._user_module, lora
                )
                self.programs = self._compiler.programs
                if self.threads is not None:
                    self.program.report.notes.append(str(self.threads))
            if self.num_ranks > 1:
                stage = self.place.stage
                compare_reports(self.program.report, 0 if stage is None else stage.index)
            with phases.phase("allocate"), gc_disabled():
                self._allocate(self.loaded)
            if self._user_module is not None:
                self._check_logits()
                self._user_module.remember()
        finally:
            self._kernels.end()

    def _borrowed(self, module: nn.Module) -> StockModel | None:
        """The wrapper around a user's module of transformers."""
        wrapper = self.module
        return wrapper if wrapper is not module and isinstance(wrapper, StockModel) else None

    @property
    def program(self) -> Program:
        """Of steps without images and adapters; its report is that of the model."""
        return self.programs.main

    def _check_logits(self) -> None:
        """Raises ValueError unless a module of the user's has logits of the rows asked for."""
        if self.runner.input_batch.rows > 1 and not isinstance(self.module, StockModel):
            logits = self.runner.empty_step(StepShape(rows=2, sequences=1, wanted=1, columns=1))
            check_logits(self.module, logits)

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
        config, specs, device = self.config, self.programs.specs, self.program.device
        if not specs:
            raise ValueError(
                f"{type(loaded.module).__name__} has no state: each attention layer must create a "
                "handle (ops.kv_state) and pass it to ops.attention"
            )
        no_prefix_cache = _no_prefix_cache(config, specs)
        self._max_num_seqs, self._max_rows = _step_sizes(config, device)
        self.device_times = DeviceTimes(device)
        self.outputs = OutputProcessor(
            device, self._max_num_seqs, self.device_times, self.programs.apart
        )
        self.encoder = self.programs.encoder
        self.slots = Slots(self.outputs.sampler.counts)
        self._groups = BlockGroups.of(specs, in_stages=self.place.stage is not None)
        self.limits = self._sized_limits(loaded.max_len, no_prefix_cache)
        # Before the scheduler's block pool: here, too many blocks fail before a list of them is
        # built.
        self._check_host()
        self.runner = self._runner(self.limits.capacity, self.limits.state_rows)
        # Load kernels for this cache if none was measured, or only a small one: kernels use 64-bit
        # offsets in a large cache.
        large = any(
            tensor.numel() >= 2**31 for tensors in self.runner.caches for tensor in tensors.values()
        )
        if block_size_of(specs) is not None and (_is_sized(config) or large):
            self._load_kernels(self.runner)

    def _sized_limits(self, longest: int, no_prefix_cache: str) -> Limits:
        """The limits with the size of the caches that all ranks have memory for.

        longest          maximum sequence length of the model
        no_prefix_cache  why there is none, whatever the memory; empty if there can be one
        """
        config, device = self.config, self.program.device
        fixed = next((spec for spec in self.programs.specs if not spec.can_roll_back), None)
        rewinds = fixed is not None and config.speculative_tokens > 0
        own_size = self._capacity(longest, rewinds=rewinds, shares=not no_prefix_cache)
        size = smallest(self._groups.whole(own_size), self.num_ranks, device)
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
        return Limits(
            size,
            self._groups.windows,
            self._max_num_seqs,
            self._max_rows,
            no_prefix_cache,
            images=self._image_limits(),
            state_rows=None
            if fixed is None
            else StateRows(self._max_num_seqs, rewinds, size.snapshots),
        )

    def _runner(self, size: Capacity, state_rows: StateRows | None) -> Runner:
        """The runner of all programs, with caches of this size."""
        return Runner(
            self.programs,
            num_blocks=self._groups.own_blocks(size),
            block_size=size.block_size,
            max_num_seqs=self._max_num_seqs,
            max_num_rows=self._max_rows,
            max_columns=-(-size.max_model_len // size.block_size),
            state_rows=state_rows,
            device_times=self.device_times,
        )

    def _check_host(self) -> None:
        """Raises RuntimeError, as torch does, if a host lacks the memory of the caches. Their pages
        are taken when they are written, by steps, and then there would be no error to catch.
        """
        if self.program.device.type == "cpu":
            size = self.limits.capacity
            blocks = zip(self._groups.own_blocks(size), groups_of(self.programs.specs), strict=True)
            needed = sum(count * group.bytes_per_token for count, group in blocks)
            check_free(needed * size.block_size * self.config.num_processes)

    def _load_kernels(self, runner: Runner) -> None:
        """Load the kernels of this runner's steps, and those that sample."""
        self._kernels.load(runner, self.outputs if self.samples else None, self._max_num_seqs)

    def _image_limits(self) -> ImageLimits | None:
        if self.encoder is None:
            return None
        images = self.encoder.images
        return ImageLimits(
            images.token_ids,
            images.merge_size,
            images.patch_width,
            images.bytes_per_token,
            self.config.image_cache_bytes,
            self.config.max_image_patches,
        )

    def _capacity(self, longest: int, *, rewinds: bool, shares: bool) -> Capacity:
        """shares: there is a prefix cache."""
        config, specs, device = self.config, self.programs.specs, self.program.device
        return capacity(
            groups=groups_of(specs),
            block_size=block_size_of(specs),
            available=0
            if _is_sized(config)
            else free_memory(
                device,
                config.gpu_memory_utilization,
                self._activations(longest),
                processes=config.num_processes,
            ),
            image_bytes=self._image_bytes(),
            max_num_seqs=self._max_num_seqs,
            longest=longest,
            max_num_batched_tokens=self._max_rows,
            max_model_len=config.max_model_len,
            num_blocks=config.num_blocks,
            kv_bytes=config.kv_bytes,
            bytes_per_sequence=sum(spec.bytes_per_sequence() for spec in specs),
            rewinds=rewinds,
            snapshots=config.state_snapshots if shares else 0,
        )

    def _image_bytes(self) -> int:
        """Bytes of the cache of embeddings, and of those of a step."""
        if self.encoder is None:
            return 0
        return self.config.image_cache_bytes + self._max_rows * self.encoder.images.bytes_per_token

    def _activations(self, longest: int) -> int:
        """Bytes of activations of the largest step on a GPU, measured with a cache of one block; 0
        on a CPU.
        """
        device, block_size = self.program.device, block_size_of(self.program.specs)
        if device.type != "cuda" or block_size is None:
            return 0
        size = Capacity((1,) * len(self._groups.windows), block_size, longest)
        runner = self._runner(size, StateRows(0))
        self._load_kernels(runner)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        of, wanted = runner.input_batch, min(self._max_rows, self._max_num_seqs)
        logits = runner.empty_step(StepShape(of.rows, of.sequences, wanted, of.columns))
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
        """Run the self check of a transformers class and a step with adapters, and capture CUDA
        graphs.
        """
        with gc_disabled(), evaluation_mode(self.module):
            if self.programs.lora is not None:
                self.runner.empty_step(StepShape(1, 1, 1, 1))
            self._compiler.self_check(self.runner)
            self.runner.shapes = sorted(self._shapes())
            if not self.config.enforce_eager:
                self._capture(self.place.capturing)

    @property
    def padded_rows(self) -> list[int]:
        """Numbers of rows to which steps with prompts are padded, ascending; [] on a CPU."""
        if self.program.device.type == "cpu":
            return []
        return sorted({shape.rows for shape in self.runner.shapes if not shape.is_decode})

    def _shapes(self) -> list[StepShape]:
        """The shapes to which steps are padded, in the order in which to capture them."""
        input_batch = self.runner.input_batch
        return step_shapes(
            self.limits.max_num_seqs,
            input_batch.rows,
            input_batch.columns,
            self.config.speculative_tokens,
            rewinds=self.limits.state_rows is not None,
        )

    def _capture(self, capturing: Capturing = nullcontext) -> None:
        """Capture CUDA graphs, within GRAPH_SHARE of the memory: all of them if a step has to run
        before each, or if other ranks would have to capture it, too. capturing: as in Pool.
        """
        device, shapes, later = self.program.device, self._shapes(), list[StepShape]()
        if self._kernels.kernels_loaded and self.num_ranks == 1:
            later = shapes_for_later(shapes)
        budget = (
            int(GRAPH_SHARE * torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else None
        )
        self.runner.capture(
            [shape for shape in shapes if shape not in later],
            later,
            budget=budget,
            agree=lambda left: minimum([left], self.num_ranks, device)[0],
            kernels_loaded=self._kernels.kernels_loaded,
            capturing=capturing,
        )
        pool = self.runner.pool
        # Ranks that share an encoder would have to capture in the same steps.
        if pool is not None and budget is not None and self.num_ranks == 1 and self.encoder:
            self.encoder.capture(pool, budget)

    @property
    def samples(self) -> bool:
        """Whether this worker has the results of steps, as in Programs."""
        return self.programs.samples

    def ready(self) -> None:
        """Nothing changes: no other process waits for this one."""

    def raise_failure(self) -> None:
        """There are no other processes."""

    def launch(self, step: ScheduledStep) -> "LaunchedStep":
        sampled = step.sample_rows(self.place.data_rank)
        step = self._groups.own_part(step.rank_part(self.place.data_rank))
        states = self.slots.update(step)
        if self.encoder is not None:
            if step.has_images:
                self.device_times.begin()
            self.encoder.update(step)
            if step.has_images:
                embeddings = self.runner.input_batch.row_inputs["embeddings"]
                self.encoder.place(step, states, embeddings)
        outputs = StepOutputs(step, states)
        launched = LaunchedStep(self, outputs, sampled)
        if not step.pooled:
            launched.logits = self.runner.logits(step)
        else:
            hidden = self.runner.hidden(step)
            if self.samples:
                self.outputs.pool(outputs, hidden)
        self.device_times.end()
        return launched

    @property
    def places(self) -> Mapping[int, str]:
        return {}

    @property
    def can_pool(self) -> bool:
        return self.programs.hidden is not None

    def prepare_pooling(self) -> None:
        self._compiler.prepare_pooling(self.runner.caches)

    @property
    def max_loras(self) -> int:
        return 0 if self.programs.lora is None else self.programs.lora.shape.adapters

    def write_adapter(self, number: int, folder: str) -> None:
        assert self.programs.lora is not None, "there is no place for adapters"
        self.programs.lora.write(number, folder)

    def sleep(self) -> None:
        self.runner.free()
        if self.encoder is not None:
            self.encoder.clear()
            self.encoder.drop_graphs()
        if self.program.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        self._check_host()
        self.runner.allocate()
        with gc_disabled():
            if not self.config.enforce_eager:
                self._capture()

    def check(self) -> bool:
        self.device_times.pause()
        if self._user_module is None:
            return False
        written = self._user_module.written()
        for program in self.programs.all:
            program.check()
        return written

    @cached_property
    def _expert_rows(self) -> ExpertLoad:
        return rows_of_experts(self.module)

    def counts(self) -> StepCounts:
        runner, times = self.runner, self.device_times
        times.read()
        load = sum_of_loads(
            expert_counts(program.expert_load(), self._expert_rows)
            for program in self.programs.steps.values()
        )
        graphs = runner.variants["text"].graphs
        return StepCounts(
            steps=dict(runner.steps),
            graphs=len(graphs.captured) if graphs is not None else 0,
            graph_rows=runner.rows,
            graph_padding=runner.padding,
            device_busy=times.busy,
            device_idle=times.idle,
            expert_load=load,
        )

    def forget_counts(self) -> None:
        self.runner.forget_counts()
        self.device_times.forget()
        for program in self.programs.steps.values():
            program.forget_expert_load()

    def close(self) -> None:
        """There are no other processes."""


@dataclass
class LaunchedStep:
    """A launched step of a Worker.

    sampled  the rows of a mask that are those of this worker
    logits   None for a pooling step, and when it is sampled
    """

    worker: Worker
    outputs: StepOutputs
    sampled: slice
    logits: Tensor | None = None

    def sample(self, mask: Tensor | None = None) -> None:
        logits, self.logits = self.logits, None
        if logits is None:
            # Ranks whose parts of the step are sampled run draft steps, and wait for this one.
            if self.outputs.step.size is not None:
                self.worker.runner.propose(self.outputs.step, None)
            return
        mask = None if mask is None else mask[self.sampled]
        worker, outputs = self.worker, self.outputs
        # With speculation, the host knows all tokens before the next step.
        keeps, pipeline = not worker.config.speculative_tokens, worker.programs.pipeline
        if not pipeline.stage.is_last:
            if keeps and pipeline.stage.is_first and outputs.step.num_samples:
                pipeline.expect_tokens(outputs.step.sampled_slots)
            return
        tokens = worker.outputs.sample(outputs, logits, mask)
        if tokens is not None and keeps:
            if pipeline.stage.is_first:
                worker.runner.input_batch.keep_tokens(tokens)
            else:
                pipeline.send_tokens(tokens)
        worker.outputs.keep_drafts(outputs, worker.runner.propose(outputs.step, tokens))
        worker.device_times.end()

    def results(self) -> StepResults:
        results = self.outputs.results() if self.worker.samples else StepResults()
        self.worker.device_times.read()
        return results


def _check_names(options: Options) -> None:
    """Raise OptionsError for unknown passes and providers. Imports the compiler only for them."""
    if options.passes:
        from atomc.compiler.pipeline import check_switches
        from atomc.passes import PIPELINE

        check_switches(PIPELINE, options.passes, paged=True)
    if options.providers:
        from atomc.compiler.select import check_providers

        check_providers(options.providers)


def _step_sizes(config: EngineConfig, device: torch.device) -> tuple[int, int]:
    """(sequences, tokens) of a step at most."""
    max_num_seqs = config.max_num_seqs or MAX_NUM_SEQS.get(device.type, 256)
    max_num_batched_tokens = config.max_num_batched_tokens or max(
        MAX_NUM_BATCHED_TOKENS.get(device.type, 2048), max_num_seqs
    )
    return max_num_seqs, max_num_batched_tokens


def _is_sized(config: EngineConfig) -> bool:
    """Whether the config sets the size of the cache; otherwise it depends on free memory."""
    return config.kv_bytes is not None or config.num_blocks is not None


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
