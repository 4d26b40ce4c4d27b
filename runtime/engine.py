"""The engine: runs one model; requests and outputs are token ids."""

import logging
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from torch import Tensor, nn

from atomc.runtime.admission import refuse_adapter, refuse_images, refuse_tokens
from atomc.runtime.config import EngineConfig
from atomc.runtime.constrained.grammar_compiler import GrammarCompiler
from atomc.runtime.constrained.request_state import RequestState
from atomc.runtime.constrained.structured_outputs import StructuredMatchers, accept_tokens
from atomc.runtime.constrained.token_masks import TokenMasks, num_output
from atomc.runtime.create_scheduler import create_scheduler
from atomc.runtime.execution.executor import Executor, Launched, Result
from atomc.runtime.execution.loading.load import LoadedModel
from atomc.runtime.execution.timings import Phases
from atomc.runtime.execution.worker import Worker
from atomc.runtime.interrupts import interrupts_delayed
from atomc.runtime.lora_adapters import LoraAdapters
from atomc.runtime.processes.garbage_collection import gc_disabled
from atomc.runtime.ranks.rank_failed import FailureHandler, RankFailed
from atomc.runtime.ranks.rank_launcher import RankLauncher
from atomc.runtime.requests.request import Output, Pooling, PromptImage, Request
from atomc.runtime.requests.request_errors import (
    RequestError,
    RequestErrors,
    RequestFailed,
    is_recoverable,
)
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.scheduling.prompt_budget import PromptBudget
from atomc.runtime.scheduling.scheduler import QueueFull
from atomc.runtime.scheduling.speculative import NGramProposer
from atomc.runtime.scheduling.stats import Stats
from atomc.runtime.scheduling.step import ScheduledStep
from atomc.runtime.sleeping import EngineAsleep, refuse_level, refuse_running, wakes_state
from atomc.runtime.start_executor import out_of_memory_message, start_executor
from atomc.runtime.torch_modes import torch_modes_off
from atomc.torch_compat.exceptions import out_of_memory

if TYPE_CHECKING:  # needs pyzmq
    from atomc.runtime.ranks.executor import RankExecutor

# Names that users import from here, besides those defined below.
__all__ = ["EngineConfig", "Output", "QueueFull", "Request", "SamplingParams", "Stats"]

log = logging.getLogger("atomc")

PHASES = ("load", "compile", "allocate", "warm up")
WARM_UP_TOKENS = 8
NO_RESULT = Result()
CAPTURE_STEPS = 16  # while there is work, from one capture of a CUDA graph to the next
HOST_MS_WEIGHT = 0.02  # weight of the last step in the mean host time


@dataclass(frozen=True)
class _StepInFlight:
    """began: time.perf_counter() at the start of the call that launched it."""

    began: float
    step: ScheduledStep
    running: Launched


