"""Endpoints other than generation: models, tokens, health, metrics, reports, and control calls."""

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Annotated

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from atomc.runtime.server.chat.chat_prompt import chat_prompt
from atomc.runtime.server.engines.client import EngineDead, EngineRestarting
from atomc.runtime.server.engines.control_calls import CallName
from atomc.runtime.server.http.limits import TOKENS, check_length
from atomc.runtime.server.http.responses import APIError, invalid, refusing, unavailable
from atomc.runtime.server.metrics import CONTENT_TYPE
from atomc.runtime.server.service import response_types as types
from atomc.runtime.server.service.model_info import ModelInfo
from atomc.runtime.server.service.protocol import DetokenizeRequest, TokenizeRequest
from atomc.runtime.server.service.service import Service
from atomc.runtime.sleeping import refuse_level, wakes_state

STATS_SECONDS = 2.0
RENDER_SECONDS = 60.0
_rendering = asyncio.Lock()


async def models(service: Service) -> types.Models:
    """List the served models."""
    names = dict.fromkeys((*service.model.names, *service.model.adapters))
    return {"object": "list", "data": [_model(service, name) for name in names]}


async def one_model(service: Service, name: str) -> types.Model:
    """Get a served model."""
    service.model.check_name(name)
    return _model(service, name)


def _model(service: Service, name: str) -> types.Model:
    model = service.model
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "atomc",
        "root": model.names[0],
        "parent": None if model.adapter(name) is None else model.names[0],
        "max_model_len": model.max_len,
        "input_modalities": ["text", "image"] if service.images else ["text"],
    }


async def tokenize(service: Service, body: TokenizeRequest, request: Request) -> types.Tokens:
    """Get the tokens of a prompt or a chat."""
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
        tokens = (await chat_prompt(service, request, body, tools, kwargs)).tokens
    spelled = (
        await asyncio.to_thread(_token_texts, model, tokens) if body.return_token_strs else None
    )
    return {
        "count": len(tokens),
        "max_model_len": model.max_len,
        "tokens": tokens,
        "token_strs": spelled,
    }


async def detokenize(
    service: Service, body: DetokenizeRequest, request: Request
) -> types.DetokenizedText:
    """Get the text of tokens."""
    service.model.check_name(body.model)
    service.model.check_tokens(body.tokens, "tokens")
    check_length(max(TOKENS, service.model.max_len), body.tokens, "tokens", "tokens")
    return {"prompt": await service.model.decode(body.tokens)}


def _token_texts(model: ModelInfo, tokens: Sequence[int]) -> list[str]:
    return [model.token_text_and_bytes(token)[0] for token in tokens]


async def health(service: Service) -> types.Health:
    """Check that an engine's process runs and responds.

    Names those of several that do not.
    """
    engines = service.engines
    if isinstance(engines.dead, EngineRestarting):
        raise engines.dead
    reason = engines.unhealthy_reason
    if reason is not None:
        raise unavailable(reason, "engine_dead")
    if missing := engines.unhealthy:
        return {"status": "degraded", "engines": missing}
    return {"status": "ok"}


async def ready(service: Service) -> types.Status:
    """Check that an engine generates tokens."""
    await service.ready()
    return {"status": "ready"}


async def reset_prefix_cache(service: Service) -> types.Status:
    """Forget all cached prompts."""
    await service.engines.call_all("reset_prefix_cache")
    return {"status": "ok"}


async def sleep(service: Service, level: int = 1) -> types.Status:
    """Free the KV cache and CUDA graphs."""
    with refusing("level"):
        refuse_level(level)
    try:
        await service.engines.sleep()
    except ValueError as error:
        raise APIError(409, str(error), code="requests_running") from error
    return {"status": "ok"}


async def wake_up(service: Service, tags: Annotated[list[str], Query()] = []) -> types.Status:  # noqa: B006
    """Allocate what /sleep has freed.

    tags: as of Engine.wake_up, empty for all
    """
    with refusing("tags"):
        wakes = wakes_state(tags or None)
    if wakes:
        try:
            await service.engines.call_all("wake_up")
        except ValueError as error:
            raise unavailable(str(error), "out_of_memory") from error
    return {"status": "ok"}


async def is_sleeping(service: Service) -> types.Sleeping:
    """Check whether the engines sleep."""
    return {"is_sleeping": any(await service.engines.call_all("is_sleeping"))}


async def metrics(service: Service) -> Response:
    """Get Prometheus metrics."""
    # Without a response in time, return the last values; `atomc:up` says whether an engine is
    # healthy.
    with suppress(TimeoutError, EngineDead):
        await asyncio.wait_for(service.engines.update_stats(), STATS_SECONDS)
    return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})


async def experts(service: Service) -> types.ExpertTokens:
    """Get how many tokens each expert got."""
    await service.engines.update_stats()
    stats = service.engines.stats
    if stats is None or not stats.expert_load:
        raise invalid(
            "tokens of experts are not counted: start the server with --expert-load and a mixture "
            "of experts"
        )
    return {"tokens": stats.expert_load}


async def compiler(service: Service) -> Response:
    """Get the compiler's report."""
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
            raise unavailable(
                f"rendering the report took more than {RENDER_SECONDS:g} s: call later, or read "
                "/compiler, which is its JSON",
                "render_timeout",
            ) from error
        finally:
            if renderer.returncode is None:
                renderer.kill()
                await renderer.wait()
    if renderer.returncode:
        last = stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise APIError(500, f"the report could not be rendered: {last}")
    headers = {
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
        "Content-Security-Policy": "frame-ancestors 'none'",
    }
    return Response(text, media_type="text/html", headers=headers)


async def start_profile(service: Service) -> types.Profile:
    """Start torch's profiler in the engine."""
    await _call_profiler(service, "start_profile")
    return {"status": "started"}


async def stop_profile(service: Service) -> types.Profile:
    """Stop the profiler, and write its file."""
    return {"status": "stopped", "file": await _call_profiler(service, "stop_profile")}


async def _call_profiler(service: Service, name: CallName) -> str:
    folder = service.config.profile_dir
    if folder is None:
        raise invalid("profiling is off: start the server with --profile-dir DIR")
    with refusing():
        return await service.engines.call(name, folder)


async def version(service: Service) -> types.Version:
    """Get the version of atomc."""
    return {"version": import_module("atomc").__version__}


async def load(service: Service) -> types.Load:
    """Get the number of unfinished choices."""
    return {"server_load": sum(client.num_unfinished for client in service.engines.clients)}
