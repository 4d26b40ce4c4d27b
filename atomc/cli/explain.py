"""`atomc explain`: reports what the compiler does to a model, without loading its weights."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from atomc.cli import planning
from atomc.cli.arguments import (
    RUNTIME,
    Commands,
    add_dump,
    add_number,
    add_quantization,
    add_switch,
    command,
)
from atomc.files.file_of_flag import check_folder_of, file_of_flag
from atomc.runtime.config import DTYPES, SCHEMES
from atomc.runtime.server.flags import named_value

if TYPE_CHECKING:
    from torch.fx.node import Argument

    from atomc.report.report import Report


class ModelCall(NamedTuple):
    """A model, usually a module, and its inputs; without inputs, they are generated."""

    model: "Callable[..., Argument]"
    args: "tuple[Argument, ...]"
    kwargs: "Mapping[str, Argument]"


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "explain",
        run,
        "Report what the compiler does to a model: rewrites, near misses, kernels. Loads no "
        "weights and runs nothing.",
        "  atomc explain\n  atomc explain path/to/Qwen3-0.6B --runtime\n"
        "  atomc explain path/to/Qwen3-0.6B --why qk_norm_rope --module-path layers.3\n"
        "  atomc explain path/to/Qwen3-8B --platform gfx950 --quantization fp8 --tp 8 "
        "--sequences 64\n"
        "  atomc explain my_package.my_module:build_model --dump graphs\n"
        "  atomc explain path/to/Qwen3-0.6B --html out.html\n"
        "  atomc explain path/to/Qwen3-0.6B --beside path/to/Llama-3.2-1B\n"
        "  atomc explain path/to/Qwen3-0.6B --save base.json     # once, then in CI:\n"
        "  atomc explain path/to/Qwen3-0.6B --check base.json    # exit code 1 if a rewrite or "
        "kernel changed",
    )
    parser.add_argument(
        "model",
        nargs="?",
        help="a directory with config.json, a name on the Hugging Face hub, or "
        "package.module:function or file.py:function, which returns a module, (module, args) or "
        "(module, args, kwargs); default: the demo model",
    )
    _add_compile(parser)
    _add_outputs(parser)
    planning.add(parser)


def _add_compile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--why", metavar="REWRITE", help="only report why this rewrite fired or did not"
    )
    parser.add_argument(
        "--module-path",
        metavar="PATH",
        help="with --why: only below this module, such as layers.3.mlp",
    )
    parser.add_argument(
        "--options",
        action="append",
        type=named_value,
        metavar="NAME=VALUE",
        help="an option of the compiler (docs/options.md), such as rounding=hf; may be repeated",
    )
    add_dump(parser)
    add_number(parser, "--layers", "only the first N layers of a config.json")
    parser.add_argument(
        "--dtype",
        choices=(*DTYPES, *SCHEMES),
        metavar="DTYPE",
        help="of the weights of a config.json: "
        f"{', '.join(DTYPES)}, or a quantization scheme; default: the config's",
    )
    add_quantization(parser, "quantize the weights of a config.json")
    parser.add_argument(
        "--platform", metavar="NAME", help="compile for another machine, such as gfx950 or sm90"
    )
    add_switch(parser, "--dynamic", "dynamic shapes, as torch.compile(dynamic=True)")
    add_switch(parser, "--runtime", RUNTIME)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    add_switch(parser, "--json", "the report as JSON, a list with one object per graph")
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="the report as a self-contained HTML page; compiled for any number "
        "of tokens, so that costs are formulas",
    )
    parser.add_argument(
        "--beside",
        metavar="MODEL",
        help="compare with another model, or with a file that --json or --save "
        "wrote, such as with another version",
    )
    parser.add_argument("--save", metavar="FILE", help="save what --json prints")
    parser.add_argument(
        "--check",
        metavar="FILE",
        help="compare the count of each rewrite and the kernel of each op with a file that --save "
        "or --json wrote; if one changed, print the differences with reasons and exit with code 1",
    )


def run(arguments: argparse.Namespace) -> int:
    from atomc.options import Options
    from atomc.report import contract

    if arguments.module_path and not arguments.why:
        raise ValueError("--module-path needs --why: set both")
    if planning.is_requested(arguments):
        return planning.run(arguments)
    _check_outputs(arguments)
    Options.of(_options(arguments))  # a wrong one fails before a model is made
    saved = _read_reports("--check", arguments.check) if arguments.check else None
    other = _read_beside(arguments.beside)
    reports = _reports_of(arguments, arguments.model)
    if arguments.beside and other is None:
        other = _reports_of(arguments, arguments.beside)
    if arguments.save:
        Path(arguments.save).write_text(_json(reports) + "\n")
    if arguments.html:
        _write_page(arguments, reports, other)
    if saved is not None:
        changes = contract.differences(saved, reports)
        print("\n".join(changes) if changes else f"as saved in {arguments.check}")
        return 1 if changes else 0
    if not arguments.html:
        _print(arguments, reports, other)
    return 0


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Raises ValueError or OSError for what cannot be written, before anything is compiled."""
    if arguments.json and arguments.html:
        raise ValueError("--json prints the report and --html writes a page: leave one of them out")
    for flag in ("html", "save"):
        check_folder_of(f"--{flag}", getattr(arguments, flag))


