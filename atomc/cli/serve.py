"""`atomc serve`: an OpenAI-compatible server."""

import argparse
from pathlib import Path

from atomc.cli.arguments import Commands, command
from atomc.runtime.config import EngineConfig
from atomc.runtime.server.config import ServerConfig
from atomc.runtime.server.flags import add_flags, read_toml, values_of

# The fields of EngineConfig in each group of --help.
FIELDS_OF_GROUP = {
    "model": (
        "dtype",
        "device",
        "load_format",
        "options",
        "quantization",
        "quantization_ignore",
        "self_check",
    ),
    "LoRA": (
        "lora",
        "max_loras",
        "max_lora_rank",
        "lora_target_modules",
    ),
    "memory and batching": (
        "max_model_len",
        "gpu_memory_utilization",
        "kv_bytes",
        "num_blocks",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_queue",
        "enable_prefix_caching",
        "state_snapshots",
        "scheduling_policy",
        "enforce_eager",
        "threads",
        "image_cache_bytes",
        "image_queue_bytes",
        "max_image_patches",
    ),
    "several devices": (
        "tp",
        "pp",
        "ep",
        "expert_placement",
        "dp",
        "step_timeout",
    ),
    "generation": (
        "expert_load",
        "grammar_seconds",
        "grammar_cache_bytes",
        "speculative",
        "speculative_tokens",
        "ngram_min",
        "ngram_max",
        "seed",
    ),
}
GROUPS = {name: group for group, names in FIELDS_OF_GROUP.items() for name in names}


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

    add_flags(parser, ServerConfig, {})
    add_flags(parser, EngineConfig, GROUPS)


def run(arguments: argparse.Namespace) -> None:

    from_file = (
        read_toml(Path(arguments.config), ServerConfig, EngineConfig) if arguments.config else {}
    )
    server = ServerConfig(**values_of(arguments, from_file, ServerConfig))
    engine = EngineConfig(**values_of(arguments, from_file, EngineConfig))
    try:
        from atomc.runtime.server.serve import serve
    except ImportError as error:
        raise ImportError(
            f"`atomc serve` needs {error.name}: pip install 'atomc[serve]'"
        ) from error
    serve(server, engine)
