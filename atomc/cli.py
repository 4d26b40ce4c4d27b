"""The command line: `atomc generate`, `atomc explain`, `atomc doctor`.

Nothing heavy is imported before a command runs. What a user can cause ends as one line on stderr, with exit code 2.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch

    from atomc.platform import Platform
    from atomc.runtime.llm import LLM
    from atomc.runtime.request import SamplingParams

DEMO_PROMPT = "She looked at him and said"
# So that the demo writes the same text each time.
DEMO_SEED = 4
MAX_TOKENS = 96
DTYPES = ("float32", "bfloat16", "float16")
GLUES = ("eager", "inductor", "auto")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as in `atomc explain | head`; Python flushes once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:  # only what a user can cause becomes one line, see _users_error
        told = _users_error(error)
        if told is None:
            raise
        print(f"atomc: {' '.join(str(told).split())}", file=sys.stderr)
        return 2
    return 0


def _users_error(error: BaseException) -> BaseException | None:
    """The error if a user can cause it; Dynamo wraps what is raised while it traces."""
    from atomc.errors import RunError

    inner = getattr(error, "inner_exception", None)
    if inner is not None:
        return _users_error(inner)
    if isinstance(error.__cause__, ValueError) and type(error).__name__ == "PassError":
        return error
    return error if isinstance(error, ValueError | OSError | ImportError | RunError) else None


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        print(f"atomc: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    version = import_module("atomc").__version__
    parser = _Parser("atomc", description="A torch.compile backend for language models that explains what it does.")
    parser.add_argument("--version", action="version", version=f"atomc {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="generate | explain | doctor")
    for add in (_add_generate, _add_explain, _add_doctor):
        add(commands)
    return parser


def _command(commands: Any, name: str, run: Any, text: str, examples: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.set_defaults(run=run)
    return parser


# generate


def _add_generate(commands: Any) -> None:
    parser = _command(
        commands, "generate", _generate, "Generate text, and say how long each part took and what the compiler did.",
        "  atomc generate\n  atomc generate path/to/Qwen3-0.6B -p 'The capital of France is' --max-tokens 32",
    )  # fmt: skip
    parser.add_argument("model", nargs="?", help="a checkpoint directory; left out: the small model that comes with atomc")
    parser.add_argument("-p", "--prompt", action="append", help="may be given several times; the demo has one of its own")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="new tokens, at most (default: %(default)s)")
    sampling = "default: as generation_config.json of the model says, else greedy"
    parser.add_argument("--temperature", type=float, help=f"0 takes the likeliest token ({sampling})")
    parser.add_argument("--top-p", type=float, help="draw from the likeliest tokens that have this probability together")
    parser.add_argument("--top-k", type=int, help="draw from this many of the likeliest tokens")
    parser.add_argument("--seed", type=int, help="the same seed draws the same tokens (default: a fixed one for the demo)")
    parser.add_argument("--dtype", choices=DTYPES, help="default: as the checkpoint says")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--glue", choices=GLUES, help="what runs the ops without a kernel; default: eager on a CPU, so "
                        "that nobody waits for a C++ compiler, else auto")  # fmt: skip
    parser.add_argument("--max-model-len", type=int, metavar="N", help="tokens of the longest sequence")
    parser.add_argument("-q", "--quiet", action="store_true", help="print the text only")


def _generate(arguments: argparse.Namespace) -> None:
    from atomc.demo import PATH
    from atomc.runtime.llm import LLM

    if arguments.model is not None and not arguments.prompt:
        raise ValueError("give a prompt for this model: -p 'The capital of France is'")
    folder = Path(arguments.model or PATH)
    params = _sampling(arguments, folder)
    llm = LLM(
        folder, dtype=_dtype(arguments.dtype), device=arguments.device, max_model_len=arguments.max_model_len,
        options={"glue": arguments.glue or _default_glue(arguments.device)}, progress=not arguments.quiet,
    )  # fmt: skip
    prompts = arguments.prompt or [DEMO_PROMPT]
    _print_texts(llm, prompts, params)
    if not arguments.quiet:
        _print_figures(llm)


def _sampling(arguments: argparse.Namespace, folder: Path) -> "SamplingParams":
    """What the flags say, else the model's generation_config.json."""
    from atomc.models.loader import read_json
    from atomc.runtime.request import SamplingParams

    file = folder / "generation_config.json"
    config = read_json(file) if file.is_file() else {}
    given: dict[str, Any] = {"temperature": 0.0}
    if config.get("do_sample"):
        given = {"temperature": config.get("temperature", 1.0)}
        given |= {name: config[name] for name in ("top_p", "top_k") if config.get(name) is not None}
    flags = {name: getattr(arguments, name) for name in ("temperature", "top_p", "top_k")}
    given |= {name: value for name, value in flags.items() if value is not None}
    seed = DEMO_SEED if arguments.seed is None and arguments.model is None else arguments.seed
    return SamplingParams(max_tokens=arguments.max_tokens, seed=seed, **given)


