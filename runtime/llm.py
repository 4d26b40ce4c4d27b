"""Offline generation: a list of prompts, or one stream, on an engine in this process."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn
from tqdm import tqdm

from atomc.errors import suggestion
from atomc.options import Options
from atomc.runtime.config import EngineConfig
from atomc.runtime.engine import Engine
from atomc.runtime.loading import config_folder
from atomc.runtime.prompt_image import PromptImage
from atomc.runtime.prompt_truncation import truncated
from atomc.runtime.request import Completion, FinishReason, Output, Request, siblings
from atomc.runtime.request_errors import RequestError, RequestErrors, RequestFailed
from atomc.runtime.sampling.logprobs import TokenLogprobs
from atomc.runtime.sampling.sampling_params import SamplingParams
from atomc.runtime.text_stream import TextStream

if TYPE_CHECKING:  # optional
    from tokenizers import Tokenizer

    from atomc.runtime.chat_prompts import ChatPrompts


class ImagePrompt(TypedDict):
    """The token ids of a prompt, and the images that its image tokens stand for."""

    prompt_token_ids: Sequence[int]
    images: Sequence[PromptImage]


# A message of a chat, in OpenAI's format.
Message = Mapping[str, Any]
Prompt = str | Sequence[int] | ImagePrompt


class LLM:
    """One model in this process, on one device, or with tp=N, or dp=N and ep=True, in N processes;
    not thread-safe.

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
    construction, and RankFailed if a rank died or hung.
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
        self._builders: dict[str, CompletionBuilder] = {}
        self._request_errors = RequestErrors()
        self._folder = None if module is not None else config_folder(config)
        self._chat_prompts: ChatPrompts | None = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes of other ranks, if there are any. The LLM cannot be used then."""
        self.engine.close()

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Load a LoRA adapter that peft saved in this folder. Raises ValueError for one that cannot
        be used, for a name that is loaded, and if max_loras are loaded.
        """
        self.engine.adapters.load(name, str(folder))

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter: further prompts cannot have it. Raises ValueError for a name that
        is not loaded.
        """
        self.engine.adapters.unload(name)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes: later prompts are computed from their first token on."""
        self.engine.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache, CUDA graphs and cached prefixes; weights stay where they are.
        Generating raises RunError until `wake_up`.

        Raises ValueError for another level than 1, and while a stream is open.
        """
        self.engine.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate what `sleep` has freed, and capture CUDA graphs again; does nothing if the model
        does not sleep.

        tags   what to wake, of "weights", which never sleep, and "kv_cache"; None: all

        Raises ValueError if memory runs out: then the model sleeps on.
        """
        self.engine.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        return self.engine.is_sleeping

    def generate(
        self,
        prompts: str | ImagePrompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: str | Sequence[str | None] | None = None,
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
        if isinstance(prompts, str | dict):
            prompts = [prompts]
        _check_is_list_of_lists("prompts", prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"{len(sampling_params)} sampling_params for {len(prompts)} prompts: "
                "pass one for all, or one for each"
            )
        adapters = [lora] * len(prompts) if lora is None or isinstance(lora, str) else lora
        if len(adapters) != len(prompts):
            raise ValueError(
                f"{len(adapters)} names in lora for {len(prompts)} prompts: pass one for all, or "
                "one for each"
            )
        builders = [
            CompletionBuilder(request, self.tokenizer)
            for prompt, params, name in zip(prompts, sampling_params, adapters, strict=True)
            for request in siblings(self._request(prompt, params, name))
        ]
        started = time.perf_counter()
        with tqdm(total=len(builders), unit="answer", disable=None if progress else True) as bar:
            self._finish(builders, bar)
        seconds = time.perf_counter() - started
        self.tokens_per_second = sum(len(builder.token_ids) for builder in builders) / seconds
        return [builder.completion() for builder in builders]

    def score(
        self,
        token_ids: Sequence[Sequence[int]],
        *,
        lora: str | Sequence[str | None] | None = None,
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
            found = completion.prompt_logprobs
            assert found is not None, "params ask for them"
            logprobs = [each.logprob for each in found if each is not None]
            scores.append(torch.tensor(logprobs, dtype=torch.float32, device="cpu"))
        return scores

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora: str | Sequence[str | None] | None = None,
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
        from atomc.runtime.chat_prompts import ChatPrompts

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
        if self.tokenizer is None:
            raise ValueError("no tokenizer to stream text: use generate, which returns token ids")
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise ValueError(
                f"n is {params.n}, expected 1 for a stream: use generate for several completions"
            )
        return self._pieces(CompletionBuilder(self._request(prompt, params, lora), self.tokenizer))

    def _pieces(self, builder: "CompletionBuilder") -> Iterator[str]:
        num_shown = 0
        started = time.perf_counter()
        self._add(builder)
        try:
            # Another caller's steps may also produce text, or finish the request.
            while builder.finish_reason is None or len(builder.text) > num_shown:
                piece = builder.text[num_shown:]
                num_shown += len(piece)
                if piece:
                    yield piece
                elif builder.finish_reason is None:
                    self._step()
            if builder.error is not None:
                raise RequestFailed(builder.error)
        finally:
            self._remove(builder)
            self.tokens_per_second = len(builder.token_ids) / (time.perf_counter() - started)

    def _finish(self, builders: Sequence["CompletionBuilder"], bar: "tqdm[Any]") -> None:
        """Queue the requests and run steps until all are finished; on an exception, abort all."""
        unfinished = list(builders)
        try:
            for builder in builders:
                self._add(builder)
            while unfinished:
                # Another caller's steps may have finished some.
                left = [builder for builder in unfinished if builder.finish_reason is None]
                bar.update(len(unfinished) - len(left))
                unfinished = left
                if left:
                    self._step()
        finally:
            for builder in builders:
                self._remove(builder)

    def _add(self, builder: "CompletionBuilder") -> None:
        try:
            self.engine.add(builder.request)
        except RequestFailed as failed:
            builder.fail(failed.error)
        else:
            self._builders[builder.request.id] = builder

    def _remove(self, builder: "CompletionBuilder") -> None:
        self._builders.pop(builder.request.id, None)
        self.engine.abort(builder.request.id)

    def _step(self) -> None:
        """Run one engine step and pass its outputs to their builders."""
        assert self.engine.has_work, "a request is unfinished and there is nothing to do"
        for output in self.engine.step():
            builder = self._builders.get(output.request_id)
            if builder is not None:
                self._request_errors.run(output.request_id, "detokenizing", builder.add, output)
                for error in self._request_errors.take().values():
                    builder.fail(error)
                if builder.finish_reason is not None and output.finish_reason is None:
                    self.engine.abort(
                        output.request_id
                    )  # a stop string, which the engine does not check

    def _request(self, prompt: Prompt, params: SamplingParams, lora: str | None = None) -> Request:
        """A new request. Raises ValueError if it does not fit."""
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
        request = self.engine.request(next(self._ids), tokens, params, images=images, lora=lora)
        self.engine.refuse(request)
        return request

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(map(index, prompt))  # of numpy and torch, too
        if self.tokenizer is None:
            raise ValueError(
                f"no tokenizer for the prompt {prompt[:40]!r}: pass token ids, or use a "
                "checkpoint with "
                "tokenizer.json"
            )
        return list(self.tokenizer.encode(prompt).ids)


class CompletionBuilder:
    """Builds the Completion of one request from its outputs."""

    def __init__(self, request: Request, tokenizer: "Tokenizer | None") -> None:
        self.request = request
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.error: RequestError | None = None
        self._stream = TextStream(tokenizer, request.tokens, request.params)
        self._first: Output | None = None
        self._stop_reason: int | str | None = None

    def add(self, output: Output) -> None:
        self._first = self._first or output
        delta = self._stream.add(output)
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.finish_reason, self._stop_reason = delta.finish_reason, delta.stop_reason
        self.error = output.error

    def fail(self, error: RequestError) -> None:
        self.finish_reason, self.error = "error", error

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        request, first = self.request, self._first or Output(self.request.id, ())
        return Completion(
            self.text,
            tuple(self.token_ids),
            self.finish_reason,
            tuple(request.tokens[: request.num_prompt]),
            logprobs=None if request.params.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=first.prompt_logprobs,
            stop_reason=self._stop_reason,
            num_cached=first.num_cached,
            error=self.error,
        )


def _check_is_list_of_lists(name: str, given: Iterable[object]) -> None:
    if any(isinstance(each, int) for each in given):
        raise ValueError(
            f"{name} is one list of token ids, expected a list of such lists: pass [ids]"
        )
