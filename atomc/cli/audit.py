"""`atomc audit`: measures the error of each rewritten site, and finds the cause of a difference."""

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomc.cli.arguments import (
    RUNTIME,
    Commands,
    add_dump,
    add_glue,
    add_number,
    add_quantization,
    add_switch,
    command,
    default_glue,
    dtype_named,
)
from atomc.cli.explain import ModelCall, load_function
from atomc.files.file_of_flag import check_folder_of, file_of_flag
from atomc.files.json_types import JSONLike
from atomc.runtime.config import DTYPES

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor, nn
    from torch.fx.node import Argument

    from atomc.report.audit_findings import AuditFindings, Passes
    from atomc.report.report import Report

TOKENS = 64
PROMPT = (
    "She looked at him and said that it was a truth universally acknowledged. He answered: 17 "
    "times 3 is 51, and no more of it. In the beginning was the word, and the word was long; so "
    "they went on, one by one."
)
ORDERS = ("sqnr", "max", "relative")
# If the difference without a rewrite is more than this part of the difference with it, the option
# had no effect: the model itself calls the op.
UNCHANGED = 0.9


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "audit",
        run,
        "Run a model with each rewritten site next to its original nodes in fp32: rank the "
        "sites by error, and find the "
        "rewrite that causes a difference. Exit code 1 if the outputs are too far from fp32.",
        "  atomc audit\n  atomc audit path/to/Qwen3-0.6B --prompts prompts.txt --dtype bfloat16\n"
        "  atomc audit path/to/Qwen3-0.6B --runtime --bound 0.01 --write-options without.toml\n"
        "  atomc audit my_package.my_module:build_model --options without.toml\n"
        "  atomc audit --dump graphs --record",
    )
    parser.add_argument(
        "model",
        nargs="?",
        help="a checkpoint directory, a name on the Hugging Face hub, or "
        "package.module:function, which returns a module, (module, args) or (module, args, "
        "kwargs); default: the demo model",
    )
    _add_input(parser)
    parser.add_argument(
        "--by", choices=ORDERS, default="sqnr", help="the order of the sites (default: %(default)s)"
    )
    add_number(parser, "--rows", "number of sites shown", default=20)
    _add_compile(parser)
    add_switch(parser, "--json", "the report as JSON")


def _add_input(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-p", "--prompt", action="append", help="the input; may be given several times"
    )
    parser.add_argument("--prompts", metavar="FILE", help="the input, from a text file")
    add_number(parser, "--tokens", "maximum length", default=TOKENS)
    add_switch(parser, "--runtime", RUNTIME)
    add_number(
        parser,
        "--bound",
        "maximum distance of the outputs from fp32, relative to "
        "the largest value; default: twice that of the original model",
        kind=float,
    )


def _add_compile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--options", metavar="FILE", help="TOML with a table [options], for the compiler"
    )
    parser.add_argument(
        "--write-options",
        metavar="FILE",
        help="disable the rewrite that causes the difference, audit "
        "again, and write options for --options, `atomc serve --config` and ATOMC_OPTIONS",
    )
    add_dump(parser)
    add_switch(parser, "--record", "with --dump: also store inputs, weights and outputs")
    add_quantization(parser, "quantize a checkpoint when it is read")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        metavar="DTYPE",
        help=f"{', '.join(DTYPES)}; default, and auto: the checkpoint's",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    add_glue(parser, "eager on a CPU")


@dataclass(frozen=True)
class AuditResult:
    """The result of one compile and one call. eager: error against the uncompiled model, relative
    to its largest value.
    """

    reports: "list[Report]"
    eager: float


def run(arguments: argparse.Namespace) -> int:
    from atomc.errors import OptionsError
    from atomc.options import Options, read_options

    if arguments.tokens < 1:
        raise ValueError(f"--tokens {arguments.tokens}: expected at least 1")
    check_folder_of("--write-options", arguments.write_options)
    try:
        file_options = read_options(Path(arguments.options)) if arguments.options else {}
    except OptionsError as error:
        raise OptionsError(f"--options: {error}") from error
    flag_options: dict[str, JSONLike] = {
        "glue": arguments.glue or file_options.get("glue") or default_glue(arguments.device),
        "audit": True,
        "audit_bound": arguments.bound,
    }
    if arguments.dump:
        flag_options |= {"dump": arguments.dump, "record": arguments.record}
    elif arguments.record:
        raise ValueError("--record needs --dump DIR: set both")
    Options.of({**file_options, **flag_options})
    with contextlib.redirect_stdout(sys.stderr):  # keep the model's own output out of the report
        audited = _model(arguments)
        first = _run_audit(audited, {**file_options, **flag_options}, runtime=arguments.runtime)
        again = {name: flag_options[name] for name in ("glue", "audit", "audit_bound")}
        written = (
            _disable_cause(
                first,
                file_options,
                lambda options: _run_audit(
                    audited, {**options, **again}, runtime=arguments.runtime
                ),
            )
            if arguments.write_options
            else None
        )
    if written is not None and written.options is not None:
        from atomc.options import written_options

        Path(arguments.write_options).write_text(written_options(written.options))
    _print(arguments, first, written)
    return int(any("blame" in report.audit for report in first.reports))


