"""`atomc serve`: an OpenAI-compatible server."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from atomc.cli.arguments import command

if TYPE_CHECKING:
    from atomc.cli.arguments import Commands

# The group of each field of EngineConfig in --help.
GROUPS = {
    "dtype": "model",
    "device": "model",
    "load_format": "model",
    "options": "model",
    "quantization": "model",
    "quantization_ignore": "model",
    "self_check": "model",
    "lora": "LoRA",
    "max_loras": "LoRA",
    "max_lora_rank": "LoRA",
    "lora_target_modules": "LoRA",
    "max_model_len": "memory and batching",
    "gpu_memory_utilization": "memory and batching",
    "kv_bytes": "memory and batching",
    "num_blocks": "memory and batching",
    "max_num_seqs": "memory and batching",
    "max_num_batched_tokens": "memory and batching",
    "max_queue": "memory and batching",
    "enable_prefix_caching": "memory and batching",
    "state_snapshots": "memory and batching",
    "scheduling_policy": "memory and batching",
    "enforce_eager": "memory and batching",
    "threads": "memory and batching",
    "tp": "several devices",
    "pp": "several devices",
    "ep": "several devices",
    "expert_placement": "several devices",
    "dp": "several devices",
    "step_timeout": "several devices",
    "image_cache_bytes": "memory and batching",
    "image_queue_bytes": "memory and batching",
    "max_image_patches": "memory and batching",
    "expert_load": "generation",
    "grammar_seconds": "generation",
    "grammar_cache_bytes": "generation",
    "speculative": "generation",
    "speculative_tokens": "generation",
    "speculative_accept": "generation",
    "ngram_min": "generation",
    "ngram_max": "generation",
    "seed": "generation",
}


def add(commands: "Commands") -> None:
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
    from atomc.runtime.config import EngineConfig
    from atomc.runtime.server.config import ServerConfig
    from atomc.runtime.server.flags import add_flags

    add_flags(parser, ServerConfig, {})
    add_flags(parser, EngineConfig, GROUPS)


def run(arguments: argparse.Namespace) -> None:
    from atomc.runtime.config import EngineConfig
    from atomc.runtime.server.config import ServerConfig
    from atomc.runtime.server.flags import read_toml, values_of

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