class Engine:
    """One model, on one device or on one of each rank. Not thread-safe; the caller calls `step` in
    a loop.

    module     used instead of config.model: one of ours, a stock transformers model (its attention
               is replaced in place, see wrap_stock), or any module called as
               `model(input_ids [T], positions [T], logits_rows [R]) -> logits [R, V]`; one with
               a vision encoder as in atomc.runtime.execution.images.model
    progress   show progress bars during the start
    spare_cores   CPU cores left to other processes, if there are more than two
    on_rank_failure   called in another thread if a rank fails and this thread does not return to
                      `step` soon, with several ranks
    rank_launcher     starts the other ranks; default: as processes of this host

    On a CPU, sets torch's number of threads for the whole process to config.threads; `threads` says
    why this many.

    The host schedules and launches a step while the device runs the previous one: a sampled token
    stays on the device as input of the next step, and the host reads it one step later.

    An error of a single request (admission, scheduling, sampling, reading, pooling) ends that
    request with an Output that has the error; the tokens of other requests do not change. An error
    of a whole step or of the device is raised by `step`. So is RankFailed, after which the engine
    can only be closed: see atomc.runtime.ranks.

    program.report   what the compiler did
    phases           seconds of each phase of the start
    max_len          maximum sequence length in tokens

    Raises ValueError for conflicting settings, OptionsError (a ValueError) for an invalid option,
    FileNotFoundError for an incomplete checkpoint, ImportError if a tokenizer needs a library that
    is not installed.
    """

    @torch_modes_off()
    def __init__(
        self,
        config: EngineConfig,
        *,
        module: nn.Module | None = None,
        progress: bool = True,
        spare_cores: int = 0,
        on_rank_failure: FailureHandler | None = None,
        rank_launcher: RankLauncher | None = None,
    ) -> None:
        self.config = config
        self.host_ms = 0.0
        self.is_sleeping = False
        self.request_errors = RequestErrors()
        self._states: dict[str, RequestState] = {}
        self._seeds = random.Random(config.seed)
        self._in_flight: deque[_StepInFlight] = deque()
        self._outputs: list[Output] = []  # that the next `step` returns
        self._speculates = config.speculative_tokens > 0
        self._prompt_budget: PromptBudget | None = None
        self._steps_to_capture = CAPTURE_STEPS  # none while it warms up
        phases = Phases(PHASES, progress=progress)
        self.phases = phases.seconds
        try:
            executor, worker = start_executor(
                config,
                phases,
                module=module,
                spare_cores=spare_cores,
                on_rank_failure=on_rank_failure,
                rank_launcher=rank_launcher,
            )
            try:
                self._serve_with(executor, worker, phases)
            except BaseException:  # Ctrl-C too: no process may remain
                executor.close()
                raise
        except RuntimeError as error:
            if isinstance(error, RankFailed) or not out_of_memory(error):
                raise
            raise ValueError(
                out_of_memory_message(config, compiled="compile" in self.phases)
            ) from error
        finally:
            phases.close()

    def _serve_with(
        self, executor: "Worker | RankExecutor", worker: Worker, phases: Phases
    ) -> None:
        """Create the scheduler for this executor, and warm up. worker: of this process."""
        config = self.config
        self.executor: Executor = executor
        self.module, self.program, self.threads = worker.module, worker.program, worker.threads
        self._runner = worker.runner
        self._runs_in_launch = worker.program.device.type == "cpu"
        loaded = worker.loaded
        self.tokenizer, self.eos_ids, self.vocab_size = (
            loaded.tokenizer,
            loaded.eos_ids,
            loaded.vocab_size,
        )
        # Without a reference to the engine: in a cycle, it would outlive its last user.
        self.structured_outputs = StructuredMatchers(
            partial(_grammar_compiler, config, loaded), self.request_errors
        )
        self.token_masks = TokenMasks(
            self.structured_outputs, self.tokenizer, self.vocab_size, self.request_errors
        )
        self.scheduler = scheduler = create_scheduler(config, worker.limits, self.request_errors)
        self.max_len = scheduler.max_len
        self.adapters = LoraAdapters(
            executor.max_loras,
            executor.write_adapter,
            lambda: {
                request.lora for request in scheduler.requests.values() if request.lora is not None
            },
        )
        for name, folder in config.lora.items():
            self.adapters.load(name, folder)
        num_tokens = sum(pool.num_tokens for pool in self.scheduler.pools)
        log.info(
            "the cache holds %d tokens, %.1f sequences of full length (%d tokens)",
            num_tokens,
            num_tokens / self.max_len,
            self.max_len,
        )
        with phases.phase("warm up"), gc_disabled():
            executor.warm_up()
            self._warm_up()
        if config.max_itl_ms is not None:
            self._prompt_budget = PromptBudget(
                config.max_itl_ms, worker.limits.max_num_batched_tokens, worker.padded_rows
            )
        executor.ready()

    def request(
        self,
        request_id: str,
        tokens: Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        salt: str | None = None,
        pooling: Pooling | None = None,
        images: Sequence[PromptImage] = (),
        lora: str | None = None,
    ) -> Request:
        """A request with the model's end-of-sequence tokens, and a random seed if params has none.
        lora: the name of a loaded LoRA adapter.

        With a draft model, a pooled request shares cached prefixes only with others that are
        pooled: its steps do not run the draft model.

        `siblings` splits it into params.n requests. Raises ValueError for an empty prompt, and for
        an adapter that is not loaded.
        """
        if pooling is not None and self.config.speculative == "mtp":
            salt = f"pooled {salt or ''}"
        return Request(
            request_id,
            list(tokens),
            params or SamplingParams(),
            self.eos_ids,
            seed=self._seeds.getrandbits(64),
            priority=priority,
            salt=salt,
            pooling=pooling,
            images=tuple(image.salted(salt) for image in images),
            lora=None if lora is None else self.adapters.get(lora),
        )

    def refuse(self, request: Request) -> None:
        """Raise ValueError for a request that cannot run: prompt too long, id in use, token ids
        outside the vocabulary, images that do not fit the prompt or the model, no token allowed by
        min_tokens, allowed_token_ids and bad_words, a budget of reasoning without tokens of its
        tags. EngineAsleep while the engine sleeps."""
        self._refuse_asleep()
        refuse_tokens(request, self.vocab_size)
        self.token_masks.allowed_tokens(request.params)
        self.token_masks.reasoning_budget(request)
        refuse_images(request, self.executor.limits.images, self.program.report.model)
        refuse_adapter(request, self.adapters)
        self.scheduler.refuse(request)

    @torch_modes_off()
    def add(self, request: Request) -> None:
        """Queue a request. Raises what `refuse` raises, QueueFull if the queue is full,
        ValueError for a grammar that cannot be compiled (ImportError without llguidance), and
        RequestFailed for any other error of this request."""
        self.refuse(request)
        # Raises RunError if a parameter of a user's module has other storage now. A step may still
        # be in flight, of requests that have ended.
        if not self.scheduler.requests and self.executor.check():
            self.reset_prefix_cache()  # it is of the weights before
        try:
            self._begin(request)
        except BaseException as error:  # a panic in Rust is no Exception
            self._forget(request.id)
            if not is_recoverable(error) or isinstance(error, ValueError | ImportError | QueueFull):
                raise
            self.request_errors.fail(request.id, "admitting it", error)
            raise RequestFailed(self.request_errors.failed.pop(request.id)) from error

    def _begin(self, request: Request) -> None:
        if request.pooling is not None:
            self.prepare_pooling()
        if request.params.structured is not None:
            self._state(request.id).matcher = self.structured_outputs.matcher(
                request.params.structured
            )
        if (allowed := self.token_masks.allowed_tokens(request.params)) is not None:
            self._state(request.id).allowed = allowed
        if (budget := self.token_masks.reasoning_budget(request)) is not None:
            self._state(request.id).budget = budget
        self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """Abort a request; False if the id is unknown (it may just have finished). It has no
        further output.
        """
        aborted = self.scheduler.abort(request_id)
        self._outputs = [one for one in self._outputs if one.request_id != request_id]
        if aborted:
            self._forget(request_id)
        return aborted

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.requests or self._outputs or self._in_flight)

    @interrupts_delayed()
    @torch_modes_off()
    def step(self) -> list[Output]:
        """Schedule and launch a step, then finish the previous one.

        Returns an Output for each request with new tokens or an error; [] does not mean that the
        engine is idle, see has_work. If a step fails as a whole, its exception is raised and the
        requests are as before it; the next call returns what the previous step gave.
        """
        self._steps_to_capture -= 1
        may_capture = self._steps_to_capture <= 0 and self._prompt_budget is None  # bounds gaps
        if may_capture and any(self._runner.missing.values()):
            self.capture_graph()
            self._steps_to_capture = CAPTURE_STEPS
        began, self._waited = time.perf_counter(), 0.0
        # More than one is in flight after a call that failed while it read results.
        while len(self._in_flight) > (0 if self._speculates else 1):
            self._outputs += self._collect()
        if self._speculates:
            self._draft()  # depends on all previous tokens
        step = self.scheduler.next_step(self._prompt_limit())
        launched = None
        if step is not None:
            try:
                launched = _StepInFlight(began, step, self.executor.launch(step))
                launched.running.sample(self._mask())
                if self._prompt_budget is not None and self._runs_in_launch:
                    self._prompt_budget.measured(step, began, time.perf_counter())
            except BaseException:  # raised again, Ctrl-C too: the scheduler is as before the step
                self.scheduler.undo_step(step)
                raise
        if launched is not None:
            self._in_flight.append(launched)
        if len(self._in_flight) > (launched is not None):
            self._outputs += self._collect()
        self._outputs += self._failed_outputs()
        if step is not None:
            milliseconds = 1e3 * (time.perf_counter() - began - self._waited)
            self.host_ms += (
                HOST_MS_WEIGHT * (milliseconds - self.host_ms) if self.host_ms else milliseconds
            )
        outputs, self._outputs = self._outputs, []
        return outputs

    @torch_modes_off()
    def capture_graph(self) -> bool:
        """Capture the CUDA graphs of the missing shape that the most steps would have had; False if
        none is missing. `step` does it now and then, a caller without work may.
        """
        missing = self._runner.missing
        if not missing:
            return False
        self._runner.capture_missing(max(missing, key=missing.__getitem__))
        return True

    @torch_modes_off()
    def prepare_pooling(self) -> None:
        """Compile the model without its head, over the same weights and caches. Steps may run
        meanwhile.

        Raises ValueError for a model whose head is not known.
        """
        self._refuse_asleep()
        self.executor.prepare_pooling()

    def _prompt_limit(self) -> int | None:
        """Prompt tokens of the next step; None: as many as it has room for."""
        if self._prompt_budget is None or not (streams := self.scheduler.num_streams):
            return None
        return self._prompt_budget.tokens(streams * (1 + self.config.speculative_tokens))

    def _draft(self) -> None:
        """Propose drafts for decoding requests: all tokens of these are computed, except the last
        one, and those up to a rejected draft if the state cannot be rolled back. The latter are
        bounded: otherwise each rejection would add to them.
        """
        redone = 0 if self.scheduler.state_rows is None else self.config.speculative_tokens
        for request in self.scheduler.running:
            if request.pending <= 1 + redone and request.num_new and not request.pooling:
                request.draft = (
                    self.request_errors.run(
                        request.id, "proposing its draft", self._propose_draft, request
                    )
                    or ()
                )

    def _propose_draft(self, request: Request) -> tuple[int, ...]:
        config, state = self.config, self._state(request.id)
        count = min(config.speculative_tokens, request.room - 1)
        if count <= 0:
            return ()
        if config.speculative == "mtp":
            return state.draft[:count]
        state.proposer = state.proposer or NGramProposer(config.ngram_min, config.ngram_max)
        return tuple(state.proposer.propose(request.tokens, count))

    def _mask(self) -> Tensor | None:
        """The mask of the step scheduled last; None: all tokens are allowed. Finishes the step
        before, if the mask depends on its tokens.
        """
        if not self._states:
            return None
        sampled = [
            (request, () if chunk is None else chunk.draft)
            for request, chunk in self.scheduler.step_requests(-1)
            if chunk is None or chunk.num_samples
        ]
        depends = [
            self._states[request.id].mask_depends_on_output(num_output(request, draft))
            for request, draft in sampled
            if request.id in self._states
        ]
        if any(depends):
            self._outputs += self._collect()
        return self.token_masks.mask(sampled, self._states)

    def _collect(self) -> list[Output]:
        """Finish the oldest step in flight, if there is one; returns its outputs."""
        if not self._in_flight:
            return []
        in_flight = self._in_flight[0]
        began = time.perf_counter()
        results = in_flight.running.results()
        self._waited += time.perf_counter() - began
        if self._prompt_budget is not None and not self._runs_in_launch:
            # Without values nothing was waited for, which does not tell when the step ended.
            ended = time.perf_counter() if results.has_values else inf
            self._prompt_budget.measured(in_flight.step, in_flight.began, ended)
        # Of most steps, there are tokens of decode rows and nothing else.
        has_more = results.chunks or results.errors
        requests = self.scheduler.step_requests(0) if has_more else ()
        for request, _ in requests:
            if request.id in results.errors and request.finish_reason is None:
                self.request_errors.failed.setdefault(request.id, results.errors[request.id])
        failed = self._failed_outputs()
        of_chunks = [request for request, chunk in requests if chunk is not None]
        unfinished = results.of_rows | {
            request.id: result
            for request, result in zip(of_chunks, results.chunks, strict=True)
            if request.finish_reason is None
        }
        outputs = self.scheduler.finish_step(
            in_flight.step, [result.tokens for result in results.chunks], results.decoded
        )
        self._in_flight.popleft()  # not before: what raises above leaves it to the next call
        for name, result in unfinished.items():
            if result.scores:
                self._state(name).scores.extend(result.scores)
            if result.draft:
                self._state(name).draft = result.draft
        return failed + [
            self._completed(output, unfinished.get(output.request_id, NO_RESULT))
            if output.request_id in unfinished or output.request_id in self._states
            else output
            for output in outputs
        ]

    def _completed(self, output: Output, result: Result) -> Output:
        """The scheduler's output with log-probabilities and embedding; checks its tokens against
        the grammar.
        """
        name, scores = output.request_id, None
        state = self._states.get(name)
        if state is not None:
            if state.matcher is not None:
                self.request_errors.run(
                    name,
                    "advancing its grammar",
                    accept_tokens,
                    state.matcher,
                    output.token_ids,
                )
            if output.token_ids:
                scores, state.scores = state.scores, []
        if name in self.request_errors.failed:
            return self._end(name, self.request_errors.failed.pop(name))
        if output.finish_reason is not None:
            self._forget(name)
        if not scores and result.logprobs is None and result.embedding is None:
            return output
        return replace(
            output,
            logprobs=result.logprobs and result.logprobs[: len(output.token_ids)],
            prompt_logprobs=(None, *scores) if scores else None,
            embedding=result.embedding,
        )

    def _failed_outputs(self) -> list[Output]:
        """Final outputs of requests that failed since the last call; drops them."""
        return [
            self._end(name, error)
            for name, error in self.request_errors.take().items()
            if name in self.scheduler.requests
        ]

    def _end(self, request_id: str, error: RequestError) -> Output:
        """Drop a failed request, which the scheduler may have dropped already."""
        if not error.by_client:
            # Its blocks and embeddings may hold NaN: do not share them.
            self.scheduler.evict(request_id)
        self.scheduler.abort(request_id, "error")
        self._forget(request_id)
        return Output(request_id, (), finish_reason="error", error=error)

    def _state(self, request_id: str) -> RequestState:
        """The state of this request, created on first use."""
        return self._states.setdefault(request_id, RequestState())

    def _forget(self, request_id: str) -> None:
        self._states.pop(request_id, None)

    def stats(self) -> Stats:
        """Counters since the start, and current gauges."""
        pools = self.scheduler.pools
        computed = {request.id: request.computed for request in self.scheduler.running}
        return Stats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_blocks_used=sum(pool.num_blocks - pool.num_free for pool in pools),
            kv_blocks_total=sum(pool.num_blocks for pool in pools),
            kv_tokens=sum(pool.num_tokens for pool in pools),
            kv_tokens_used=sum(pool.tokens_used(computed) for pool in pools),
            max_len=self.max_len,
            host_ms=self.host_ms,
            prompt_limit=self._prompt_limit() or self.executor.limits.max_num_batched_tokens,
            no_prefix_cache=self.executor.limits.no_prefix_cache,
            snapshots_total=self.executor.limits.capacity.snapshots * len(pools),
            snapshots_held=self.scheduler.num_snapshots,
            **vars(self.scheduler.counters),
            **vars(self.executor.counts()),
        )

    @torch_modes_off()
    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, and embeddings of images. Running requests go on, and share
        nothing of what they have computed or will compute.
        """
        while self._in_flight:
            self._outputs += self._collect()
        self.scheduler.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache, all other state of layers, CUDA graphs and embeddings of images, and
        forget cached prefixes; weights stay where they are. Until `wake_up` requests are refused.

        Raises ValueError for a level other than 1, and while requests wait or run.
        """
        refuse_level(level)
        if self.is_sleeping:
            return
        while self._in_flight:
            self._outputs += self._collect()
        refuse_running(len(self.scheduler.requests))
        self.reset_prefix_cache()
        self.executor.sleep()
        self.is_sleeping = True
        log.info("the engine sleeps: KV cache and CUDA graphs are freed")

    @torch_modes_off()
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate what `sleep` has freed; does nothing if the engine does not sleep.

        tags   what to wake, of "weights", which never sleep, and "kv_cache"; None: all

        Raises ValueError for other tags, and if memory runs out, after which the engine sleeps on.
        """
        if not wakes_state(tags) or not self.is_sleeping:
            return
        try:
            self.executor.wake_up()
        except RuntimeError as error:
            if isinstance(error, RankFailed) or not out_of_memory(error):
                raise
            self.executor.sleep()
            raise ValueError(
                "wake_up: out of memory, the engine sleeps on: free memory of the device, then "
                "call it again"
            ) from error
        self.is_sleeping = False
        log.info("the engine is awake")

    def _refuse_asleep(self) -> None:
        if self.is_sleeping:
            raise EngineAsleep

    def close(self) -> None:
        """End the processes of other ranks, if there are any. The engine cannot be used then."""
        self.executor.close()

    def check(self) -> None:
        """Assert the invariants between two calls."""
        self.scheduler.check()
        assert self.scheduler.num_steps_in_flight == len(self._in_flight), (
            "scheduler and engine disagree about steps in flight"
        )

    def _warm_up(self) -> None:
        """Generate two tokens, so that lazy compilation is done, and reset the counters."""
        prompt, params = (
            [0] * min(WARM_UP_TOKENS, self.max_len - 1),
            SamplingParams(max_tokens=2, ignore_eos=True),
        )
        self.add(self.request("warm up", prompt, params))
        limits = self.executor.limits.images
        image = None if limits is None else limits.example()
        if image is not None and limits is not None and image.length < self.max_len:
            tokens = [min(limits.token_ids)] * image.length
            self.add(self.request("warm up of images", tokens, params, images=[image]))
        while self.has_work:
            self.step()
        self.scheduler.forget_counts()
        self.executor.forget_counts()
        self._steps_to_capture = 0


def _grammar_compiler(config: EngineConfig, loaded: LoadedModel) -> GrammarCompiler:
    """Raises ValueError for a model without a tokenizer."""
    if loaded.tokenizer is None or loaded.vocab_size is None:
        raise ValueError(
            "structured output needs a tokenizer, but the model has none: add tokenizer.json "
            "to the checkpoint"
        )
    return GrammarCompiler(
        loaded.tokenizer,
        loaded.eos_ids,
        loaded.vocab_size,
        seconds=config.grammar_seconds,
        cache_bytes=config.grammar_cache_bytes,
    )
