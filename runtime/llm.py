"""Offline generation: a list of prompts, or one stream, on an engine in this process."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn
from tqdm import tqdm

from atomc.errors import suggestion
from atomc.options import Options
from atomc.runtime.async_calls import AsyncCalls
from atomc.runtime.calls import AsyncCall, CompletionBuilder, LLMCall, Query, ThreadCall
from atomc.runtime.config import EngineConfig
from atomc.runtime.engine import Engine
from atomc.runtime.execution.loading.load import config_folder
from atomc.runtime.interrupts import interrupts_delayed
from atomc.runtime.requests.request import Completion, PromptImage, Request, siblings
from atomc.runtime.requests.request_errors import RequestFailed, wrap_error
from atomc.runtime.requests.sampling_params import SamplingParams, truncated
from atomc.runtime.text.detokenizer import encode
from atomc.runtime.turns import Turns

if TYPE_CHECKING:  # optional
    from atomc.runtime.text.chat_prompts import ChatPrompts


class ImagePrompt(TypedDict):
    """The token ids of a prompt, and the images that its image tokens stand for."""

    prompt_token_ids: Sequence[int]
    images: Sequence[PromptImage]


# A message of a chat, in OpenAI's format.
Message = Mapping[str, Any]
Prompt = str | Sequence[int] | ImagePrompt
# For all prompts of a call, or one for each.
Prompts = str | ImagePrompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams] | None
Adapters = str | Sequence[str | None] | None


class LLM:
    """One model in this process, on one device, or with tp=N, or dp=N and ep=True, in N processes.

    Threads and tasks of event loops may use it at the same time: their requests share steps, which
    run in one of the threads that wait for results.

    model      a checkpoint directory, a module (see Engine), or None: atomc's demo model
    dtype, device, options   also as torch.dtype, torch.device and atomc.Options
    progress   show progress bars during the start
    settings   further fields of EngineConfig; max_queue and image_queue_bytes are unlimited by
               default

    Attributes: `program.report` has the compiler's report, `phases` the seconds of each phase of
    the start, and `tokens_per_second` the throughput of the last `generate` or `stream`, over all
    its requests.

    With N ranks this process is one of them and starts the others. They end with it, with `close`,
    and at the end of `with LLM(...) as llm`.

    Raises what Engine raises. Generating raises RunError if a module's weights were replaced after
    construction and after `close`, and RankFailed if a rank died or hung.
    """

    def __init__(
        self,
        model: str | Path | nn.Module | None = None,
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        options: Options | Mapping[str, Any] | None = None,
        progress: bool = True,
        **settings: Any,
    ) -> None:
        module = model if isinstance(model, nn.Module) else None
        names = EngineConfig.__dataclass_fields__
        for name in settings.keys() - names.keys():
            raise TypeError(
                f"LLM has no argument {name!r}{suggestion(name, names)}; docs/from-vllm.md has the "
                "names for those of vLLM"
            )
        config = EngineConfig(
            model=None if module is not None or model is None else str(model),
            dtype=str(dtype).removeprefix("torch.") if dtype else None,
            device=str(device) if device else None,
            options=Options.of(options),
            **{"max_queue": 2**62, "image_queue_bytes": 2**62, **settings},
        )
        if config.num_engines > 1:
            raise ValueError(
                f"dp is {config.dp}, but an LLM is one engine: use `atomc serve --dp "
                f"{config.dp}`, or one process per LLM, each with its own CUDA_VISIBLE_DEVICES"
            )
        self.engine = Engine(config, module=module, progress=progress)
        self.program, self.phases = self.engine.program, self.engine.phases
        self.tokenizer = self.engine.tokenizer
        self.tokens_per_second = 0.0
        self._ids = map(str, count())
        self._turns = Turns(self.program.device)
        self._async_calls = AsyncCalls(self._turns)
        self._builders: dict[str, tuple[LLMCall, CompletionBuilder]] = {}
        self._folder = None if module is not None else config_folder(config)
        self._chat_prompts: ChatPrompts | None = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes of other ranks, if there are any. Calls that run or follow raise
        RunError; closing it twice does nothing.
        """
        self._turns.close(self.engine.close)

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Load a LoRA adapter that peft saved in this folder. Raises ValueError for one that cannot
        be used, for a name that is loaded, and if max_loras are loaded.
        """
        with self._turns.take():
            self.engine.adapters.load(name, str(folder))

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter: further prompts cannot have it. Raises ValueError for a name that
        is not loaded.
        """
        with self._turns.take():
            self.engine.adapters.unload(name)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes: later prompts are computed from their first token on."""
        with self._turns.take():
            self.engine.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache, CUDA graphs and cached prefixes; weights stay where they are.
        Generating raises RunError until `wake_up`.

        Raises ValueError for another level than 1, and while a stream is open.
        """
        with self._turns.take():
            self.engine.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate what `sleep` has freed, and capture CUDA graphs again; does nothing if the model
        does not sleep.

        tags   what to wake, of "weights", which never sleep, and "kv_cache"; None: all

        Raises ValueError if memory runs out: then the model sleeps on.
        """
        with self._turns.take():
            self.engine.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        return self.engine.is_sleeping

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        lora: Adapters = None,
        progress: bool = False,
    ) -> list[Completion]:
        """params.n completions for each prompt, in the order of the prompts.

        prompts           a text, or a list of texts, lists of token ids and ImagePrompts
        sampling_params   for all prompts, or one for each; None: greedy
        lora              the name of a LoRA adapter for all prompts, or one for each; None: the
                          model as it is
        progress          show a progress bar of finished requests

        A request that fails has finish_reason "error" and the reason in `error`; other requests are
        not affected. Raises ValueError before the first step for a prompt that is empty, too long
        or has unknown token ids, for an adapter that is not loaded, for structured output that
        cannot be compiled, and for a text without a tokenizer.
        """
        call = ThreadCall(self._queries(prompts, sampling_params, lora))
        started = time.perf_counter()
        with tqdm(total=call.num_left, unit="answer", disable=None if progress else True) as bar:
            self._finish(call, bar)
        num_tokens = sum(len(builder.token_ids) for builder in call.builders)
        self.tokens_per_second = num_tokens / (time.perf_counter() - started)
        return [builder.completion() for builder in call.builders]

    async def agenerate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        lora: Adapters = None,
    ) -> list[Completion]:
        """As `generate`, in an event loop. A task that is cancelled aborts its requests."""
        call = AsyncCall(await asyncio.to_thread(self._queries, prompts, sampling_params, lora))
        try:
            self._async_calls.submit(call, self._start, self._step)
            while call.is_running:
                await call.wait()
            call.raise_error()
        finally:
            self._end(call)
        return [builder.completion() for builder in call.builders]

    def score(
        self,
        token_ids: Sequence[Sequence[int]],
        *,
        lora: Adapters = None,
        progress: bool = False,
    ) -> list[Tensor]:
        """The log-probability of each token but the first, given those before it: for n tokens
        [n - 1], fp32, on the CPU.

        token_ids   one list per sequence, of at least 2 tokens and fewer than max_model_len
        lora        as in `generate`

        They are of the model's logits, before temperature and filters, as `logprobs` of `generate`
        are; with options={"batch_invariant": True} they have the same bits as those. Raises
        ValueError as `generate` does, and RequestFailed if a sequence fails.
        """
        _check_is_list_of_lists("token_ids", token_ids)
        for tokens in token_ids:
            if len(tokens) < 2:
                raise ValueError(f"to score needs at least 2 tokens, got {list(tokens)}")
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
        scores = []
        for completion in self.generate(token_ids, params, lora=lora, progress=progress):
            if completion.error is not None:
                raise RequestFailed(completion.error)
            of_prompt = completion.prompt_logprobs
            assert of_prompt is not None, "params ask for them"
            logprobs = [each.logprob for each in of_prompt if each is not None]
            scores.append(torch.tensor(logprobs, dtype=torch.float32, device="cpu"))
        return scores

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora: Adapters = None,
        progress: bool = False,
    ) -> list[Completion]:
        """params.n completions for each chat, in the order of the chats.

        messages   of one chat, or a list of chats, in OpenAI's format. Images are parts such as
                   {"type": "image", "image": X}: a PIL image, a path, or a data: URL; or image_url
        tools      in OpenAI's format, for all chats
        chat_template_kwargs   further variables of the chat template, such as enable_thinking=False

        The rest, and errors, as in `generate`. Raises ValueError also for messages that the chat
        template rejects, for an image that cannot be read, and for a model without a chat template;
        ImportError without jinja2.
        """
        is_single = all(isinstance(each, Mapping) for each in messages)
        chats: Sequence[Any] = [messages] if is_single else messages
        if self._chat_prompts is None:
            self._chat_prompts = self._load_chat_prompts()
        prompts: list[Prompt] = []
        for chat in chats:
            tokens, images = self._chat_prompts.prompt(
                chat, tools, add_generation_prompt, chat_template_kwargs or {}
            )
            prompts.append({"prompt_token_ids": tokens, "images": images})
        return self.generate(prompts, sampling_params, lora=lora, progress=progress)

    def _load_chat_prompts(self) -> "ChatPrompts":
        from atomc.runtime.text.chat_prompts import ChatPrompts

        if self._folder is None:
            raise ValueError("this model is a module, which has no chat template: use generate")
        return ChatPrompts(self._folder, self.tokenizer)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora: str | None = None,
    ) -> Iterator[str]:
        """The new text of one prompt in pieces, which concatenate to the text of `generate`.

        Pieces have complete characters only. Closing the iterator aborts the request. Raises
        ValueError as `generate` does, and if there is no tokenizer or params.n is not 1;
        RequestFailed, after the generated text, if it fails.
        """
        query = self._stream_query(prompt, sampling_params, lora)
        call = ThreadCall([query], streams=True)
        with self._turns.take():
            self._prepare(call)
        return self._pieces(call)

    async def astream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora: str | None = None,
    ) -> AsyncIterator[str]:
        """As `stream`, in an event loop. The request ends with the iterator, and if its task is
        cancelled.
        """
        query = await asyncio.to_thread(self._stream_query, prompt, sampling_params, lora)
        call, num_shown = AsyncCall([query], streams=True), 0
        try:
            self._async_calls.submit(call, self._start, self._step)
            while True:
                is_last = not call.is_running  # before the text is read: then it is complete
                piece = "".join(builder.text for builder in call.builders)[num_shown:]
                num_shown += len(piece)
                if piece:
                    yield piece
                elif is_last:
                    break
                else:
                    await call.wait()
            call.raise_error()
            _raise_failure(call)
        finally:
            self._end(call)

    def _pieces(self, call: ThreadCall) -> Iterator[str]:
        (builder,) = call.builders
        num_shown = 0

        def has_more() -> bool:
            return builder.finish_reason is not None or len(builder.text) > num_shown

        started = time.perf_counter()
        try:
            with self._turns.take():
                self._start(call)
            while True:
                self._turns.step_until(has_more, call.changed, self._step)
                piece = builder.text[num_shown:]
                if not piece:
                    break
                num_shown += len(piece)
                yield piece
            _raise_failure(call)
        finally:
            self._end(call)
            self.tokens_per_second = len(builder.token_ids) / (time.perf_counter() - started)

    @interrupts_delayed()
    def _finish(self, call: ThreadCall, bar: "tqdm[Any]") -> None:
        """Queue the requests and wait until all are finished; on an exception, abort all."""

        def is_done() -> bool:
            bar.update(bar.total - call.num_left - bar.n)
            return not call.num_left

        try:
            with self._turns.take():
                self._start(call)
            self._turns.step_until(is_done, call.changed, self._step)
        finally:
            self._end(call)

    def _prepare(self, call: LLMCall) -> None:
        """Create the requests of a call, in a turn. Raises ValueError if one does not fit."""
        call.builders = [
            CompletionBuilder(request, self.tokenizer)
            for query in call.queries
            for request in siblings(self._request(query))
        ]

    def _start(self, call: LLMCall) -> None:
        """Queue the requests of a call, in a turn. Raises ValueError before the first if one does
        not fit.
        """
        if not call.builders:
            self._prepare(call)
        for builder in call.builders:
            try:
                self.engine.add(builder.request)
            except RequestFailed as failed:
                builder.fail(failed.error)
                call.note(builder)
            else:
                self._builders[builder.request.id] = call, builder

    def _end(self, call: LLMCall) -> None:
        """The caller leaves: abort the requests that are unfinished."""
        call.abandoned = True
        self._turns.defer(partial(self._remove, call))

    def _remove(self, call: LLMCall) -> None:
        for builder in call.builders:
            self._builders.pop(builder.request.id, None)
            self.engine.abort(builder.request.id)

    def _step(self) -> None:
        """Run one engine step and pass its outputs to their builders, in a turn."""
        assert self.engine.has_work, "a request is unfinished and there is nothing to do"
        for output in self.engine.step():
            call, builder = self._builders.get(output.request_id, (None, None))
            if call is None or builder is None or builder.finish_reason is not None:
                continue
            try:
                builder.add(output)
            except BaseException as error:  # as in RequestErrors.run
                builder.fail(wrap_error(output.request_id, "detokenizing", error))
            call.note(builder)
            if call.abandoned:
                self._remove(call)
            elif builder.finish_reason is not None and output.finish_reason is None:
                # A stop string, which the engine does not check.
                self.engine.abort(output.request_id)

    def _queries(
        self,
        prompts: Prompts,
        sampling_params: Params,
        lora: Adapters,
    ) -> list[Query]:
        """The arguments of `generate`, one value per prompt. Raises ValueError as it does."""
        if isinstance(prompts, str | dict):
            prompts = [prompts]
        _check_is_list_of_lists("prompts", prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        adapters = [lora] * len(prompts) if lora is None or isinstance(lora, str) else lora
        for what, values in (("sampling_params", sampling_params), ("names in lora", adapters)):
            if len(values) != len(prompts):
                raise ValueError(
                    f"{len(values)} {what} for {len(prompts)} prompts: pass one for all, or one "
                    "for each"
                )
        return [
            self._query(prompt, params, name)
            for prompt, params, name in zip(prompts, sampling_params, adapters, strict=True)
        ]

    def _stream_query(
        self, prompt: Prompt, sampling_params: SamplingParams | None, lora: str | None
    ) -> Query:
        if self.tokenizer is None:
            raise ValueError("no tokenizer to stream text: use generate, which returns token ids")
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise ValueError(
                f"n is {params.n}, expected 1 for a stream: use generate for several completions"
            )
        return self._query(prompt, params, lora)

    def _query(self, prompt: Prompt, params: SamplingParams, lora: str | None) -> Query:
        if params.stop and self.tokenizer is None:
            raise ValueError("no tokenizer, so stop strings cannot be found: use stop_token_ids")
        images = prompt["images"] if isinstance(prompt, dict) else ()
        tokens = self._tokens(prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt)
        if params.truncate_prompt_tokens is not None and images:
            raise ValueError(
                "truncate_prompt_tokens would cut images of the prompt: leave it out, or send text"
            )
        tokens = truncated(
            tokens,
            params.truncate_prompt_tokens,
            max_tokens=params.max_tokens,
            max_len=self.engine.max_len,
        )
        return Query(tokens, images, params, lora)

    def _request(self, query: Query) -> Request:
        """A new request. Raises ValueError if it does not fit."""
        tokens, images, params, lora = query
        request = self.engine.request(next(self._ids), tokens, params, images=images, lora=lora)
        self.engine.refuse(request)
        return request

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(map(index, prompt))  # of numpy and torch, too
        if self.tokenizer is None:
            raise ValueError(
                f"no tokenizer for the prompt {prompt[:40]!r}: pass token ids, or use a checkpoint "
                "with tokenizer.json"
            )
        return encode(self.tokenizer, prompt)


def _check_is_list_of_lists(name: str, given: Iterable[object]) -> None:
    if any(isinstance(each, int) for each in given):
        raise ValueError(
            f"{name} is one list of token ids, expected a list of such lists: pass [ids]"
        )


def _raise_failure(call: LLMCall) -> None:
    """Raise RequestFailed if a request failed."""
    for builder in call.builders:
        if builder.error is not None:
            raise RequestFailed(builder.error)
