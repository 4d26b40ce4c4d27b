"""`atomc serve`: starts the engine processes and the HTTP server, and shuts all down."""

import asyncio
import errno
import logging
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from atomc.options import TorchrunPlace, torchrun_place
from atomc.runtime.config import EngineConfig
from atomc.runtime.execution.loading.hub import model_folder
from atomc.runtime.images.media_access import real_folders
from atomc.runtime.processes.stderr_log import log_to_stderr
from atomc.runtime.server.config import ServerConfig
from atomc.runtime.server.engines.client import EngineClient, EngineFailed, EngineHandle
from atomc.runtime.server.engines.engine_group import Engines
from atomc.runtime.server.engines.start_engines import start_engines
from atomc.runtime.server.engines.supervisor import Supervisor
from atomc.runtime.server.http.api_keys import read_keys
from atomc.runtime.server.http.deadline import CLOSE_SECONDS, Deadline

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

    from atomc.runtime.server.http.web_server import WebServer
    from atomc.runtime.server.service.service import Service
    from atomc.runtime.server.service.traces import Traces

log = logging.getLogger("atomc.server")
DEMO_NAME = "atomc-demo"
KEEP_ALIVE_SECONDS = 30
MAX_LORAS = 8
BACKLOG = 2048
# Connections that are accepted in one iteration of the event loop.
ACCEPTED_AT_ONCE = 8
# Threads that render chat templates give way to the event loop after this time; Python's default is
# 0.005, and a thread has its turn after each system call of the loop.
SWITCH_SECONDS = 0.0005
ERROR_GRACE_SECONDS = 1.0
# TCP keepalive: a client that vanished without closing its connection is detected after two
# minutes.
KEEP_ALIVE_PROBES = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}


def serve(server: ServerConfig, engine: EngineConfig) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises ValueError, OSError or ImportError for an error that a user can fix, and SystemExit(1) if
    the engine did not start for another reason, or died.
    """
    log_to_stderr()
    logging.getLogger("atomc").setLevel(logging.INFO)
    _check_certificate(server)
    real_folders(server.allowed_local_media_path)
    engine = reserve_adapters(server, engine)
    server = read_key_files(server)
    folder, name = model_folder_and_name(engine)
    traces = _traces(server)
    torchrun = torchrun_place()
    check_launcher(server, torchrun)
    server = choose_drain_seconds(server, torchrun)
    if torchrun is not None and torchrun.rank > 0:
        start_engines(engine, folder, torchrun=torchrun)
    listener = _bind(server)
    _raise_open_file_limit()
    # A SIGTERM before the server listens ends everything at once.
    signal.signal(signal.SIGTERM, _raise_keyboard_interrupt)
    processes: Sequence[EngineHandle] = []
    deadline = Deadline(lambda: _kill(processes))
    try:
        # Before the imports of `_run`, which take as long as the first imports of the engine
        # process.
        processes = start_engines(engine, folder, on_ray=server.ray, torchrun=torchrun)
        signal.signal(signal.SIGTERM, _raise_keyboard_interrupt)  # Ray has a handler of its own
        labels = ", ".join(process.label for process in processes)
        served = ", ".join(server.served_model_name or (name,))
        log.info("starting %s: server is process %d, engine %s", served, os.getpid(), labels)
        status = asyncio.run(_run(server, processes, deadline, listener, folder, name, traces))
    except EngineFailed as error:
        if error.by_user:
            raise ValueError(str(error)) from error
        # The engine process has logged the stack trace.
        log.error("%s", error)
        raise SystemExit(1) from error
    finally:
        listener.close()
        for process in processes:
            process.close()
        if traces is not None:
            traces.close()
        deadline.cancel()
    if status:
        raise SystemExit(status)


def reserve_adapters(server: ServerConfig, engine: EngineConfig) -> EngineConfig:
    """The engine's config, with room for LoRA adapters that are loaded while serving, if the server
    allows it. Raises ValueError for an allowed folder that is none.
    """
    allows = real_folders(server.allowed_lora_path, "allowed_lora_path")
    if not allows or engine.max_loras is not None:
        return engine
    return replace(engine, max_loras=max(MAX_LORAS, len(engine.lora)))


def read_key_files(server: ServerConfig) -> ServerConfig:
    """Raises OSError or ValueError for files without keys."""
    return replace(
        server,
        api_key=(*server.api_key, *read_keys(server.api_key_file, "--api-key-file")),
        admin_key=(*server.admin_key, *read_keys(server.admin_key_file, "--admin-key-file")),
        api_key_file=None,
        admin_key_file=None,
    )


def _traces(server: ServerConfig) -> "Traces | None":
    """Raises ImportError without OpenTelemetry."""
    if server.otlp_traces_endpoint is None:
        return None
    from atomc.runtime.server.service.traces import Traces

    return Traces(server.otlp_traces_endpoint)


def _kill(processes: Sequence[EngineHandle]) -> None:
    for process in processes:
        process.kill()


def _raise_keyboard_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def model_folder_and_name(engine: EngineConfig) -> tuple[Path, str]:
    """The model's folder, and its default name for clients."""
    if engine.model is None:
        from atomc.demo import PATH

        return Path(PATH), DEMO_NAME
    folder = model_folder(engine.model)
    # Do not disclose local paths to clients.
    return folder, folder.resolve().name if Path(
        engine.model
    ).expanduser().is_dir() else engine.model


