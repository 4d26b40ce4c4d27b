"""`atomc run-batch`: answers the requests of an OpenAI batch file."""

import argparse
import asyncio
import os
import sys
from pathlib import Path

from atomc.cli.arguments import Commands, command
from atomc.files.file_of_flag import file_of_flag
from atomc.options import torchrun_place
from atomc.runtime.config import EngineConfig
from atomc.runtime.server.config import ServerConfig
from atomc.runtime.server.flags import add_flags, values_of

# Fields of ServerConfig that are neither about HTTP nor about running for a long time.
FIELDS = (
    "served_model_name",
    "generation_config",
    "max_logprobs",
    "ray",
    "chat_template",
    "tool_call_parser",
    "reasoning_parser",
    "additional_properties",
    "strict_requests",
    "allowed_local_media_path",
    "allowed_media_domains",
    "limit_images",
)


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "run-batch",
        run,
        "Answer the requests of a file in OpenAI's batch format.",
        "  atomc run-batch -i requests.jsonl -o responses.jsonl\n"
        "  atomc run-batch -i requests.jsonl -o responses.jsonl Qwen/Qwen3-0.6B --max-num-seqs 64",
    )
    for flag, text in (
        ("input", "the requests, one JSON object per line"),
        ("output", "gets the responses, one per line, in the order in which they are complete"),
    ):
        parser.add_argument(
            f"-{flag[0]}", f"--{flag}-file", dest=flag, required=True, metavar="FILE", help=text
        )
    parser.usage = "atomc run-batch -i FILE -o FILE [MODEL] [flags]"

    add_flags(parser, ServerConfig, only=FIELDS)
    add_flags(parser, EngineConfig)


def run(arguments: argparse.Namespace) -> None:
    server = ServerConfig(**values_of(arguments, {}, ServerConfig), log_requests=False)
    engine = EngineConfig(**values_of(arguments, {}, EngineConfig))
    source, target = Path(arguments.input), Path(arguments.output)
    _check_files(source, target)
    if torchrun_place() is not None:
        raise ValueError(
            "torchrun starts several processes, and each would answer all requests: start one "
            "`atomc run-batch`, for several hosts with --ray"
        )
    from atomc.runtime.server.engines.client import EngineFailed
    from atomc.runtime.server.engines.start_engines import start_engines
    from atomc.runtime.server.openai.run_batch import run_batch
    from atomc.runtime.server.serve import model_folder_and_name

    folder, name = model_folder_and_name(engine)
    processes = start_engines(engine, folder, on_ray=server.ray)
    try:
        total, failed = asyncio.run(run_batch(server, processes, folder, name, source, target))
    except EngineFailed as error:
        if error.by_user:
            raise ValueError(str(error)) from error
        print(f"atomc: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    finally:
        for process in processes:
            process.close()
    print(f"{total - failed} of {total} requests answered, {failed} failed: {target}")


def _check_files(source: Path, target: Path) -> None:
    """Raises OSError or ValueError for files that cannot be read or written, before the start."""
    if source.exists() and not source.is_file():
        raise ValueError(f"-i {source} is no regular file, and is read twice: copy a pipe to one")
    with file_of_flag("-i", source), source.open("rb"):
        pass
    if target.exists() and os.path.samefile(source, target):
        raise ValueError(f"-i and -o are the same file, {source}: choose another for the responses")
    with file_of_flag("-o", target), target.open("ab"):
        pass
