"""A model that generates, offline: prompts in and text out, over one engine."""

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from atomc.options import Options
from atomc.runtime.config import EngineConfig
from atomc.runtime.detokenizer import Detokenizer
from atomc.runtime.engine import Engine
from atomc.runtime.request import Completion, Request
from atomc.runtime.sampling_params import SamplingParams

Prompt = str | Sequence[int]


class LLM:
    """One model in this process, on one device; not thread-safe.

    model       a checkpoint directory, a module (see Engine), or None: the small model that comes with atomc
    dtype, device, options   also as torch.dtype, torch.device and atomc.Options
    max_queue   no bound, if not given: whoever has a list of prompts waits for all of them
    progress    bars on the terminal while it starts
    settings    the other fields of EngineConfig

    engine is what runs it. program.report says what the compiler did, phases how long each part of the start took
    (seconds), and tokens_per_second how fast the last `generate` or `stream` made new tokens, all its requests
    together.

    Raises what Engine raises; generating raises RunError if a module's weights were replaced after this.
    """

    def __init__(
        self, model: str | Path | nn.Module | None = None, *, dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None, options: Options | Mapping[str, Any] | None = None,
        progress: bool = True, **settings: Any,
    ) -> None:  # fmt: skip
        module = model if isinstance(model, nn.Module) else None
        config = EngineConfig(
            model=None if module is not None or model is None else str(model),
            dtype=str(dtype).removeprefix("torch.") if dtype else None,
            device=str(device) if device else None,
            options=Options.of(options),
            **{"max_queue": 2**62, **settings},
        )
        self.engine = Engine(config, module=module, progress=progress)
        self.program, self.phases = self.engine.program, self.engine.phases
        self.tokenizer = self.engine.tokenizer
        self.tokens_per_second = 0.0
        self._ids = map(str, count())

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
        started = time.perf_counter()
        self.engine.add(request)
        try:
            while request.finish_reason is None:
                self.engine.step()
                text_tokens = _text_tokens(request)
                piece = detokenizer.add(text_tokens[num_shown:])
                num_shown = len(text_tokens)
                if piece:
                    yield piece
        finally:
            self.engine.abort(request.id)
            self.tokens_per_second = request.num_new / (time.perf_counter() - started)
        rest = detokenizer.flush()
        if rest:
            yield rest

    def _finish(self, requests: Sequence[Request], bar: "tqdm[Any]") -> None:
        """Queue the requests and run steps until all of them are finished; if that fails, none stays behind."""
        unfinished = {request.id: request for request in requests}
        try:
            for request in requests:
                self.engine.add(request)
            while unfinished:
                self.engine.step()
                # Also what another caller's steps finished.
                done = [name for name, request in unfinished.items() if request.finish_reason is not None]
                for name in done:
                    del unfinished[name]
                bar.update(len(done))
        finally:
            for name in unfinished:
                self.engine.abort(name)

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """A request that fits; raises ValueError for one that does not."""
        request = self.engine.request(next(self._ids), self._tokens(prompt), params)
        self.engine.refuse(request)
        return request

    def _tokens(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise ValueError(f"no tokenizer for the prompt {prompt[:40]!r}: pass token ids, or make the LLM of a "
                             "directory with tokenizer.json")  # fmt: skip
        return list(self.tokenizer.encode(prompt).ids)

    def _completion(self, request: Request) -> Completion:
        text = ""
        if self.tokenizer is not None:
            detokenizer = Detokenizer(self.tokenizer, request.tokens[: request.num_prompt])
            text = detokenizer.add(_text_tokens(request)) + detokenizer.flush()
        assert request.finish_reason is not None
        prompt_token_ids = tuple(request.tokens[: request.num_prompt])
        return Completion(text, tuple(request.new_tokens), request.finish_reason, prompt_token_ids)


def _text_tokens(request: Request) -> list[int]:
    """The new tokens that are text: all but the one that stopped the request."""
    return request.new_tokens[:-1] if request.finish_reason == "stop" else request.new_tokens