# The model and its inputs


def _model(arguments: argparse.Namespace) -> ModelCall:
    name = arguments.model
    if name is not None and ":" in name and not Path(name).exists():
        return _load_function_model(name, arguments)
    from atomc.demo import PATH
    from atomc.loading import loader
    from atomc.runtime.execution.loading.hub import model_folder
    from atomc.runtime.execution.loading.load import present_device
    from atomc.runtime.text.detokenizer import load_tokenizer

    device = present_device(arguments.device)
    folder = model_folder(str(name or PATH))
    model = loader.load(
        folder,
        dtype=dtype_named(arguments.dtype),
        device=device,
        quantization=arguments.quantization,
    )
    inputs = _ids_and_positions(model, load_tokenizer(folder), arguments, device)
    return ModelCall(model, inputs, {})


def _load_function_model(name: str, arguments: argparse.Namespace) -> ModelCall:
    """The model of a function and its inputs; by default `explain`'s, with random token ids."""
    import torch

    from atomc.compiler.explain import NothingToExplain, example_inputs

    if arguments.prompt or arguments.prompts or arguments.quantization:
        raise ValueError(
            "--prompt, --prompts and --quantization need a checkpoint; return (module, args) "
            f"from {name}"
        )
    call = load_function(name)
    if isinstance(call.model, torch.nn.Module):
        call.model.requires_grad_(False)
    if call.args or call.kwargs:
        return call
    try:
        args, kwargs = example_inputs(call.model, asked="audit")
    except NothingToExplain as error:
        raise ValueError(f"{error}; the function can return (module, args)") from error
    kwargs["input_ids"] = _random_ids(call.model, kwargs["input_ids"])
    return ModelCall(call.model, args, kwargs)


def _ids_and_positions(
    model: "nn.Module", tokenizer: "Tokenizer | None", arguments: argparse.Namespace, device: str
) -> "tuple[Tensor, Tensor]":
    import torch

    from atomc.runtime.text.detokenizer import encode

    prompts = list(arguments.prompt or [])
    if arguments.prompts:
        with file_of_flag("--prompts", arguments.prompts):
            prompts.append(Path(arguments.prompts).read_text(encoding="utf-8"))
    if prompts and tokenizer is None:
        raise ValueError(
            "the checkpoint has no tokenizer.json for the prompt: leave the prompt out to use "
            "random tokens"
        )
    if tokenizer is None:
        ids = _random_ids(model, torch.zeros(arguments.tokens, dtype=torch.int64, device=device))
    else:
        tokens = encode(tokenizer, "\n".join(prompts or [PROMPT]))[: arguments.tokens]
        ids = torch.tensor(tokens, device=device)
    if not len(ids):
        raise ValueError("the prompt is empty")
    return ids, torch.arange(len(ids), device=device)


def _random_ids(model: "Callable[..., Argument]", like: "Tensor") -> "Tensor":
    import torch

    config = getattr(model, "config", None)
    vocab_size = getattr(config, "vocab_size", None) or getattr(
        getattr(config, "text_config", None), "vocab_size", None
    )
    generator = torch.Generator().manual_seed(0)
    return torch.randint(int(vocab_size or 64), like.shape, generator=generator).to(like.device)


# One audit


def _run_audit(call: ModelCall, options: Mapping[str, JSONLike], *, runtime: bool) -> AuditResult:
    """Compile the model, call it once, and compare the output with the uncompiled model's."""
    import torch

    from atomc.audit.error import worst
    from atomc.report.report import reports

    earlier = {id(report) for report in reports()}
    torch._dynamo.reset()
    with torch.no_grad():
        if runtime:
            call, compiled = _step(call, options)
        else:
            settings: dict[str, Any] = dict(options)  # torch only knows the types of Inductor's
            function = torch.compile(call.model, backend="atom", options=settings)
            compiled = function(*call.args, **call.kwargs)
        eager = call.model(*call.args, **call.kwargs)
    leaves = [list(_tensors(outputs)) for outputs in (compiled, eager)]
    added = [report for report in reports() if id(report) not in earlier]
    untreated = [report.why_not for report in added if not report.treated]
    if not any(report.audit for report in added):
        raise ValueError(
            "nothing was compiled by atomc: "
            f"{untreated[0] if untreated else 'Dynamo found no graph'}"
        )
    return AuditResult(added, worst(*leaves).relative)


