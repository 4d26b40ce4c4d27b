"""A model that generates: load, compile and allocate once, then prompts in and text out."""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from atomc.ops import LAYOUTS
from atomc.options import Options
from atomc.program import compile_model
from atomc.runtime.blocks import BlockPool
from atomc.runtime.capacity import capacity, free_memory
from atomc.runtime.detokenizer import Detokenizer, load_tokenizer
from atomc.runtime.request import Completion, Request
from atomc.runtime.runner import Runner
from atomc.runtime.sampling_params import SamplingParams
from atomc.runtime.scheduler import Scheduler

PHASES = ("load", "compile", "allocate", "warm up")
WARM_UP_TOKENS = 8

Prompt = str | Sequence[int]


class LLM:
    """One model in this process, on one device; not thread-safe.

    model                    a checkpoint directory; a module: one of ours, a stock transformers model (its attention
                             is replaced in place, see wrap_stock), or any other that is called as
                             `model(input_ids [T], positions [T], logits_rows [R]) -> logits [R, V]`; None: the small
                             model that comes with atomc
    dtype, device            of a checkpoint. None: what it says; a GPU if there is one. A module keeps its own
    load_format              as in atomc.models.loader.load
    max_model_len            tokens of the longest sequence; None: as long as model and memory allow
    max_num_seqs             sequences that run at the same time, at most
    max_num_batched_tokens   tokens of one step, at most; longer prompts are computed in chunks
    num_blocks, kv_bytes     size of the cache in blocks or in bytes; None: a share of the free memory
    options                  of the compiler, see atomc.Options
    enforce_eager            no CUDA graphs
    progress                 bars on the terminal while it starts

    program.report says what the compiler did, phases how long each part of the start took (seconds), and
    tokens_per_second how fast the last `generate` or `stream` made new tokens, all its requests together.

    Raises ValueError for what does not fit together, OptionsError (a ValueError) for a wrong option, FileNotFoundError
    for an incomplete checkpoint, ImportError if a tokenizer needs a library that is not installed; generating raises
    RunError if a module's weights were replaced after this.
    """

    def __init__(
        self, model: str | Path | nn.Module | None = None, *, dtype: torch.dtype | None = None,
        max_model_len: int | None = None, max_num_seqs: int = 64, max_num_batched_tokens: int = 2048,
        options: Options | Mapping[str, Any] | None = None, num_blocks: int | None = None, kv_bytes: int | None = None,
        device: torch.device | str | None = None, load_format: str = "auto", enforce_eager: bool = False,
        progress: bool = True,
    ) -> None:  # fmt: skip
        _check_sizes(
            max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
            num_blocks=num_blocks, kv_bytes=kv_bytes,
        )  # fmt: skip
        self.phases: dict[str, float] = {}
        self.tokens_per_second = 0.0
        self._ids = map(str, count())
        self._seeds = random.Random()
        # disable=None: no bar where there is no terminal.
        with tqdm(total=len(PHASES), unit="phase", leave=False, disable=None if progress else True) as bar:
            with self._phase("load", bar):
                module = self._load(model, dtype, device, load_format, progress)
                longest = _longest(module, max_model_len)
            with self._phase("compile", bar):
                self.program = compile_model(module, options=options)
            with self._phase("allocate", bar):
                specs = self.program.specs
                if not specs:
                    raise ValueError(f"{type(module).__name__} keeps no state: each of its attention layers must own a "
                                     "handle (ops.kv_state) and pass it to ops.attention")  # fmt: skip
                size = capacity(
                    bytes_per_token=sum(spec.bytes_per_token() for spec in specs),
                    block_size=LAYOUTS[specs[0].layout].block_size,
                    available=free_memory(self.program.device),
                    max_num_seqs=max_num_seqs,
                    longest=longest,
                    max_model_len=max_model_len,
                    num_blocks=num_blocks,
                    kv_bytes=kv_bytes,
                )
                self.scheduler = Scheduler(
                    BlockPool(size.num_blocks, size.block_size),
                    max_num_seqs=max_num_seqs,
                    max_num_batched_tokens=max_num_batched_tokens,
                    max_model_len=size.max_model_len,
                )
                self.runner = Runner(self.program, num_blocks=size.num_blocks, block_size=size.block_size)
            with self._phase("warm up", bar):
                if not enforce_eager:
                    longest_blocks = -(-size.max_model_len // size.block_size)
                    self.runner.capture(max_num_seqs=max_num_seqs, max_num_rows=max_num_batched_tokens,
                                        max_blocks=longest_blocks, progress=progress)  # fmt: skip
                prompt = [0] * min(WARM_UP_TOKENS, self.scheduler.max_len - 1)
                self._finish([self._request(prompt, SamplingParams(max_tokens=2, ignore_eos=True))])

    def generate(
        self, prompts: str | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *, progress: bool = False,
    ) -> list[Completion]:  # fmt: skip
        """One completion for each prompt, in the order of the prompts.

        prompts          a text, or a list of texts and lists of token ids
        sampling_params  for all prompts, or one for each; None: greedy
        progress         a bar that counts the finished prompts

        Raises ValueError, before anything is computed, for a prompt that is empty, too long or not in the vocabulary,
        and for a text if there is no tokenizer.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        if any(isinstance(prompt, int) for prompt in prompts):
            raise ValueError("prompts is one list of token ids, expected a list of such lists: pass [ids]")
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"{len(sampling_params)} sampling_params for {len(prompts)} prompts: "
                             "pass one for all, or one for each")  # fmt: skip
        requests = [self._request(prompt, params) for prompt, params in zip(prompts, sampling_params, strict=True)]
        started = time.perf_counter()
        with tqdm(total=len(requests), unit="prompt", disable=None if progress else True) as bar:
            self._finish(requests, bar)
        seconds = time.perf_counter() - started
        self.tokens_per_second = sum(request.num_new for request in requests) / seconds
        return [self._completion(request) for request in requests]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """The new text of one prompt, piece by piece; the pieces together are the text that `generate` returns.

        A piece is never half a character. Closing the iterator ends the request. Raises ValueError as `generate` does,
        and if there is no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError("no tokenizer, so there is no text to stream: use generate, which returns token ids")
        return self._pieces(self._request(prompt, sampling_params or SamplingParams()))

    def _pieces(self, request: Request) -> Iterator[str]:
        detokenizer = Detokenizer(self.tokenizer, request.tokens)
        num_shown = 0
        self.program.check()
        started = time.perf_counter()
        self.scheduler.add(request)
        try:
            while request.finish_reason is None:
                self._advance()
                text_tokens = _text_tokens(request)
                piece = detokenizer.add(text_tokens[num_shown:])
                num_shown = len(text_tokens)
                if piece:
                    yield piece
        finally:
            self.scheduler.abort(request.id)
            self.tokens_per_second = request.num_new / (time.perf_counter() - started)
        rest = detokenizer.flush()
        if rest:
            yield rest

    def _advance(self) -> list[Request]:
        """One step; the requests that it finished, also those of another caller."""
        step = self.scheduler.next_step()
        assert step is not None, "a request is unfinished and there is nothing to do"
        return self.scheduler.finish_step(step, self.runner.run(step))

    def _finish(self, requests: Sequence[Request], bar: "tqdm[Any] | None" = None) -> None:
        """Queue the requests and run steps until all of them are finished; if that fails, none stays behind."""
        self.program.check()
        unfinished = {request.id for request in requests}
        try:
            for request in requests:
                self.scheduler.add(request)
            while unfinished:
                done = unfinished & {request.id for request in self._advance()}
                unfinished -= done
                if bar is not None:
                    bar.update(len(done))
        finally:
            for request_id in unfinished:
                self.scheduler.abort(request_id)

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """A request that fits; raises ValueError for one that does not."""
        tokens = self._tokens(prompt)
        request = Request(next(self._ids), tokens, params, self.eos_ids, seed=self._seeds.getrandbits(64))
        self.scheduler.refuse(request)
        return request

    def _tokens(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            tokens = list(prompt)
        elif self.tokenizer is not None:
            tokens = list(self.tokenizer.encode(prompt).ids)
        else:
            raise ValueError(f"no tokenizer for the prompt {prompt[:40]!r}: pass token ids, or make the LLM of a "
                             "directory with tokenizer.json")  # fmt: skip
        for token in tokens:
            if token < 0 or (self.vocab_size is not None and token >= self.vocab_size):
                raise ValueError(f"token id {token} is not in the vocabulary of {self.vocab_size} tokens")
        return tokens

    def _completion(self, request: Request) -> Completion:
        text = ""
        if self.tokenizer is not None:
            detokenizer = Detokenizer(self.tokenizer, request.tokens[: request.num_prompt])
            text = detokenizer.add(_text_tokens(request)) + detokenizer.flush()
        assert request.finish_reason is not None
        prompt_token_ids = tuple(request.tokens[: request.num_prompt])
        return Completion(text, tuple(request.new_tokens), request.finish_reason, prompt_token_ids)

    def _load(
        self, model: str | Path | nn.Module | None, dtype: torch.dtype | None, device: torch.device | str | None,
        load_format: str, progress: bool,
    ) -> nn.Module:  # fmt: skip
        """The module to compile; sets tokenizer, eos_ids and vocab_size."""
        from atomc.models import loader, wrap_stock

        self.tokenizer: Any | None = None
        if isinstance(model, nn.Module):
            if dtype is not None or device is not None or load_format != "auto":
                raise ValueError("dtype, device and load_format are for checkpoints; a module keeps what it has")
            # A stock transformers model, told by the method that replaces its attention.
            module = wrap_stock(model) if hasattr(model, "set_attn_implementation") else model
            self.eos_ids = _eos_ids_of_module(module)
        else:
            folder = _demo() if model is None else Path(model)
            device = device or ("cuda" if torch.cuda.is_available() else "cpu")
            module = loader.load(folder, dtype=dtype, device=device, load_format=load_format, progress=progress)
            self.tokenizer = load_tokenizer(folder)
            self.eos_ids = _eos_ids_of_checkpoint(folder)
        self.vocab_size = _config_value(module, "vocab_size")
        return module

    @contextmanager
    def _phase(self, name: str, bar: "tqdm[Any]") -> Iterator[None]:
        bar.set_description(name)
        started = time.perf_counter()
        yield
        self.phases[name] = time.perf_counter() - started
        bar.update()


def _check_sizes(**sizes: int | None) -> None:
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}, it must be at least 1")
    if sizes["num_blocks"] is not None and sizes["kv_bytes"] is not None:
        raise ValueError("num_blocks and kv_bytes both size the cache: give one of them")


def _longest(module: nn.Module, max_model_len: int | None) -> int:
    """Tokens of the longest sequence: max_model_len, else what the model was made for."""
    made_for = _config_value(module, "max_position_embeddings")
    longest = max_model_len if max_model_len is not None else made_for
    if longest is None:
        raise ValueError("the model does not say how long a sequence may be (max_position_embeddings in its config): "
                         "pass max_model_len")  # fmt: skip
    if made_for is not None and longest > made_for:
        raise ValueError(f"max_model_len={longest} is longer than the {made_for} tokens that the model was made for "
                         "(max_position_embeddings in its config)")  # fmt: skip
    return longest


def _text_tokens(request: Request) -> list[int]:
    """The new tokens that are text: all but the one that stopped the request."""
    return request.new_tokens[:-1] if request.finish_reason == "stop" else request.new_tokens


def _demo() -> Path:
    from atomc import demo

    return Path(demo.PATH)


def _config_value(module: nn.Module, name: str) -> int | None:
    """A number of the module's config, or of the config of its text part; None if it has none."""
    config = getattr(module, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        if isinstance(getattr(part, name, None), int):
            return int(getattr(part, name))
    return None


def _eos_ids_of_module(module: nn.Module) -> frozenset[int]:
    inner = getattr(module, "hf_model", module)
    for config in (getattr(inner, "generation_config", None), getattr(inner, "config", None)):
        token_ids = getattr(config, "eos_token_id", None)
        if token_ids is not None:
            return _as_set(token_ids)
    return frozenset()


def _eos_ids_of_checkpoint(folder: Path) -> frozenset[int]:
    from atomc.models.loader import read_json

    for name in ("generation_config.json", "config.json"):
        config = read_json(folder / name) if (folder / name).is_file() else {}
        if config.get("eos_token_id") is not None:
            return _as_set(config["eos_token_id"])
    return frozenset()


def _as_set(token_ids: int | list[int]) -> frozenset[int]:
    return frozenset([token_ids] if isinstance(token_ids, int) else token_ids)
