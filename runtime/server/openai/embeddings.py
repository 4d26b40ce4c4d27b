"""POST /v1/embeddings."""

import asyncio
import base64
from collections.abc import Sequence

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.server.engines.ipc import Submit
from atomc.runtime.server.engines.request_stream import RequestStream
from atomc.runtime.server.http.responses import (
    JSONResponse,
    cancel_on_disconnect,
    invalid,
    request_error,
    request_id,
)
from atomc.runtime.server.service.protocol import EmbeddingRequest
from atomc.runtime.server.service.sampling import tokenize_prompts
from atomc.runtime.server.service.service import Service


async def embed(service: Service, body: EmbeddingRequest, request: Request) -> Response:
    """Compute embeddings of texts."""
    model = service.model
    model.check_name(body.model)
    if model.adapter(body.model) is not None:
        raise invalid(
            f"{body.model!r} is a LoRA adapter, with which there are no embeddings: expected "
            f"{', '.join(model.names)}",
            "model",
        )
    prompts = await tokenize_prompts(service, body.input, "input")
    for prompt in prompts:
        if len(prompt) > model.max_len:
            raise invalid(
                f"this model's maximum context length is {model.max_len} tokens, an input has "
                f"{len(prompt)}",
                "input",
                "context_length_exceeded",
            )
    params = SamplingParams(max_tokens=1)
    salt = service.prefix_salt(request)
    submits = [
        Submit(service.engines.next_id(), prompt, params, salt=salt, pooling=body.pooling)
        for prompt in prompts
    ]
    stream = service.engines.submit(submits)
    try:
        encoded = await cancel_on_disconnect(
            request, _collect_embeddings(stream, body, request_id(request))
        )
    finally:
        stream.close()
    data = [
        {"object": "embedding", "index": index, "embedding": encoded[submit.id]}
        for index, submit in enumerate(submits)
    ]
    total = sum(map(len, prompts))
    return JSONResponse(
        {
            "object": "list",
            "data": data,
            "model": model.names[0],
            "usage": {"prompt_tokens": total, "total_tokens": total},
        }
    )


async def _collect_embeddings(
    stream: RequestStream, body: EmbeddingRequest, name: str
) -> dict[str, msgspec.Raw]:
    """The embedding of each request, as JSON."""
    await stream.wait_accepted()
    encoded: dict[str, msgspec.Raw] = {}
    async for output in stream:
        if output.error is not None:
            raise request_error(output.error, name)
        if output.embedding is None:
            raise invalid("this model does not return embeddings", "model")
        encoded[output.request_id] = _encode_embedding(output.embedding, body)
        await asyncio.sleep(0)  # yield to other requests; many outputs can arrive together
    return encoded


def _encode_embedding(vector: Sequence[float], body: EmbeddingRequest) -> msgspec.Raw:
    if body.dimensions not in (None, len(vector)):
        raise invalid(
            f"dimensions is {body.dimensions}, expected {len(vector)}, the size of this "
            "model's embeddings",
            "dimensions",
        )
    values = np.array(vector)
    if body.normalize:
        values /= np.linalg.norm(values) or 1.0
    if body.encoding_format == "float":
        return msgspec.Raw(msgspec.json.encode(values.tolist()))
    # OpenAI's format: little-endian fp32.
    return msgspec.Raw(b'"%b"' % base64.b64encode(values.astype("<f4").tobytes()))