def _check_certificate(server: ServerConfig) -> None:
    """Raises ValueError for files that are not a certificate and its key."""
    if server.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            server.ssl_certfile, server.ssl_keyfile
        )
    except OSError as error:  # includes ssl.SSLError, for invalid contents
        files = " and ".join(file for file in (server.ssl_certfile, server.ssl_keyfile) if file)
        raise ValueError(
            f"--ssl-certfile and --ssl-keyfile: {files} is not a certificate with its key: {error}"
        ) from error


def check_launcher(server: ServerConfig, torchrun: TorchrunPlace | None) -> None:
    """Raises ValueError for flags that do not work together with torchrun."""
    if torchrun is None:
        return
    if server.ray:
        raise ValueError("--ray starts all ranks: run this command without torchrun")
    if server.restart_engine:
        raise ValueError(
            f"--restart-engine {server.restart_engine} cannot start the ranks of torchrun again: "
            "use torchrun's --max-restarts"
        )


def choose_drain_seconds(server: ServerConfig, torchrun: TorchrunPlace | None) -> ServerConfig:
    """The config with the time that running requests have to finish, if it says none."""
    if server.drain_seconds is not None:
        return server
    return replace(server, drain_seconds=30.0 if torchrun is None else 20.0)


def _raise_open_file_limit() -> None:
    """Each connection is an open file, and the default soft limit of shells is low."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _bind(server: ServerConfig) -> socket.socket:
    """A bound socket that does not listen yet: clients cannot connect before the engine is ready.
    Raises OSError if the address is in use."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit the keepalive options.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE_PROBES.items():
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    try:
        listener.bind((server.host, server.port))
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        of_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        remedy = "choose another with --port" if of_port else "give an address of this machine"
        raise OSError(
            f"cannot listen on {server.host} port {server.port}: {reason}; {remedy}"
            + ("" if of_port else " as --host")
        ) from error
    return listener


async def _run(
    config: ServerConfig,
    processes: Sequence[EngineHandle],
    deadline: Deadline,
    listener: socket.socket,
    folder: Path,
    name: str,
    traces: "Traces | None",
) -> int:
    """Serve until shutdown; returns the exit status of the process."""
    from atomc.runtime.processes.garbage_collection import freeze_heap
    from atomc.runtime.server.app import create_app
    from atomc.runtime.server.http.web_server import ShutdownMiddleware, WebServer
    from atomc.runtime.server.running_service import running_service

    assert config.drain_seconds is not None, "choose_drain_seconds sets it"
    async with running_service(config, processes, folder, name, traces) as service:
        engines = service.engines
        supervisors = [
            Supervisor(
                client,
                restarts=config.restart_engine,
                timeout=config.engine_timeout,
                on_restarted=service.update_sizes,
                others_remain=partial(engines.others_remain, client),
            )
            for client in engines.clients
        ]
        app = ShutdownMiddleware(create_app(service))
        deadline.before_exit = engines.kill
        server = WebServer(
            _uvicorn_config(app, config),
            drain_seconds=config.drain_seconds,
            abort_engine_requests=engines.abort_all,
            cancel_http_requests=app.cancel_requests,
            deadline=deadline,
            on_listening=lambda: _on_listening(service, listener),
        )
        watching = asyncio.create_task(_exit_with_engines(server, engines, supervisors))
        freeze_heap()
        sys.setswitchinterval(SWITCH_SECONDS)
        await server.serve(sockets=[listener])
        watching.cancel()
        return server.status


