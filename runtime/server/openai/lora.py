"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: LoRA adapters while serving."""

import asyncio
import logging
from pathlib import Path

from starlette.requests import Request

from atomc.runtime.images.media_access import real_folders
from atomc.runtime.server.http.responses import APIError, invalid, refusing
from atomc.runtime.server.service.protocol import LoadAdapterRequest, UnloadAdapterRequest
from atomc.runtime.server.service.response_types import Status
from atomc.runtime.server.service.service import Service

log = logging.getLogger("atomc.server")
# One after the other: the names of the engines and those of the frontend agree.
_changing = asyncio.Lock()
# One sentence for all reasons: a client cannot find out which files exist.
NOT_THERE = "lora_path: no folder below an allowed one has this path"


async def load_adapter(service: Service, body: LoadAdapterRequest, request: Request) -> Status:
    """Load a LoRA adapter.

    peft saved it; requests with its name as the model use it.
    """
    name, adapters = body.lora_name, service.model.adapters
    _check_allowed(service)
    async with _changing:
        service.engines.check_none_restarts()
        if name in service.model.names:
            raise invalid(f"{name!r} is the name of the model, choose another one", "lora_name")
        folder = _folder(service, body.lora_path)
        with refusing():
            await service.engines.load_adapter(name, str(folder))
        adapters[name] = str(folder)
        service.engines.keep_adapters(adapters)
    log.info("loaded the LoRA adapter %r", name)
    return {"status": "ok"}


async def unload_adapter(service: Service, body: UnloadAdapterRequest, request: Request) -> Status:
    """Unload a LoRA adapter.

    Requests that run go on.
    """
    name, adapters = body.lora_name, service.model.adapters
    _check_allowed(service)
    async with _changing:
        service.engines.check_none_restarts()
        if name not in adapters:
            raise APIError(
                404,
                f"no LoRA adapter {name!r} is loaded, expected {', '.join(adapters) or 'none'}",
                param="lora_name",
                code="model_not_found",
            )
        del adapters[name]
        service.engines.keep_adapters(adapters)
        await service.engines.unload_adapter(name)
    log.info("unloaded the LoRA adapter %r", name)
    return {"status": "ok"}


def _check_allowed(service: Service) -> None:
    if not service.config.allowed_lora_path:
        raise invalid(
            "LoRA adapters cannot be changed while serving: start the server with "
            "--allowed-lora-path FOLDER"
        )


def _folder(service: Service, path: str) -> Path:
    """The real path of a folder below an allowed one. Raises a 400 for any other."""
    try:
        real = Path(path).resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links; a null byte
        raise invalid(NOT_THERE, "lora_path") from error
    allowed = real_folders(service.config.allowed_lora_path, "allowed_lora_path")
    if not real.is_dir() or not any(real.is_relative_to(parent) for parent in allowed):
        raise invalid(NOT_THERE, "lora_path")
    return real