def _step(call: ModelCall, options: Mapping[str, JSONLike]) -> "tuple[ModelCall, Argument]":
    """The model with its token ids as one new sequence, and the logits of a step of the runtime."""
    import torch

    from atomc.ops.state import GroupStep, Step, block_size_of, groups_of
    from atomc.program import compile_model

    first = call.args[0] if call.args else call.kwargs["input_ids"]
    if not isinstance(call.model, torch.nn.Module) or not isinstance(first, torch.Tensor):
        raise ValueError("--runtime: expected a module with token ids as its first input")
    ids = first.reshape(-1)
    count, device = len(ids), ids.device
    positions, rows = (torch.arange(count, device=device) for _ in range(2))
    program = compile_model(call.model, options=options)
    if not program.specs:
        raise ValueError(
            "--runtime: the model keeps no state; its attention layers own no handle (ops.kv_state)"
        )
    block_size = block_size_of(program.specs) or count
    blocks = -(-count // block_size)
    program.bind([spec.allocate(blocks, block_size, device) for spec in program.specs])
    group = GroupStep(
        torch.arange(count, device=device),
        torch.arange(blocks, dtype=torch.int32, device=device)[None],
    )
    starts, lengths = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, count], [count])
    )
    groups = tuple(group for _ in groups_of(program.specs))
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    logits = program(Step(ids, positions, starts, lengths, rows, groups, slots))
    return ModelCall(call.model, (ids, positions, rows), {}), logits


def _tensors(value: "Argument") -> "Iterator[Tensor]":
    """The tensors in what a model returns."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)


# Disabling the cause


@dataclass(frozen=True)
class Without:
    """The options without the cause of a difference.

    options  None if there is no cause, or no option disables it
    text     the remaining difference, or why there are no options
    """

    options: Mapping[str, JSONLike] | None
    text: str


def _disable_cause(
    first: AuditResult,
    file_options: Mapping[str, JSONLike],
    audited: Callable[[Mapping[str, JSONLike]], AuditResult],
) -> Without:
    """The smallest change of the options that suffices: the rewrite disabled at one site, else also
    the rewrites whose results it absorbed.
    """
    audit = next((report.audit for report in first.reports if "blame" in report.audit), None)
    if audit is None:
        return Without(None, "no options written: the results are within the bound")
    blame, outputs = audit["blame"], audit["outputs"]
    if not blame["rewrite"]:
        return Without(None, "no options written: no rewrite is the cause")
    if blame["rewrite"] == "glue":
        return Without(None, "no options written: glue = 'eager' runs without Inductor")
    tried = math.inf
    for passes in _least_first(audit):
        options = {**file_options, "passes": _merged(file_options.get("passes"), passes)}
        again = audited(options)
        tried = max(
            report.audit["outputs"]["compiled"]
            for report in again.reports
            if "outputs" in report.audit
        )
        if tried <= outputs["bound"]:
            return Without(options, f"relative error against fp32 without it: {tried:.2g}")
    if tried > UNCHANGED * outputs["compiled"]:
        return Without(
            None,
            f"no options written: no option disables {blame['rewrite']} there; providers = [...] "
            "selects other kernels",
        )
    return Without(
        options,
        f"relative error against fp32 without it: {tried:.2g}, still above the bound; audit again "
        "with these options",
    )


def _least_first(audit: "AuditFindings") -> "list[Passes]":
    """Values of the option `passes`: without the blamed rewrite; without those it absorbed, too."""
    blame = audit["blame"]
    if not blame["passes"]:
        return []
    path = blame["module_path"]
    site = next(
        site
        for site in audit["sites"]
        if site["rewrite"] == blame["rewrite"] and path in (None, site["module_path"])
    )
    if len(site["rewrites"]) < 2:
        return [blame["passes"]]
    where: bool | list[str] = False if path is None else [path]
    return [blame["passes"], dict.fromkeys(site["rewrites"], where)]


def _merged(before: JSONLike, more: "Passes") -> dict[str, JSONLike]:
    """A value of option `passes` that disables what either value disables."""
    merged = dict(before) if isinstance(before, Mapping) else {}
    for name, off in more.items():
        earlier = merged.get(name)
        if isinstance(off, list) and isinstance(earlier, list | tuple):
            merged[name] = [*earlier, *off]
        elif earlier is not False:
            merged[name] = off
    return merged


def _print(arguments: argparse.Namespace, first: AuditResult, written: Without | None) -> None:
    from atomc.report.render.audit import audit_text

    graphs = [report for report in first.reports if report.audit]
    if arguments.json:
        result = {
            "graphs": [{"model": report.model, **report.audit} for report in graphs],
            "eager": first.eager,
        }
        if written is not None:
            result["without"] = {"options": written.options, "text": written.text}
        print(json.dumps(result, indent=1))
        return
    for number, report in enumerate(graphs):
        print(
            f"graph {number}, " * (len(graphs) > 1)
            + f"{report.model}: "
            + audit_text(report.audit, by=arguments.by, rows=arguments.rows)
            + "\n"
        )
    print(
        f"the uncompiled model differs from the compiled one by {first.eager:.2g} of the "
        "largest value"
    )
    if written is not None:
        print(
            written.text
            + (f"; see {arguments.write_options}" if written.options is not None else "")
        )