def _read_beside(beside: str | None) -> "list[Report] | None":
    """The reports of a file; None for a model. Raises FileNotFoundError for neither."""
    from atomc.runtime.execution.loading.hub import local_folder

    if beside is None:
        return None
    if beside.endswith(".json") and Path(beside).is_file():
        return _read_reports("--beside", beside)
    if ":" not in beside:  # of a function
        local_folder(beside)
    return None


def _reports_of(arguments: argparse.Namespace, model: str | None) -> "list[Report]":
    """The reports of one model, one per graph."""
    from atomc.report.report import reports

    earlier = {id(report) for report in reports()}
    with contextlib.redirect_stdout(sys.stderr):  # keep the model's own output out of the report
        call = _model(arguments, model)  # whose module may register passes
        if arguments.why:
            _check_rewrite(arguments.why)
        _compile(arguments, call)
        if arguments.dump:
            print(f"{arguments.dump}: one folder per graph; each file runs", file=sys.stderr)
    return [report for report in reports() if id(report) not in earlier]


def _check_rewrite(name: str) -> None:
    """Raises ValueError for a name that is neither a rewrite nor an op."""
    from atomc.compiler.pipeline import insert_registered
    from atomc.errors import suggestion
    from atomc.ops import REGISTRY
    from atomc.passes import LIFT, PIPELINE

    names = {
        rewrite
        for p in (LIFT, *insert_registered(PIPELINE))
        if not p.cleanup
        for rewrite in (p.name, *p.lifts)
    }
    if name not in names and name not in REGISTRY:
        raise ValueError(
            f"--why: no rewrite {name!r}{suggestion(name, names)}; rewrites are "
            f"{', '.join(sorted(names))}"
        )


def _print(
    arguments: argparse.Namespace, reports: "Sequence[Report]", other: "Sequence[Report] | None"
) -> None:
    if arguments.why:
        texts = [report.why(arguments.why, arguments.module_path) for report in reports]
    elif arguments.json:
        texts = [_json(reports)]
    elif other is not None:
        from atomc.report.render.compare import comparison_text

        texts = [comparison_text(reports, other, _names(arguments))]
    else:
        texts = [report.to_text() for report in reports]
    many = len(texts) > 1
    for number, text in enumerate(texts):
        print(f"graph {number}: {text}" if many else text.rstrip())


def _write_page(
    arguments: argparse.Namespace, reports: "Sequence[Report]", other: "Sequence[Report] | None"
) -> None:
    from atomc.files.atomic_file import write_atomically
    from atomc.report.render.html import page

    if not arguments.platform:
        _measure_bandwidth(reports)
    text = page(reports, other, _names(arguments)) if other is not None else page(reports)
    write_atomically(Path(arguments.html), text.encode())
    print(f"{arguments.html}: {len(text) / 1e6:.1f} MB, open it in a browser", file=sys.stderr)


def _measure_bandwidth(reports: "Sequence[Report]") -> None:
    """Measure this machine's bandwidth if it is not known, so that the page can show times."""
    import torch

    from atomc.planning.measure import copy_bandwidth

    unknown = [report for report in reports if report.machine and not report.machine["bandwidth"]]
    if unknown:
        speed = copy_bandwidth(torch.device(unknown[0].machine["device"]))
        for report in unknown:
            report.machine |= {"bandwidth": speed, "measured": True}


