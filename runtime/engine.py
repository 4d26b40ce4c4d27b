"""The engine: one model in this process, tokens in and tokens out."""

import gc
import logging
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from atomc.models.stock import StockModel
from atomc.ops import LAYOUTS
from atomc.options import Options
from atomc.program import Program, compile_model
from atomc.runtime.blocks import BlockPool
from atomc.runtime.capacity import GRAPH_SHARE, capacity, free_memory
from atomc.runtime.config import EngineConfig
from atomc.runtime.draw import Draw
from atomc.runtime.drawing import Drawing, Drawn, Result
from atomc.runtime.fence import Fence, RequestError, RequestFailed, is_contained
from atomc.runtime.graphs import step_shapes
from atomc.runtime.hidden import hidden_model
from atomc.runtime.loading import load
from atomc.runtime.logprobs import TokenLogprobs
from atomc.runtime.request import Output, Pooling, Request
from atomc.runtime.runner import Runner, windows_of
from atomc.runtime.sampling_params import SamplingParams
from atomc.runtime.scheduler import QueueFull, ScheduledStep, Scheduler
from atomc.runtime.self_check import self_check
from atomc.runtime.speculative import NGram
from atomc.runtime.stats import Stats
from atomc.runtime.step_kernels import StepKernels
from atomc.runtime.structured import Grammars
from atomc.runtime.threads import Threads, choose, use
from atomc.torch_compat.exceptions import out_of_memory

__all__ = ["PHASES", "Engine", "EngineConfig", "Output", "QueueFull", "Request", "SamplingParams", "Stats"]

log = logging.getLogger("atomc")

PHASES = ("load", "compile", "allocate", "warm up")
WARM_UP_TOKENS = 8
MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
MEMORY = 0.02  # weight of the last step in the mean host time


