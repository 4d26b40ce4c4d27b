"""The engine: one model in this process, tokens in and tokens out."""

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from tqdm import tqdm

from atomc.ops import LAYOUTS
from atomc.program import compile_model
from atomc.runtime.blocks import BlockPool
from atomc.runtime.capacity import capacity, free_memory
from atomc.runtime.config import EngineConfig
from atomc.runtime.loading import load
from atomc.runtime.request import Output, Request
from atomc.runtime.runner import Runner
from atomc.runtime.sampling_params import SamplingParams
from atomc.runtime.scheduler import QueueFull, Scheduler
from atomc.runtime.stats import Stats

__all__ = ["PHASES", "Engine", "EngineConfig", "Output", "QueueFull", "Request", "SamplingParams", "Stats"]

PHASES = ("load", "compile", "allocate", "warm up")
WARM_UP_TOKENS = 8
MAX_NUM_SEQS = {"cpu": 64}  # and 256 on a GPU


class Engine:
    """One model on one device; not thread-safe, and without threads: whoever calls `step` advances it.

    module     instead of config.model: one of ours, a stock transformers model (its attention is replaced in place,
               see wrap_stock), or any other that is called as
               `model(input_ids [T], positions [T], logits_rows [R]) -> logits [R, V]`
    progress   bars on the terminal while it starts

    program.report says what the compiler did, phases how long each part of the start took (seconds), max_len how many
    tokens the longest sequence has.

    Raises ValueError for what does not fit together, OptionsError (a ValueError) for a wrong option, FileNotFoundError
    for an incomplete checkpoint, ImportError if a tokenizer needs a library that is not installed.
    """

    def __init__(self, config: EngineConfig, *, module: nn.Module | None = None, progress: bool = True) -> None:
        self.config = config
        self.phases: dict[str, float] = {}
        self._seeds = random.Random(config.seed)
        self._generated = self._prompted = 0
        # disable=None: no bar where there is no terminal.
        with tqdm(total=len(PHASES), unit="phase", leave=False, disable=None if progress else True) as bar:
            with self._phase("load", bar):
                loaded = load(config, module, progress=progress)
                self.tokenizer, self.eos_ids, self.vocab_size = loaded.tokenizer, loaded.eos_ids, loaded.vocab_size
            with self._phase("compile", bar):
                self.program = compile_model(loaded.module, options=config.options)
            with self._phase("allocate", bar):
                specs, device = self.program.specs, self.program.device
                if not specs:
                    raise ValueError(f"{type(loaded.module).__name__} keeps no state: each of its attention layers must "
                                     "own a handle (ops.kv_state) and pass it to ops.attention")  # fmt: skip
                max_num_seqs = config.max_num_seqs or MAX_NUM_SEQS.get(device.type, 256)
                size = capacity(
                    bytes_per_token=sum(spec.bytes_per_token() for spec in specs),
                    block_size=LAYOUTS[specs[0].layout].block_size,
                    available=free_memory(device),
                    max_num_seqs=max_num_seqs,
                    longest=loaded.longest,
                    max_model_len=config.max_model_len,
                    num_blocks=config.num_blocks,
                    kv_bytes=config.kv_bytes,
                )
                self.scheduler = Scheduler(
                    BlockPool(size.num_blocks, size.block_size),
                    max_num_seqs=max_num_seqs,
                    max_num_batched_tokens=config.max_num_batched_tokens,
                    max_model_len=size.max_model_len,
                    max_queue=config.max_queue,
                )
                self.max_len = self.scheduler.max_len
                self.runner = Runner(self.program, num_blocks=size.num_blocks, block_size=size.block_size)
            with self._phase("warm up", bar):
                if not config.enforce_eager:
                    longest_blocks = -(-size.max_model_len // size.block_size)
                    self.runner.capture(max_num_seqs=max_num_seqs, max_num_rows=config.max_num_batched_tokens,
                                        max_blocks=longest_blocks, progress=progress)  # fmt: skip
                self._warm_up()

    def request(
        self, request_id: str, tokens: Sequence[int], params: SamplingParams | None = None, *, priority: int = 0,
        salt: str | None = None,
    ) -> Request:  # fmt: skip
        """A request for this model: with its end-of-sequence tokens, and a seed if params has none.

        Raises ValueError for an empty prompt.
        """
        return Request(request_id, list(tokens), params or SamplingParams(), self.eos_ids,
                       seed=self._seeds.getrandbits(64), priority=priority, salt=salt)  # fmt: skip

    def refuse(self, request: Request) -> None:
        """Raise ValueError for a request that can never run: too long, its id in use, a token that does not exist."""
        for token in request.tokens:
            if token < 0 or (self.vocab_size is not None and token >= self.vocab_size):
                raise ValueError(f"token id {token} is not in the vocabulary of {self.vocab_size} tokens")
        if self.vocab_size is not None:
            request.params.refuse_beyond(self.vocab_size)
        self.scheduler.refuse(request)

    def add(self, request: Request) -> None:
        """Queue a request. Raises what `refuse` raises, and QueueFull if too many wait."""
        self.refuse(request)
        if not self.has_work:
            self.program.check()  # raises RunError if a module's weights were replaced
        self.scheduler.add(request)
        request.arrival = time.time()

    def abort(self, request_id: str) -> bool:
        """Drop a request; False if there is none of this id (it may just have finished). No output of it follows."""
        self.runner.sampler.forget(request_id)
        return self.scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.requests)

    def step(self) -> list[Output]:
        """Advance by one step. What came of it: the new tokens of each request that got any; [] is no end."""
        step = self.scheduler.next_step()
        if step is None:
            return []
        drawing = [self.scheduler.requests[chunk.request_id] for chunk in step.chunks if chunk.draw is not None]
        before = [len(request.tokens) for request in drawing]
        for request in self.scheduler.finish_step(step, self.runner.run(step)):
            self.runner.sampler.forget(request.id)
        self._generated += len(drawing)
        self._prompted += step.num_tokens - sum(count > request.num_prompt
                                                for request, count in zip(drawing, before, strict=True))  # fmt: skip
        return [request.output(count) for request, count in zip(drawing, before, strict=True)]

    def stats(self) -> Stats:
        """What it has done and what it is doing."""
        pool = self.scheduler.pool
        return Stats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_blocks_used=pool.num_blocks - pool.num_free,
            kv_blocks_total=pool.num_blocks,
            kv_tokens=pool.num_tokens,
            max_len=self.max_len,
            prompt_tokens=self._prompted,
            generated_tokens=self._generated,
            steps=Counter(self.runner.steps),
        )

    def check(self) -> None:
        """Assert what holds between two calls."""
        self.scheduler.check()

    def _warm_up(self) -> None:
        prompt = [0] * min(WARM_UP_TOKENS, self.max_len - 1)
        self.add(self.request("warm up", prompt, SamplingParams(max_tokens=2, ignore_eos=True)))
        while self.has_work:
            self.step()

    @contextmanager
    def _phase(self, name: str, bar: "tqdm[Any]") -> Iterator[None]:
        bar.set_description(name)
        started = time.perf_counter()
        yield
        self.phases[name] = time.perf_counter() - started
        bar.update()
