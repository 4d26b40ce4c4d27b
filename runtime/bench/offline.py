"""Requests through an engine in this process, without a server."""

import time
from collections.abc import Sequence

from tqdm import tqdm

from atomc.runtime.bench.figures import Timed
from atomc.runtime.bench.prompts import Ask
from atomc.runtime.engine import Engine
from atomc.runtime.sampling_params import SamplingParams


def run(engine: Engine, asks: Sequence[Ask], began: float, *, progress: bool = True) -> list[Timed]:
    """Queues all at once; the times of each, in seconds since `began` (of time.perf_counter).

    Raises ValueError, before anything runs, for a prompt that does not fit or cannot be tokenized.
    """
    prompts = [tokens(engine, ask) for ask in asks]
    requests = [
        engine.request(str(number), prompt, SamplingParams(max_tokens=ask.max_tokens, ignore_eos=True))
        for number, (ask, prompt) in enumerate(zip(asks, prompts, strict=True))
    ]
    for request in requests:
        engine.refuse(request)
    start = time.perf_counter() - began
    timed = {request.id: Timed(start, input_tokens=request.num_prompt) for request in requests}
    with tqdm(total=len(requests), unit="request", disable=None if progress else True) as bar:
        for request in requests:
            engine.add(request)
        while engine.has_work:
            outputs = engine.step()
            now = time.perf_counter() - began
            for output in outputs:
                each = timed[output.request_id]
                if output.token_ids:
                    each.times.append(now)
                    each.output_tokens += len(output.token_ids)
                if output.finish_reason is not None:
                    each.end = now
                    bar.update()
    return list(timed.values())


def tokens(engine: Engine, ask: Ask) -> list[int]:
    if not isinstance(ask.prompt, str):
        return [token for token in ask.prompt if isinstance(token, int)]
    if engine.tokenizer is None:
        raise ValueError("the model has no tokenizer: give prompts as token ids")
    return list(engine.tokenizer.encode(ask.prompt).ids)