class Engine:
    """One model on one device; not thread-safe, and without threads: whoever calls `step` advances it.

    module     instead of config.model: one of ours, a stock transformers model (its attention is replaced in place,
               see wrap_stock), or any other that is called as
               `model(input_ids [T], positions [T], logits_rows [R]) -> logits [R, V]`
    progress   bars on the terminal while it starts
    spare_cores   of a CPU, left to other processes if there are more than two

    On a CPU torch computes with config.threads threads from now on, in the whole process; `threads` says why so many.

    The host decides about a step and launches it while the device still runs the step before: a token that is drawn
    stays on the device and is fed to the next step, and the host learns of it one step later.

    What goes wrong for one request while it is admitted, scheduled, drawn, read or pooled ends that request, with an
    Output that says why; the others continue, and get the tokens that they would have got without it. What goes wrong
    for a step as a whole, or on the device, comes through.

    program.report says what the compiler did, phases how long each part of the start took (seconds), max_len how many
    tokens the longest sequence has.

    Raises ValueError for what does not fit together, OptionsError (a ValueError) for a wrong option, FileNotFoundError
    for an incomplete checkpoint, ImportError if a tokenizer needs a library that is not installed.
    """

    def __init__(
        self, config: EngineConfig, *, module: nn.Module | None = None, progress: bool = True, spare_cores: int = 0
    ) -> None:
        self.config = config
        self.threads: Threads | None = None
        self._spare_cores = spare_cores
        self.phases: dict[str, float] = {}
        self.host_ms = 0.0
        self._seeds = random.Random(config.seed)
        self._flight: Drawn | None = None
        self.fence = Fence()
        self._others: list[Output] = []  # what `embed` learned of the requests of others
        self._scores: dict[str, list[TokenLogprobs]] = {}
        self._drafters: dict[str, NGram] = {}
        self._hidden: Program | None = None
        self._kernels = StepKernels(config)
        self._speculates = config.speculative_tokens > 0
        # disable=None: no bar where there is no terminal.
        with tqdm(total=len(PHASES), unit="phase", leave=False, disable=None if progress else True) as bar:
            try:
                self._start(module, progress, bar)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                raise ValueError(self._too_large()) from error
            finally:
                self._kernels.end()

    def _start(self, module: nn.Module | None, progress: bool, bar: "tqdm[Any]") -> None:
        config = self.config
        with self._phase("load", bar):
            loaded = load(config, module, progress=progress)
            self.module, self.tokenizer = loaded.module, loaded.tokenizer
            self.eos_ids, self.vocab_size = loaded.eos_ids, loaded.vocab_size
            # Before anything is compiled: code for a CPU is made for a number of threads.
            self._set_threads(loaded.module)
        with self._phase("compile", bar), _uncollected():
            self._kernels.begin(loaded.module, self.vocab_size)
            self.program = compile_model(loaded.module, options=config.options)
            if self.threads is not None:
                self.program.report.notes.append(str(self.threads))
        with self._phase("allocate", bar), _uncollected():
            self._allocate(type(loaded.module).__name__, loaded.longest)
        with self._phase("warm up", bar), _uncollected():
            if config.self_check and isinstance(loaded.module, StockModel):
                self_check(loaded.module, self.program, Options.of(config.options), columns=self.runner.staging.columns)
                self.program.bind(self.runner.caches)
            if not config.enforce_eager:
                self._capture(progress)
            self._warm_up()

    def _set_threads(self, module: nn.Module) -> None:
        if next(module.parameters()).device.type != "cpu":
            return
        self.threads = choose(self.config.threads, spare=self._spare_cores)
        use(self.threads)
        log.info("%s", self.threads)

    def _too_large(self) -> str:
        """What to do when memory ran out while it started."""
        if "compile" not in self.phases:
            return ("out of memory while the weights were read: take a smaller model, or fewer bits for each weight (dtype "
                    "bfloat16, or quantization)")  # fmt: skip
        sized = next((name for name in ("kv_bytes", "num_blocks") if getattr(self.config, name) is not None),
                     "gpu_memory_utilization")  # fmt: skip
        return (f"out of memory while starting: lower {sized} (now {getattr(self.config, sized)}), max_num_batched_tokens, "
                "max_num_seqs or max_model_len")  # fmt: skip

    def _allocate(self, name: str, longest: int) -> None:
        """Size the cache, and make what works on it."""
        config, specs, device = self.config, self.program.specs, self.program.device
        if not specs:
            raise ValueError(f"{name} keeps no state: each of its attention layers must own a handle (ops.kv_state) and "
                             "pass it to ops.attention")  # fmt: skip
        max_num_seqs = config.max_num_seqs or MAX_NUM_SEQS.get(device.type, 256)
        self.drawing = Drawing(device, max_num_seqs, self._grammars, self.fence)
        block_size = LAYOUTS[specs[0].layout].block_size
        windows = windows_of(self.program)
        sized = config.kv_bytes is not None or config.num_blocks is not None
        size = capacity(
            groups=[(sum(spec.bytes_per_token() for spec in specs if spec.group == group), window)
                    for group, window in enumerate(windows)],
            block_size=block_size,
            available=0 if sized else free_memory(device, config.gpu_memory_utilization,
                                                  self._activations(max_num_seqs, longest)),
            max_num_seqs=max_num_seqs,
            longest=longest,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            num_blocks=config.num_blocks,
            kv_bytes=config.kv_bytes,
        )  # fmt: skip
        self.no_prefix_cache = _no_prefix_cache(config, specs[0].layout)
        if self.no_prefix_cache and config.enable_prefix_caching is None:
            self.program.report.notes.append(f"no prefix cache: {self.no_prefix_cache}")
            log.info("no prefix cache: %s", self.no_prefix_cache)
        # Before the pool, which keeps a list of the blocks: too many of them are refused at once.
        self.runner = Runner(
            self.program, num_blocks=size.num_blocks, block_size=size.block_size, max_num_seqs=max_num_seqs,
            max_num_rows=config.max_num_batched_tokens, max_columns=-(-size.max_model_len // size.block_size),
        )  # fmt: skip
        # Nothing was measured, or in a small cache: kernels count in 64 bits in one as large as this.
        if block_size is not None and (sized or any(keys.numel() >= 2**31 for keys, _ in self.runner.caches)):
            self._kernels.meet(self.runner, self.drawing.sampler, max_num_seqs)
        self.scheduler = Scheduler(
            BlockPool(size.num_blocks, size.block_size, windows, shares=not self.no_prefix_cache),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=size.max_model_len,
            max_queue=config.max_queue,
            policy=config.scheduling_policy,
            fence=self.fence,
        )  # fmt: skip
        self.max_len = self.scheduler.max_len
        log.info("the cache holds %d tokens, %.1f sequences of full length (%d tokens)", self.scheduler.pool.num_tokens,
                 self.scheduler.pool.num_tokens / self.max_len, self.max_len)  # fmt: skip

    def _activations(self, max_num_seqs: int, longest: int) -> int:
        """Bytes that the largest step takes beside weights and cache on a GPU: measured, on a cache of one block."""
        device, block_size = self.program.device, LAYOUTS[self.program.specs[0].layout].block_size
        if device.type != "cuda" or block_size is None:
            return 0
        rows = self.config.max_num_batched_tokens
        runner = Runner(self.program, num_blocks=1, block_size=block_size, max_num_seqs=max_num_seqs, max_num_rows=rows,
                        max_columns=-(-longest // block_size))  # fmt: skip
        self._kernels.meet(runner, self.drawing.sampler, max_num_seqs)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        logits = runner.padding_only(min(rows, max_num_seqs))
        params = SamplingParams(temperature=1.0, top_p=0.9)
        self.drawing.sampler(logits, [Draw("", params)] * len(logits))
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before

    def request(
        self, request_id: str, tokens: Sequence[int], params: SamplingParams | None = None, *, priority: int = 0,
        salt: str | None = None, pooling: Pooling | None = None,
    ) -> Request:  # fmt: skip
        """A request for this model: with its end-of-sequence tokens, and a seed if params has none.

        `siblings` makes one for each answer of it. Raises ValueError for an empty prompt.
        """
        return Request(request_id, list(tokens), params or SamplingParams(), self.eos_ids,
                       seed=self._seeds.getrandbits(64), priority=priority, salt=salt, pooling=pooling)  # fmt: skip

    def refuse(self, request: Request) -> None:
        """Raise ValueError for a request that can never run: too long, its id in use, a token that does not exist, no token
        that may come first."""
        for token in request.tokens:
            if token < 0 or (self.vocab_size is not None and token >= self.vocab_size):
                raise ValueError(f"token id {token} is not in the vocabulary of {self.vocab_size} tokens")
        if self.vocab_size is not None:
            request.params.refuse_beyond(self.vocab_size)
            if request.params.min_tokens and request.banned.issuperset(range(self.vocab_size)):
                least = request.params.min_tokens
                raise ValueError(f"min_tokens is {least}, and stop_token_ids and end-of-sequence tokens "
                                 "are the whole vocabulary: no token may come first")  # fmt: skip
        self.scheduler.refuse(request)

    def add(self, request: Request) -> None:
        """Queue a request. Raises what `refuse` raises, QueueFull if too many wait, ValueError for a form of output that
        cannot be compiled (ImportError without the library for it), and RequestFailed for any other error that concerns
        this request alone."""
        self.refuse(request)
        if not self.has_work:
            self.program.check()  # raises RunError if a module's weights were replaced
        try:
            self._begin(request)
        except BaseException as error:
            self._forget(request.id)
            if not is_contained(error) or isinstance(error, ValueError | ImportError | QueueFull):
                raise
            self.fence.fail(request.id, "admitting it", error)
            raise RequestFailed(self.fence.failed.pop(request.id)) from error
        request.arrival = time.time()

    def _begin(self, request: Request) -> None:
        if request.pooling is not None:
            self.prepare_pooling()
        self.drawing.begin(request)
        self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """Drop a request; False if there is none of this id (it may just have finished). No output of it follows."""
        found = self.scheduler.abort(request_id)
        if found:
            self._forget(request_id)
        return found

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.requests) or self._flight is not None

    def step(self) -> list[Output]:
        """Decide about a step and launch it, then take what came of the step before.

        What is new of each request; [] does not mean that nothing is to come, see has_work. A request that failed has
        an Output with the error. If a step fails as a whole, what it raised comes through, and the requests are as they
        were before it.
        """
        began, self._waited = time.perf_counter(), 0.0
        outputs, self._others = self._others, []
        if self._speculates:
            outputs += self._collect()  # a draft is made of known tokens
            self._draft()
        step = self.scheduler.next_step()
        launched = None
        if step is not None:
            try:
                if step.pooled:
                    launched = self._pool(step)
                else:
                    logits = self.runner.logits(step)
                    if self.drawing.needs_tokens(step):
                        outputs += self._collect()
                    launched = self._draw(step, logits)
            except BaseException:
                self.scheduler.undo_step(step)
                raise
        outputs += self._collect()
        self._flight = launched
        outputs += self._failed()
        if step is not None:
            milliseconds = 1e3 * (time.perf_counter() - began - self._waited)
            self.host_ms += MEMORY * (milliseconds - self.host_ms) if self.host_ms else milliseconds
        return outputs

    def embed(self, prompts: Sequence[Sequence[int]], pooling: Pooling = "mean") -> list[list[float]]:
        """For each prompt the mean of its tokens' hidden states, or the last one's; not normalized.

        They are requests like others (`request(pooling=...)`, `Output.embedding`), and run together with them. The first
        one compiles the model once more, without its head. Raises ValueError as `add` does, before anything is computed,
        and for a model whose head is not known, and RequestFailed if hidden states are NaN.
        """
        requests = [self.request(f"embed {i}", prompt, pooling=pooling) for i, prompt in enumerate(prompts)]
        for request in requests:
            self.refuse(request)
        ids = {request.id for request in requests}
        found: dict[str, list[float]] = {}
        waiting = requests.copy()
        try:
            while len(found) < len(requests):
                while waiting and len(self.scheduler.waiting) < self.config.max_queue:
                    self.add(waiting.pop(0))
                outputs = self.step()
                self._others += [output for output in outputs if output.request_id not in ids]
                for output in outputs:
                    if output.request_id in ids:
                        if output.error is not None:
                            raise RequestFailed(output.error)
                        found[output.request_id] = list(output.embedding or ())
        finally:
            for request in requests:
                self.abort(request.id)
        return [found[request.id] for request in requests]

    def _draw(self, step: ScheduledStep, logits: Tensor) -> Drawn:
        drawn, tokens = self.drawing.draw(step, logits, self.scheduler.last_requests)
        if tokens is not None and not self._speculates:
            self.runner.staging.keep(tokens)
        return drawn

    def _pool(self, step: ScheduledStep) -> Drawn:
        assert self._hidden is not None, "a request for hidden states, and no program for them"
        return self.drawing.pool(step, self.runner.hidden(self._hidden, step), self.scheduler.last_requests)

    @property
    def pools(self) -> bool:
        """Whether a request with pooling starts at once: what it needs is compiled."""
        return self._hidden is not None

    def prepare_pooling(self) -> None:
        """Compile the model once more, over the same weights and caches, without its head; steps may run meanwhile.

        Raises ValueError for a model whose head is not known.
        """
        if self._hidden is None:
            program = compile_model(hidden_model(self.module), options=self.config.options)
            program.bind(self.runner.caches)
            self._hidden = program

    def _draft(self) -> None:
        """Guess what follows the tokens of requests that have only their last one to compute."""
        for request in self.scheduler.running:
            if request.pending == 1 and request.num_new and not request.pooling:
                request.draft = self.fence.run(request.id, "guessing its next tokens", self._guess, request) or ()

    def _guess(self, request: Request) -> tuple[int, ...]:
        config = self.config
        drafter = self._drafters.setdefault(request.id, NGram(config.ngram_min, config.ngram_max))
        count = min(config.speculative_tokens, request.room(self.max_len) - 1)
        return tuple(drafter.propose(request.tokens, count)) if count > 0 else ()

    def _collect(self) -> list[Output]:
        """What came of the step in flight, if there is one."""
        flight, self._flight = self._flight, None
        if flight is None:
            return []
        requests = self.scheduler.first_requests
        began = time.perf_counter()
        results = flight.results(requests, self.fence)
        self._waited += time.perf_counter() - began
        failed = self._failed()
        found = {request.id: result for request, result in zip(requests, results, strict=True)
                 if request.finish_reason is None}  # fmt: skip
        outputs = self.scheduler.finish_step(flight.step, [
            result.tokens for result, chunk in zip(results, flight.step.chunks, strict=True) if chunk.draws
        ])  # fmt: skip
        for name, result in found.items():
            if result.scores:
                self._scores.setdefault(name, []).extend(result.scores)
        return failed + [self._told(output, found[output.request_id]) for output in outputs]

    def _told(self, output: Output, result: Result) -> Output:
        """The output with what the scheduler does not know."""
        name = output.request_id
        self.fence.run(name, "following its form of output", self.drawing.take, name, output.token_ids)
        if name in self.fence.failed:
            return self._end(name, self.fence.failed.pop(name))
        scores = self._scores.pop(output.request_id, None) if output.token_ids else None
        if output.finish_reason is not None:
            self._forget(output.request_id)
        if scores is None and result.logprobs is None and result.embedding is None:
            return output
        return replace(
            output,
            logprobs=result.logprobs and result.logprobs[: len(output.token_ids)],
            prompt_logprobs=None if scores is None else (None, *scores),
            embedding=result.embedding,
        )

    def _failed(self) -> list[Output]:
        """The last outputs of the requests that failed since this was last asked, and are dropped now."""
        return [self._end(name, error) for name, error in self.fence.take().items() if name in self.scheduler.requests]

    def _end(self, request_id: str, error: RequestError) -> Output:
        """Drop a request that failed, which the scheduler may have dropped already."""
        if not error.by_client:
            # If the cache holds NaN, so do the blocks that it shared.
            self.scheduler.pool.unname(request_id)
        self.scheduler.abort(request_id, "error")
        self._forget(request_id)
        return Output(request_id, (), finish_reason="error", error=error)

    def _forget(self, request_id: str) -> None:
        self.drawing.forget(request_id)
        self._scores.pop(request_id, None)
        self._drafters.pop(request_id, None)

    def _grammars(self) -> Grammars:
        if self.tokenizer is None or self.vocab_size is None:
            raise ValueError("structured output needs the model's tokenizer, and there is none")
        return Grammars(self.tokenizer, self.eos_ids, self.vocab_size, seconds=self.config.grammar_seconds,
                        cache_bytes=self.config.grammar_cache_bytes)  # fmt: skip

    def stats(self) -> Stats:
        """What it has done and what it is doing."""
        pool, done = self.scheduler.pool, self.scheduler.counters
        return Stats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_blocks_used=pool.num_blocks - pool.num_free,
            kv_blocks_total=pool.num_blocks,
            kv_tokens=pool.num_tokens,
            kv_tokens_used=pool.tokens_used({request.id: request.computed for request in self.scheduler.running}),
            max_len=self.max_len,
            steps=dict(self.runner.steps),
            graph_rows=self.runner.rows,
            graph_padding=self.runner.padding,
            host_ms=self.host_ms,
            no_prefix_cache=self.no_prefix_cache,
            **vars(done),
        )

    def check(self) -> None:
        """Assert what holds between two calls."""
        self.scheduler.check()
        assert self.scheduler.num_flights == (self._flight is not None), "a step is lost"

    def _capture(self, progress: bool) -> None:
        """CUDA graphs for the steps that come often, in their share of the memory."""
        device, staging = self.program.device, self.runner.staging
        shapes = step_shapes(self.scheduler.max_num_seqs, staging.rows, staging.columns, self.config.speculative_tokens)
        budget = int(GRAPH_SHARE * torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else None
        self.runner.capture(shapes, budget=budget, met=self._kernels.met, progress=progress)

    def _warm_up(self) -> None:
        """Generate, so that nothing is compiled when it matters, and forget what was counted."""
        prompt = [0] * min(WARM_UP_TOKENS, self.max_len - 1)
        self.add(self.request("warm up", prompt, SamplingParams(max_tokens=2, ignore_eos=True)))
        while self.has_work:
            self.step()
        self.scheduler.forget_counts()
        self.runner.forget_counts()

    @contextmanager
    def _phase(self, name: str, bar: "tqdm[Any]") -> Iterator[None]:
        bar.set_description(name)
        started = time.perf_counter()
        yield
        self.phases[name] = time.perf_counter() - started
        bar.update()


def _no_prefix_cache(config: EngineConfig, layout: str) -> str:
    """Why there is none; empty: there is one. Raises ValueError if it was asked for and cannot be."""
    if config.enable_prefix_caching is False:
        return "enable_prefix_caching is off"
    if LAYOUTS[layout].block_size is not None:
        return ""
    why = f"in layout {layout!r} a block holds a whole sequence, so none can be shared; layout 'paged' has one"
    if config.enable_prefix_caching:
        raise ValueError(f"enable_prefix_caching: {why}")
    return why


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection inside: while compiling it takes a second in all, and a capture may free nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