def _default_glue(device: str | None) -> str:
    import torch

    return "auto" if device != "cpu" and torch.cuda.is_available() else "eager"


def _print_texts(llm: "LLM", prompts: Sequence[str], params: "SamplingParams") -> None:
    """One prompt as it streams; several are computed together and printed when all are done."""
    if len(prompts) == 1:
        pieces = llm.stream(prompts[0], params)
        print(prompts[0], end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
        return
    completions = llm.generate(list(prompts), params)
    print("\n\n".join(prompt + completion.text for prompt, completion in zip(prompts, completions, strict=True)))


def _print_figures(llm: "LLM") -> None:
    from atomc.render.text import summary

    report = llm.program.report
    print(f"\n{llm.tokens_per_second:.1f} tokens/s\nseconds to start: {_seconds(llm.phases)}")
    print(f"of these to compile: {_seconds(report.phases)}\n{summary(report)}")


def _seconds(phases: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())


# explain


def _add_explain(commands: Any) -> None:
    parser = _command(
        commands, "explain", _explain,
        "Say what the compiler does to a model: rewrites, near misses, kernels. Loads no weights and runs nothing.",
        "  atomc explain\n  atomc explain path/to/Qwen3-0.6B --runtime\n"
        "  atomc explain path/to/Qwen3-0.6B --why qk_norm_rope --module-path layers.3\n"
        "  atomc explain my_package.my_module:build_model --dump graphs",
    )  # fmt: skip
    parser.add_argument("model", nargs="?", help="a directory with config.json; or package.module:function, which "
                        "returns a module, (module, args) or (module, args, kwargs); left out: the demo model")  # fmt: skip
    parser.add_argument("--why", metavar="REWRITE", help="only say why this rewrite fired or did not")
    parser.add_argument("--module-path", metavar="PATH", help="with --why: only below this module, such as layers.3.mlp")
    parser.add_argument("--dump", metavar="DIR", help="write one runnable file per pass that changed the graph")
    parser.add_argument("--layers", type=int, metavar="N", help="only the first N layers of a config.json")
    parser.add_argument("--dtype", choices=DTYPES, help="of a config.json; default: what it says")
    parser.add_argument("--platform", metavar="NAME", help="a machine that need not be here, such as gfx950 or sm90")
    parser.add_argument("--dynamic", action="store_true", help="compile for any sizes, as torch.compile(dynamic=True)")
    parser.add_argument("--runtime", action="store_true", help="as `atomc generate` compiles it: with a paged cache")
    parser.add_argument("--json", action="store_true", help="everything as JSON, a list with one object per graph")


def _explain(arguments: argparse.Namespace) -> None:
    from atomc.report import reports

    if arguments.module_path and not arguments.why:
        raise ValueError("--module-path narrows --why: give both")
    earlier = {id(report) for report in reports()}
    with contextlib.redirect_stdout(sys.stderr):  # what the model prints is no part of the report
        _compile(arguments, *_model(arguments))
    found = [report for report in reports() if id(report) not in earlier]
    if arguments.why:
        texts = [report.why(arguments.why, arguments.module_path) for report in found]
    elif arguments.json:
        texts = [json.dumps([report.to_dict() for report in found], indent=1, default=str)]
    else:
        texts = [report.to_text() for report in found]
    many = len(texts) > 1
    for number, text in enumerate(texts):
        print(f"graph {number}: {text}" if many else text.rstrip())


def _compile(arguments: argparse.Namespace, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    from atomc.inspection import explain
    from atomc.platform import Platform
    from atomc.program import compile_model

    options = {"dump": arguments.dump} if arguments.dump else {}
    platform: Platform | None = Platform.named(arguments.platform) if arguments.platform else None
    if arguments.runtime:
        # Nothing is to run here, so that nothing needs to be compiled by Inductor.
        compile_model(model, options={**options, "glue": "eager"}, platform=platform)
        return
    try:
        explain(model, *args, options=options, platform=platform, dynamic=arguments.dynamic or None, **kwargs)
    except TypeError as error:
        if not str(error).startswith("explain: "):
            raise
        raise ValueError(f"{error}; the function can return (module, args)") from error


def _model(arguments: argparse.Namespace) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The model to explain and what to call it with; nothing, if token ids can be made up."""
    name = arguments.model
    if name is not None and ":" in name and not Path(name).exists():
        return _built_by(name)
    from atomc.demo import PATH

    return _on_meta(Path(name or PATH), arguments), (), {}


def _on_meta(folder: Path, arguments: argparse.Namespace) -> Any:
    """The model of a config.json without weights."""
    from atomc import models
    from atomc.models import loader

    config = loader.load_config(folder)
    if arguments.layers is not None:
        if not 1 <= arguments.layers <= config.get("num_hidden_layers", arguments.layers):
            raise ValueError(f"--layers {arguments.layers}: the model has {config['num_hidden_layers']}")
        config["num_hidden_layers"] = arguments.layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][: arguments.layers]
    dtype = _dtype(arguments.dtype) or loader.config_dtype(config)
    return loader.ready(models.build(config, dtype=dtype, device="meta"))


def _built_by(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Calls package.module:function. Raises ValueError if there is none, or if it returns something else."""
    module_name, _, function_name = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"{name}: there is no module {error.name!r} here or on the path") from error
    finally:
        sys.path.pop(0)
    function = getattr(module, function_name, None)
    if not callable(function):
        named = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
        raise ValueError(f"{name}: {module_name} has no function {function_name!r}; it has {', '.join(named) or 'none'}")
    match function():
        case (model, tuple() | list() as args, dict() as kwargs) if callable(model):
            return model, tuple(args), kwargs
        case (model, tuple() | list() as args) if callable(model):
            return model, tuple(args), {}
        case model if callable(model):
            return model, (), {}
        case other:
            raise ValueError(f"{name} returned {type(other).__name__}, expected a module, (module, args) or "
                             "(module, args, kwargs)")  # fmt: skip


def _dtype(name: str | None) -> "torch.dtype | None":
    import torch

    return getattr(torch, name) if name else None


# doctor


def _add_doctor(commands: Any) -> None:
    _command(commands, "doctor", _doctor, "Say what machine this is, and which libraries and kernels can be had here.",
             "  atomc doctor")  # fmt: skip


def _doctor(arguments: argparse.Namespace) -> None:
    import torch

    from atomc import kernels
    from atomc.op import REGISTRY
    from atomc.options import Options
    from atomc.pieces import glue_of
    from atomc.platform import Platform, provider_versions, torch_status
    from atomc.render.text import table

    version = import_module("atomc").__version__
    python = ".".join(map(str, sys.version_info[:3]))
    print(f"atomc {version}, torch {torch.__version__} ({torch_status()} with it), Python {python}\n")
    here = Platform.detect()
    how, why = glue_of(Options(), here)
    print(table(("machine", ""), [*_machine(here), ("glue", f"{how}: {why}")]) + "\n")
    rows = [(name, library.version or "yes" if library.found else "-", library.reason or "")
            for name, library in provider_versions().items()]  # fmt: skip
    print(table(("library", "found", "why not"), rows) + "\n")
    missing = {provider: kernels.load(provider) for provider in kernels.PROVIDERS}
    counts = {provider: sum(kernel.provider == provider for op in REGISTRY.values() for kernel in op.kernels)
              for provider in missing}  # fmt: skip
    found = [(provider, str(counts[provider]), reason or "") for provider, reason in missing.items()]
    print(table(("kernels", "number", "why not"), found, numbers=[1]))


def _machine(here: "Platform") -> list[tuple[str, str]]:
    units = "cores" if here.is_cpu else "multiprocessors"
    rows = [("platform", f"{here.kind} {here.arch}, {here.name}"),
            ("size", f"{here.num_sms} {units}, {here.memory / 2**30:.1f} GiB"),
            ("bf16", "in hardware" if here.supports_bf16 else "slower than fp32: not in hardware")]  # fmt: skip
    return [*rows, ("flags", " ".join(sorted(here.cpu_flags)))] if here.cpu_flags else rows
