"""`atomc generate`: text from one model in this process."""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomc.cli.arguments import Commands, add_glue, command
from atomc.runtime.config import EngineConfig
from atomc.runtime.server.flags import add_flags

if TYPE_CHECKING:
    from atomc.runtime.llm import LLM
    from atomc.runtime.requests.sampling_params import SamplingParams

DEMO_PROMPT = "She looked at him and said"
# Fixed, so that the demo generates the same text each time.
DEMO_SEED = 4
MAX_TOKENS = 96
# Fields of EngineConfig that have flags.
FIELDS = ("dtype", "device", "quantization", "max_model_len", "threads", "tp", "pp", "self_check")


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "generate",
        run,
        "Generate text; print the start time by phase and a summary of the compiler's report.",
        "  atomc generate\n  atomc generate path/to/Qwen3-0.6B -p 'The capital of France is' "
        "--max-tokens 32",
    )
    parser.add_argument(
        "model",
        nargs="?",
        help="a checkpoint directory or a name on the Hugging Face hub; default: the "
        "demo model of atomc",
    )
    parser.add_argument(
        "-p",
        "--prompt",
        action="append",
        help="may be given several times; optional for the demo model",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=MAX_TOKENS,
        help="maximum new tokens (default: %(default)s)",
    )
    _add_sampling(parser)
    add_glue(parser, "auto, which is eager on a CPU: the start needs no C++ compiler")
    parser.add_argument(
        "--lora", metavar="FOLDER", help="a LoRA adapter that peft saved, for all prompts"
    )
    add_flags(parser, EngineConfig, only=FIELDS)
    parser.add_argument("-q", "--quiet", action="store_true", help="print the text only")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    sampling = "default: from the model's generation_config.json, else greedy"
    parser.add_argument("--temperature", type=float, help=f"0: greedy ({sampling})")
    parser.add_argument(
        "--top-p", type=float, help="sample from the most likely tokens with this total probability"
    )
    parser.add_argument("--top-k", type=int, help="sample from this many most likely tokens")
    parser.add_argument(
        "--seed", type=int, help="the seed of sampling (default: random; fixed for the demo model)"
    )


def run(arguments: argparse.Namespace) -> None:
    from atomc.demo import PATH
    from atomc.runtime.execution.loading.hub import local_folder, model_folder

    if arguments.model is not None and not arguments.prompt:
        local_folder(arguments.model)  # a path that is none is the first mistake
        raise ValueError("this model needs a prompt, such as -p 'The capital of France is'")
    folder = model_folder(str(arguments.model or PATH))
    if not os.path.lexists(folder / "tokenizer.json"):
        raise ValueError(f"{folder} has no tokenizer.json, which `atomc generate` needs for text")
    params = _sampling_params(arguments, folder)
    from atomc.runtime.llm import LLM  # imports torch: after the checks that need none

    adapter = None if arguments.lora is None else Path(arguments.lora).resolve().name
    settings = {name: getattr(arguments, name) for name in FIELDS if hasattr(arguments, name)}
    llm = LLM(
        folder,
        options={"glue": arguments.glue} if arguments.glue else None,
        progress=not arguments.quiet,
        lora={} if adapter is None else {adapter: arguments.lora},
        **settings,
    )
    prompts = arguments.prompt or [DEMO_PROMPT]
    _print_texts(llm, prompts, params, adapter)
    if not arguments.quiet:
        _print_figures(llm)


def _sampling_params(arguments: argparse.Namespace, folder: Path) -> "SamplingParams":
    """The flags, else the model's generation_config.json, else greedy."""
    from atomc.runtime.requests.sampling_params import SamplingParams
    from atomc.runtime.text.generation_config import do_sample, sampling_defaults

    defaults = sampling_defaults(folder)
    values: dict[str, Any] = {"temperature": 0.0}
    if do_sample(folder):
        values = {"temperature": defaults.get("temperature", 1.0)}
        values |= {name: defaults[name] for name in ("top_p", "top_k") if name in defaults}
    flags = {name: getattr(arguments, name) for name in ("temperature", "top_p", "top_k")}
    values |= {name: value for name, value in flags.items() if value is not None}
    seed = DEMO_SEED if arguments.seed is None and arguments.model is None else arguments.seed
    return SamplingParams(max_tokens=arguments.max_tokens, seed=seed, **values)


def _print_texts(
    llm: "LLM", prompts: Sequence[str], params: "SamplingParams", lora: str | None
) -> None:
    """Stream one prompt; batch several and print them at the end. Raises RequestFailed, after the
    texts, if a prompt failed.
    """
    from atomc.runtime.requests.request_errors import RequestFailed

    if len(prompts) == 1:
        pieces = llm.stream(prompts[0], params, lora=lora)
        print(prompts[0], end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
        return
    completions = llm.generate(list(prompts), params, lora=lora)
    print(
        "\n\n".join(
            prompt + completion.text
            for prompt, completion in zip(prompts, completions, strict=True)
        )
    )
    errors = [completion.error for completion in completions if completion.error]
    if errors:
        raise RequestFailed(errors[0])


def _print_figures(llm: "LLM") -> None:
    from atomc.report.render.text import summary

    report = llm.program.report
    print(f"\n{llm.tokens_per_second:.1f} tokens/s\nseconds to start: {_seconds(llm.phases)}")
    print(f"of these to compile: {_seconds(report.phases)}\n{summary(report)}")


def _seconds(phases: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())
