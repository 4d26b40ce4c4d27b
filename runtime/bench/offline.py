"""Runs requests on an engine in this process, without a server."""

import time
from collections.abc import Sequence

from tqdm import tqdm

from atomc.runtime.bench.datasets import SampleRequest
from atomc.runtime.bench.metrics import RequestTiming
from atomc.runtime.engine import Engine
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.text.detokenizer import encode


def run(
    engine: Engine, samples: Sequence[SampleRequest], began: float, *, progress: bool = True
) -> list[RequestTiming]:
    """Queues all requests at once; returns their timings, relative to `began` (time.perf_counter).

    Raises ValueError before the first step for a prompt that is too long or cannot be tokenized.
    """
    prompts = [tokens(engine, sample) for sample in samples]
    requests = [
        engine.request(
            str(number), prompt, SamplingParams(max_tokens=sample.max_tokens, ignore_eos=True)
        )
        for number, (sample, prompt) in enumerate(zip(samples, prompts, strict=True))
    ]
    for request in requests:
        engine.refuse(request)
    start = time.perf_counter() - began
    timings = {
        request.id: RequestTiming(start, input_tokens=request.num_prompt) for request in requests
    }
    with tqdm(total=len(requests), unit="request", disable=None if progress else True) as bar:
        for request in requests:
            engine.add(request)
        while engine.has_work:
            outputs = engine.step()
            now = time.perf_counter() - began
            for output in outputs:
                each = timings[output.request_id]
                if output.token_ids:
                    each.times.append(now)
                    each.output_tokens += len(output.token_ids)
                if output.finish_reason is not None:
                    each.end = now
                    each.error = output.error.message if output.error else None
                    bar.update()
    return list(timings.values())


def tokens(engine: Engine, sample: SampleRequest) -> list[int]:
    if not isinstance(sample.prompt, str):
        return [token for token in sample.prompt if isinstance(token, int)]
    if engine.tokenizer is None:
        raise ValueError("the model has no tokenizer: use prompts of token ids")
    return encode(engine.tokenizer, sample.prompt)
