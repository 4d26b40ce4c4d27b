"""The executor of this process: the model, its state, and what is kept of the requests that run."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from atomc.models.stock import StockModel
from atomc.ops.state import StateSpec, block_size_of, groups_of
from atomc.options import Options
from atomc.program import Program, compile_model
from atomc.runtime.capacity import GRAPH_SHARE, Capacity, capacity, free_memory
from atomc.runtime.config import EngineConfig
from atomc.runtime.executor import Limits, Result, StepCounts
from atomc.runtime.graphs import step_shapes
from atomc.runtime.headless_model import headless_model
from atomc.runtime.loading import LoadedModel, load
from atomc.runtime.phases import Phases, uncollected
from atomc.runtime.runner import Runner
from atomc.runtime.sampling.output_processor import OutputProcessor, StepOutputs
from atomc.runtime.sampling.sample_spec import SampleSpec
from atomc.runtime.sampling.sampling_params import SamplingParams
from atomc.runtime.self_check import self_check
from atomc.runtime.slots import Slots
from atomc.runtime.step import ScheduledStep
from atomc.runtime.step_kernels import StepKernels
from atomc.runtime.threads import Threads, choose, use

log = logging.getLogger("atomc")

MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
# Every request waits for the whole step. On a CPU, prompts of 1,000 tokens take as long in chunks
# of 256 as in one.
MAX_NUM_BATCHED_TOKENS = {"cpu": 256, "cuda": 2048}


class Worker:
    """An Executor of steps of one model on one device. `warm_up` is called once, before the first
    step.

    module, spare_cores   as in Engine
    phases   of the start: "load", "compile" and "allocate" are in this

    Raises what Engine raises, and RuntimeError where memory runs out.
    """

    def __init__(
        self,
        config: EngineConfig,
        phases: Phases,
        *,
        module: nn.Module | None = None,
        progress: bool = True,
        spare_cores: int = 0,
    ) -> None:
        self.config = config
        self.progress = progress
        self.threads: Threads | None = None
        self._owns_weights = (
            module is None
        )  # a module that was given is its user's, who may write into it
        self._hidden: Program | None = None
        self._kernels = StepKernels(config)
        try:
            with phases.phase("load"):
                self.loaded = load(config, module, progress=progress)
                self.module = self.loaded.module
                # Before anything is compiled: code for a CPU is made for a number of threads.
                self._set_threads(spare_cores)
            with phases.phase("compile"), uncollected():
                self._kernels.begin(self.module, self.loaded.vocab_size)
                self.program = compile_model(
                    self.module, options=config.options, owned=self._owns_weights
                )
                if self.threads is not None:
                    self.program.report.notes.append(str(self.threads))
            with phases.phase("allocate"), uncollected():
                self._allocate(self.loaded)
        finally:
            self._kernels.end()

    def _set_threads(self, spare_cores: int) -> None:
        if next(self.module.parameters()).device.type != "cpu":
            return
        self.threads = choose(self.config.threads, spare=spare_cores)
        use(self.threads)
        log.info("%s", self.threads)

    def _allocate(self, loaded: LoadedModel) -> None:
        """Size the cache, and make what works on it."""
        config, specs, device = self.config, self.program.specs, self.program.device
        if not specs:
            raise ValueError(
                f"{type(loaded.module).__name__} keeps no state: each of its attention layers "
                "must own a "
                "handle (ops.kv_state) and pass it to ops.attention"
            )
        _refuse_drafts(config, specs)
        no_prefix_cache = _no_prefix_cache(config, specs)
        max_num_seqs = config.max_num_seqs or MAX_NUM_SEQS.get(device.type, 256)
        max_num_batched_tokens = config.max_num_batched_tokens or max(
            MAX_NUM_BATCHED_TOKENS.get(device.type, 2048), max_num_seqs
        )
        self.outputs = OutputProcessor(device, max_num_seqs)
        self.slots = Slots(self.outputs.sampler.counts)
        sized = config.kv_bytes is not None or config.num_blocks is not None
        size = self._capacity(max_num_seqs, max_num_batched_tokens, loaded.max_len, sized=sized)
        if no_prefix_cache and config.enable_prefix_caching is None:
            self.program.report.notes.append(f"no prefix cache: {no_prefix_cache}")
            log.info("no prefix cache: %s", no_prefix_cache)
        # Before the scheduler's pool, which keeps a list of the blocks: too many of them are
        # refused at once.
        self.runner = Runner(
            self.program,
            num_blocks=size.num_blocks,
            block_size=size.block_size,
            max_num_seqs=max_num_seqs,
            max_num_rows=max_num_batched_tokens,
            max_columns=-(-size.max_model_len // size.block_size),
        )
        # Nothing was measured, or in a small cache: kernels count in 64 bits in one as large as
        # this.
        large = any(
            tensor.numel() >= 2**31 for tensors in self.runner.caches for tensor in tensors.values()
        )
        if block_size_of(specs) is not None and (sized or large):
            self._kernels.meet(self.runner, self.outputs.sampler, max_num_seqs)
        self.limits = Limits(
            size,
            tuple(group.window for group in groups_of(specs)),
            max_num_seqs,
            max_num_batched_tokens,
            no_prefix_cache,
            can_roll_back=all(spec.can_roll_back for spec in specs),
        )

    def _capacity(
        self, max_num_seqs: int, max_num_batched_tokens: int, longest: int, *, sized: bool
    ) -> Capacity:
        """sized: the config says how large the cache is, otherwise free memory does."""
        config, specs, device = self.config, self.program.specs, self.program.device
        return capacity(
            groups=groups_of(specs),
            block_size=block_size_of(specs),
            available=0
            if sized
            else free_memory(
                device,
                config.gpu_memory_utilization,
                self._activations(max_num_seqs, max_num_batched_tokens, longest),
            ),
            max_num_seqs=max_num_seqs,
            longest=longest,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=config.max_model_len,
            num_blocks=config.num_blocks,
            kv_bytes=config.kv_bytes,
            bytes_per_sequence=sum(spec.bytes_per_sequence() for spec in specs),
        )

    def _activations(self, max_num_seqs: int, rows: int, longest: int) -> int:
        """Bytes that a step of so many rows takes beside weights and cache on a GPU: measured, on a
        cache of one block.
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
            num_slots=0,
        )
        self._kernels.meet(runner, self.outputs.sampler, max_num_seqs)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        logits = runner.padding_only(min(rows, max_num_seqs))
        self.outputs.sampler(
            logits, [SampleSpec(SamplingParams(temperature=1.0, top_p=0.9))] * len(logits)
        )
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before

    def warm_up(self) -> None:
        """Check a class of transformers, and capture CUDA graphs for the steps that come often."""
        with uncollected():
            if self.config.self_check and isinstance(self.module, StockModel):
                self_check(
                    self.module,
                    self.program,
                    Options.of(self.config.options),
                    columns=self.runner.staging.columns,
                )
                self.program.bind(self.runner.caches)
            if not self.config.enforce_eager:
                self._capture()

    def _capture(self) -> None:
        """CUDA graphs, in their share of the memory."""
        device, staging = self.program.device, self.runner.staging
        shapes = step_shapes(
            self.limits.max_num_seqs, staging.rows, staging.columns, self.config.speculative_tokens
        )
        budget = (
            int(GRAPH_SHARE * torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else None
        )
        self.runner.capture(shapes, budget=budget, met=self._kernels.met, progress=self.progress)

    def launch(self, step: ScheduledStep) -> "LaunchedStep":
        drawn = StepOutputs(step, self.slots.enter(step))
        if not step.pooled:
            return LaunchedStep(self, drawn, self.runner.logits(step))
        assert self._hidden is not None, "a request for hidden states, and no program for them"
        self.outputs.pool(drawn, self.runner.hidden(self._hidden, step))
        return LaunchedStep(self, drawn)

    @property
    def pools(self) -> bool:
        return self._hidden is not None

    def prepare_pooling(self) -> None:
        if self._hidden is None:
            program = compile_model(
                headless_model(self.module), options=self.config.options, owned=self._owns_weights
            )
            program.bind(self.runner.caches)
            self._hidden = program

    def check(self) -> None:
        self.program.check()

    def counts(self) -> StepCounts:
        return StepCounts(dict(self.runner.steps), self.runner.rows, self.runner.padding)

    def forget_counts(self) -> None:
        self.runner.forget_counts()


class LaunchedStep:
    """A step of a Worker; logits: None for one of hidden states."""

    def __init__(self, worker: Worker, drawn: StepOutputs, logits: Tensor | None = None) -> None:
        self._worker, self._drawn, self._logits = worker, drawn, logits

    def sample(self, mask: Tensor | None = None) -> None:
        logits, self._logits = self._logits, None
        if logits is None:
            return
        tokens = self._worker.outputs.draw(self._drawn, logits, mask)
        # Where drafts are made, the host knows all tokens before the next step.
        if tokens is not None and not self._worker.config.speculative_tokens:
            self._worker.runner.staging.keep(tokens)

    def results(self) -> list[Result]:
        return self._drawn.results()


def _no_prefix_cache(config: EngineConfig, specs: Sequence[StateSpec]) -> str:
    """Why there is none; empty: there is one. Raises ValueError if it was asked for and cannot
    be.
    """
    if config.enable_prefix_caching is False:
        return "enable_prefix_caching is off"
    why = next((spec.why_unshared for spec in specs if spec.why_unshared), "")
    if why and config.enable_prefix_caching:
        raise ValueError(f"enable_prefix_caching: {why}")
    return why


def _refuse_drafts(config: EngineConfig, specs: Sequence[StateSpec]) -> None:
    """Raises ValueError if drafts are wanted, and a wrong one could not be taken back."""
    fixed = next((spec for spec in specs if not spec.can_roll_back), None)
    if config.speculative_tokens and fixed is not None:
        raise ValueError(
            f"speculative_tokens is {config.speculative_tokens}: {fixed.name} keeps one state "
            "a sequence "
            f"(kind {fixed.kind!r}), which a wrong draft cannot be taken out of; set it to 0"
        )
