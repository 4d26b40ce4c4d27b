"""The Service of engine processes, from their start to their end."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from atomc.runtime.server.config import ServerConfig
from atomc.runtime.server.engines.client import EngineClient, EngineHandle
from atomc.runtime.server.engines.engine_group import Engines
from atomc.runtime.server.metrics import Metrics
from atomc.runtime.server.service.image_budget import ImageBudget
from atomc.runtime.server.service.image_reader import image_reader
from atomc.runtime.server.service.model_info import load_model_info
from atomc.runtime.server.service.service import Service

if TYPE_CHECKING:
    from atomc.runtime.server.service.traces import Traces


@asynccontextmanager
async def running_service(
    config: ServerConfig,
    processes: Sequence[EngineHandle],
    folder: Path,
    name: str,
    traces: "Traces | None" = None,
) -> AsyncIterator[Service]:
    """The Service when all engines are ready; ends them after it.

    folder, name   of the model; clients use the name unless the config has others

    Raises EngineFailed if an engine cannot start, and as load_model_info does.
    """
    engines = Engines(
        [
            EngineClient(
                process,
                name="the engine" if len(processes) == 1 else f"engine {number}",
                health_timeout=config.engine_patience,
            )
            for number, process in enumerate(processes)
        ]
    )
    engine = processes[0].config
    try:
        model = load_model_info(folder, name, config, engine.lora)
        await engines.connect()
        service = Service(
            engines,
            model,
            config,
            Metrics(engines, model.names[0]),
            max_requests=engine.max_queue,
            image_budget=ImageBudget(engine.image_queue_bytes),
            images=None if model.images is None else image_reader(model.images, config),
            traces=traces,
        )
        service.update_sizes()
        yield service
    finally:
        await engines.close()