def _uvicorn_config(app: "ASGIApp", config: ServerConfig) -> "uvicorn.Config":
    import uvicorn

    from atomc.runtime.server.http.header_timeout import header_timeout_protocol

    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        backlog=ACCEPTED_AT_ONCE,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        http=header_timeout_protocol(config.header_timeout),
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
    )


async def _exit_with_engines(
    server: "WebServer", engines: Engines, supervisors: Sequence[Supervisor]
) -> None:
    """Ends the server when all engines have died, or when nothing restarts them because a
    supervisor failed; requests get their error for ERROR_GRACE_SECONDS before that.
    """
    try:
        await asyncio.gather(*(supervisor.run() for supervisor in supervisors))
    except Exception as error:
        log.error("the supervision of the engines failed; the server ends", exc_info=error)
    else:
        log.error("%s; the server ends", engines.dead)
    server.exit_within(CLOSE_SECONDS, status=1)
    await asyncio.sleep(ERROR_GRACE_SECONDS)
    server.begin_shutdown(0.0)


def _on_listening(service: "Service", listener: socket.socket) -> None:
    listener.listen(BACKLOG)  # asyncio has set it to the number that it accepts at once
    _log_summary(service, listener)


def _log_summary(service: "Service", listener: socket.socket) -> None:
    """Logs the model, the cache size, the settings and the address."""
    model, clients = service.model, service.engines.clients
    info = clients[0].info
    log.info("model %s: %s on %s", model.names[0], info.model, info.device)
    for client in clients:
        _log_engine(client, "" if len(clients) == 1 else f"{client.name}: ")
    if model.adapters:
        log.info("LoRA adapters: %s", ", ".join(model.adapters))
    log.info("images: %s", "yes" if service.images else f"none, {model.no_images}")
    if info.threads:
        log.info("%s", info.threads)
    stats = clients[0].stats
    log.info(
        "prefix cache: %s",
        f"none, {stats.no_prefix_cache}" if stats and stats.no_prefix_cache else "yes",
    )
    log.info(
        "chat template %s, tool calls %s, reasoning %s, defaults %s",
        "yes" if model.template else "none",
        model.tools or "none",
        model.reasoning or "none",
        dict(model.defaults) or "none",
    )
    log.info(
        "seconds to start: %s",
        ", ".join(f"{name} {seconds:.2f}" for name, seconds in info.phases.items()),
    )
    _log_address(service.config, listener)


def _log_address(config: ServerConfig, listener: socket.socket) -> None:
    """Logs where clients reach the server, and whether they need a key."""
    if not config.api_key:
        log.info("no --api-key: every client that can reach the port can use the model")
    scheme = "https" if config.ssl_certfile else "http"
    host, port = listener.getsockname()[:2]
    log.info("listening on %s://%s:%d", scheme, f"[{host}]" if ":" in host else host, port)


def _log_engine(client: EngineClient, label: str) -> None:
    """Logs the size of its cache, and its processes. label: before each line."""
    info = client.info
    log.info(
        "%scache: %d tokens, %d sequence%s of full length (%d)",
        label,
        info.kv_tokens,
        info.num_sequences,
        "s" * (info.num_sequences != 1),
        info.max_len,
    )
    if info.ranks:
        places = {0: info.place, **info.ranks}
        log.info(
            "%s%d ranks: %s",
            label,
            len(places),
            ", ".join(f"{rank} is {place}" for rank, place in places.items()),
        )