def _names(arguments: argparse.Namespace) -> tuple[str, str]:
    """The names of the two compared models."""
    models = (
        "the demo model" if arguments.model is None else str(arguments.model),
        str(arguments.beside),
    )
    # "." has no name of its own.
    first, second = (Path(name).name or Path(name).resolve().name or name for name in models)
    return (first, second) if first != second else models


def _json(reports: "Sequence[Report]") -> str:
    return json.dumps([report.to_dict() for report in reports], indent=1, default=str)


def _read_reports(flag: str, file: str) -> "list[Report]":
    """Reads a file written by --json or --save. Raises ValueError for other content."""
    from atomc.report.report import Report

    with file_of_flag(flag, file):
        text = Path(file).read_text()
    try:
        loaded = json.loads(text)
        return [Report.of(data) for data in (loaded if isinstance(loaded, list) else [loaded])]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{flag} {file}: {error}") from error


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    dump = {"dump": arguments.dump} if arguments.dump else {}
    return {**dict(arguments.options or ()), **dump}


def _compile(arguments: argparse.Namespace, call: ModelCall) -> None:
    from torch import nn

    from atomc.compiler.explain import NothingToExplain, explain
    from atomc.platform import Platform
    from atomc.program import compile_model

    options = _options(arguments)
    platform: Platform | None = Platform.named(arguments.platform) if arguments.platform else None
    if arguments.runtime:
        if not isinstance(call.model, nn.Module):
            raise ValueError(f"--runtime: {arguments.model} is not a module")
        # Nothing runs, so Inductor need not compile anything.
        compile_model(
            call.model,
            options={**options, "glue": "eager"},
            platform=platform,
            keep_texts=bool(arguments.html),
            owned=next(call.model.parameters()).is_meta,  # of a directory: as LLM(path) holds it
        )
        return
    try:
        dynamic = arguments.dynamic or bool(arguments.html) or None
        explain(
            call.model,
            *call.args,
            options=options,
            platform=platform,
            dynamic=dynamic,
            **call.kwargs,
        )
    except NothingToExplain as error:
        raise ValueError(f"{error}; the function can return (module, args)") from error


def _model(arguments: argparse.Namespace, name: str | None) -> ModelCall:
    if name is not None and ":" in name and not Path(name).exists():
        if arguments.quantization:
            raise ValueError(
                f"--quantization needs a config.json; call atomc.quantize(model, "
                f"{arguments.quantization!r}) in {name} instead"
            )
        for flag in ("layers", "dtype"):
            if getattr(arguments, flag) is not None:
                raise ValueError(
                    f"--{flag} needs a config.json; {name} is a function, which can return a "
                    "smaller model, or one of another dtype"
                )
        return load_function(name)
    from atomc.demo import PATH
    from atomc.runtime.execution.loading.hub import model_folder

    folder = model_folder(str(name or PATH), weights=False)
    return ModelCall(planning.model_of(folder, arguments).module, (), {})


def load_function(name: str) -> ModelCall:
    """The result of package.module:function or file.py:function. Raises ValueError if the function
    does not exist or returns another type.
    """
    module_name, _, function_name = name.rpartition(":")
    folder = Path.cwd()
    if module_name.endswith(".py"):
        file = folder / module_name
        if not file.is_file():
            raise ValueError(f"{name}: there is no file {module_name!r}")
        folder, module_name = file.parent, file.stem
    sys.path.insert(0, str(folder))
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"{name}: module {error.name!r} is not in the current directory or on the path"
        ) from error
    finally:
        sys.path.pop(0)
    function = getattr(module, function_name, None)
    if not callable(function):
        named = [
            key
            for key, value in vars(module).items()
            if getattr(value, "__module__", "") == module_name
        ]
        raise ValueError(
            f"{name}: {module_name} has no function {function_name!r}; it has "
            f"{', '.join(named) or 'none'}"
        )
    match function():
        case (model, tuple() | list() as args, dict() as kwargs) if callable(model):
            return ModelCall(model, tuple(args), kwargs)
        case (model, tuple() | list() as args) if callable(model):
            return ModelCall(model, tuple(args), {})
        case model if callable(model):
            return ModelCall(model, (), {})
        case other:
            raise ValueError(
                f"{name} returned {type(other).__name__}, expected a module, (module, args) or "
                "(module, args, kwargs)"
            )
