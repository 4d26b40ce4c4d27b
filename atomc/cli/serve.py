"""`atomc serve`: an OpenAI-compatible server."""

import argparse
from pathlib import Path

from atomc.cli.arguments import Commands, command
from atomc.runtime.config import EngineConfig
from atomc.runtime.server.config import ServerConfig
from atomc.runtime.server.flags import add_flags, read_toml, values_of


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "serve",
        run,
        "Serve a model over HTTP with OpenAI's API.",
        "  atomc serve\n  atomc serve Qwen/Qwen3-0.6B --port 8001 --max-model-len 8192\n"
        "  atomc serve path/to/model --config server.toml --api-key-file keys",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a TOML file with the names of flags as keys; flags take precedence",
    )
    parser.usage = "atomc serve [MODEL] [flags]"

    add_flags(parser, ServerConfig)
    add_flags(parser, EngineConfig)


def run(arguments: argparse.Namespace) -> None:
    from_file = (
        read_toml(Path(arguments.config), ServerConfig, EngineConfig) if arguments.config else {}
    )
    server = ServerConfig(**values_of(arguments, from_file, ServerConfig))
    engine = EngineConfig(**values_of(arguments, from_file, EngineConfig))
    from atomc.runtime.server.serve import serve

    serve(server, engine)
