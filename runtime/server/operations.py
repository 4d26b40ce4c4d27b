"""Endpoints other than generation: models, tokenization, health, metrics, compiler report,
profiling.
"""

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import Response

from atomc.runtime.server.chat.chat_prompt import chat_prompt
from atomc.runtime.server.engines.client import EngineDead, EngineRestarting
from atomc.runtime.server.http.errors import APIError, invalid
from atomc.runtime.server.http.limits import TOKENS, check_length
from atomc.runtime.server.http.responses import JSONResponse
from atomc.runtime.server.metrics import CONTENT_TYPE
from atomc.runtime.server.service.model_info import ModelInfo
from atomc.runtime.server.service.protocol import DetokenizeRequest, TokenizeRequest
from atomc.runtime.server.service.service import Service
from atomc.runtime.sleeping import refuse_level, wakes_state

STATS_SECONDS = 2.0
RENDER_SECONDS = 60.0
_rendering = asyncio.Lock()


async def models(service: Service, name: str | None = None) -> Response:
    """The list of model names, or the entry of one name."""
    model = service.model
    if name is not None:
        model.check_name(name)
    data = {
        each: {
            "id": each,
            "object": "model",
            "created": model.created,
            "owned_by": "atomc",
            "root": model.names[0],
            "parent": None if model.adapter(each) is None else model.names[0],
            "max_model_len": model.max_len,
            "input_modalities": ["text", "image"] if service.images else ["text"],
        }
        for each in (*model.names, *model.adapters)
    }
    return JSONResponse(
        {"object": "list", "data": list(data.values())} if name is None else data[name]
    )


async def tokenize(service: Service, body: TokenizeRequest, request: Request) -> Response:
    model = service.model
    model.check_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid(
            "the request has both or neither of prompt and messages, expected one of them", "prompt"
        )
    if body.prompt is not None:
        (tokens,) = await model.encode(
            [body.prompt], body.add_special_tokens, limit=max(TOKENS, model.max_len)
        )
    else:
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools] if body.tools else None
        kwargs = body.chat_template_kwargs or {}
        chat = await chat_prompt(
            service,
            request,
            body.messages or [],
            tools,
            body.add_generation_prompt,
            kwargs,
            body.continue_final_message,
        )
        tokens = chat.tokens
    spelled = (
        await asyncio.to_thread(_token_texts, model, tokens) if body.return_token_strs else None
    )
    return JSONResponse(
        {
            "count": len(tokens),
            "max_model_len": model.max_len,
            "tokens": tokens,
            "token_strs": spelled,
        }
    )


async def detokenize(service: Service, body: DetokenizeRequest) -> Response:
    service.model.check_name(body.model)
    service.model.check_tokens(body.tokens, "tokens")
    check_length(max(TOKENS, service.model.max_len), body.tokens, "tokens", "tokens")
    return JSONResponse({"prompt": await service.model.decode(body.tokens)})


def _token_texts(model: ModelInfo, tokens: Sequence[int]) -> list[str]:
    return [model.token_text_and_bytes(token)[0] for token in tokens]


async def health(service: Service) -> Response:
    """Whether an engine's process runs and responds; names those of several that do not."""
    engines = service.engines
    if isinstance(engines.dead, EngineRestarting):
        raise engines.dead
    reason = engines.unhealthy_reason
    if reason is not None:
        raise APIError(503, reason, "service_unavailable", code="engine_dead")
    if missing := engines.unhealthy:
        return JSONResponse({"status": "degraded", "engines": missing})
    return JSONResponse({"status": "ok"})


async def ready(service: Service) -> Response:
    await service.ready()
    return JSONResponse({"status": "ready"})


async def reset_prefix_cache(service: Service) -> Response:
    await service.engines.reset_prefix_cache()
    return JSONResponse({"status": "ok"})


async def sleep(service: Service, level: int) -> Response:
    """Frees the KV cache and CUDA graphs of all engines."""
    try:
        refuse_level(level)
    except ValueError as error:
        raise invalid(str(error), "level") from error
    try:
        await service.engines.sleep()
    except ValueError as error:
        raise APIError(409, str(error), code="requests_running") from error
    return JSONResponse({"status": "ok"})


async def wake_up(service: Service, tags: Sequence[str]) -> Response:
    """Allocates what `sleep` has freed. tags: as of Engine.wake_up, empty for all."""
    try:
        wakes = wakes_state(tags or None)
    except ValueError as error:
        raise invalid(str(error), "tags") from error
    if wakes:
        try:
            await service.engines.wake_up()
        except ValueError as error:
            raise APIError(503, str(error), "service_unavailable", code="out_of_memory") from error
    return JSONResponse({"status": "ok"})


async def is_sleeping(service: Service) -> Response:
    return JSONResponse({"is_sleeping": await service.engines.is_sleeping()})


async def metrics(service: Service) -> Response:
    """Prometheus metrics; an engine's gauges are current if it responds within STATS_SECONDS, else
    its last ones.
    """
    # Without a response, return the last values; `atomc:up` says whether an engine is healthy.
    with suppress(TimeoutError, EngineDead):
        await asyncio.wait_for(service.engines.update_stats(), STATS_SECONDS)
    return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})


async def experts(service: Service) -> Response:
    """How many tokens each expert got since the start, by layer."""
    await service.engines.update_stats()
    stats = service.engines.stats
    if stats is None or not stats.expert_load:
        raise invalid(
            "tokens of experts are not counted: start the server with --expert-load and a mixture "
            "of experts"
        )
    return JSONResponse({"tokens": stats.expert_load})


async def compiler(service: Service) -> Response:
    return Response(await service.engines.call("report"), media_type="application/json")


async def compiler_page(service: Service) -> Response:
    """The report as a self-contained HTML page, rendered in a subprocess, one at a time."""
    report = await service.engines.call("report")
    async with _rendering:
        renderer = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "atomc.report", stdin=PIPE, stdout=PIPE, stderr=PIPE
        )
        try:
            async with asyncio.timeout(RENDER_SECONDS):
                text, stderr = await renderer.communicate(report.encode())
        except TimeoutError as error:
            raise APIError(
                503,
                f"rendering the report took more than {RENDER_SECONDS:g} s: call later, or read "
                "/compiler, which is its JSON",
                "service_unavailable",
                code="render_timeout",
            ) from error
        finally:
            if renderer.returncode is None:
                renderer.kill()
                await renderer.wait()
    if renderer.returncode:
        last = stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise APIError(500, f"the report could not be rendered: {last}", "server_error")
    headers = {
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
        "Content-Security-Policy": "frame-ancestors 'none'",
    }
    return Response(text, media_type="text/html", headers=headers)


async def profile(service: Service, start: bool) -> Response:
    folder = service.config.profile_dir
    if folder is None:
        raise invalid("profiling is off: start the server with --profile-dir DIR")
    try:
        value = await service.engines.call("start_profile" if start else "stop_profile", folder)
    except ValueError as error:
        raise invalid(str(error)) from error
    return JSONResponse({"status": "started"} if start else {"status": "stopped", "file": value})
