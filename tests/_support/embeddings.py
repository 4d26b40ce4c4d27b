"""Embeddings from an engine in this process."""

from collections.abc import Sequence

from atomc.runtime.engine import Engine
from atomc.runtime.requests.request import Pooling
from atomc.runtime.requests.request_errors import RequestFailed


def embed(
    engine: Engine, prompts: Sequence[Sequence[int]], pooling: Pooling = "mean"
) -> list[list[float]]:
    """The pooled hidden states of each prompt. Other requests run meanwhile; the next `step`
    returns their outputs. Raises RequestFailed if a prompt fails.
    """
    requests = [
        engine.request(f"embed {i}", prompt, pooling=pooling) for i, prompt in enumerate(prompts)
    ]
    embeddings: dict[str, list[float]] = {}
    others = []
    try:
        for request in requests:
            engine.add(request)
        while len(embeddings) < len(requests):
            for output in engine.step():
                if output.request_id not in {request.id for request in requests}:
                    others.append(output)
                elif output.error is not None:
                    raise RequestFailed(output.error)
                else:
                    embeddings[output.request_id] = list(output.embedding or ())
    finally:
        for request in requests:
            engine.abort(request.id)
        engine._outputs = others + engine._outputs
    return [embeddings[request.id] for request in requests]
