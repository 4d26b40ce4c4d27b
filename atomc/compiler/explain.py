"""Explains what the compiler does to a model, without running it."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from atomc.capture.dtensors import localize
from atomc.capture.subclasses import subclass_reason
from atomc.capture.variable_floats import constant_floats
from atomc.compiler.callable_of import device_of, runnable
from atomc.compiler.driver import compile_graph
from atomc.compiler.entry import new_report, skip_reason, trace_reported
from atomc.errors import OURS
from atomc.files.json_types import JSONMapping
from atomc.graph.expressions import Size, expression
from atomc.options import Options
from atomc.platform import Platform
from atomc.report import contract
from atomc.report.page_file import publish
from atomc.report.report import Report, forget, keep
from atomc.rewriting.graph_pass import Context
from atomc.torch_compat.automatic_dynamic import isolated_dynamo_state
from atomc.torch_compat.core import GraphFunction, Input
from atomc.torch_compat.float_inputs import floats_stay_inputs
from atomc.torch_compat.symbolic_flags import decide_symbolic_flags
from atomc.torch_compat.tracing import (
    RestartAnalysis,
    ShortenTraceback,
    fake_mode_of,
    raised_unwrapped,
    with_fresh_code,
)

EXAMPLE_TOKENS = 12


class NothingToExplain(TypeError):
    """Inputs of the model are missing, or its call has no graph."""


def explain(
    model: Callable[..., Any],
    *args: Any,
    options: JSONMapping | Options | None = None,
    platform: Platform | str | None = None,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> Report:
    """The report for model(*args, **kwargs), which is traced and lowered, but neither built nor
    run.

    platform  a Platform or the name of one that need not be here ("gfx950"); default: the machine
              of the model's device
    dynamic   as in torch.compile
    Without args, a language model gets generated token ids. The model may be on the meta device. Of
    several graphs (graph breaks) the report with the most sites is returned; all are in
    `atomc.reports()`.
    Raises TypeError if no inputs are given and none can be generated, OptionsError for wrong
    options.
    """
    decide_symbolic_flags()
    parsed = Options.of(options)
    if not args and not kwargs:
        args, kwargs = example_inputs(model)
    where = Platform.named(platform) if isinstance(platform, str) else platform
    reports: list[Report] = []

    def backend(gm: GraphModule, inputs: Sequence[Input]) -> GraphFunction:
        with raised_unwrapped():
            reports.append(_inspect(gm, inputs, parsed, where))
        if subclass_reason(gm, inputs):  # of a size that only its class knows
            return runnable(gm, inputs).forward
        return lambda *arguments: empty_outputs(gm, arguments)

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    def dynamo() -> None:
        with isolated_dynamo_state():
            torch.compile(with_fresh_code(call), backend=backend, dynamic=dynamic)(*args, **kwargs)

    with torch.no_grad():
        trace_reported(model, dynamo, reports)
    if not reports:
        raise NothingToExplain(
            "explain: Dynamo found no graph in this call; is there a tensor operation in it?"
        )
    for report in reports:
        publish(report, parsed)
    return max(reports, key=lambda report: len(report.sites))


def example_inputs(
    model: Callable[..., Any], asked: str = "explain"
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Token ids for a language model: (args, kwargs). Raises NothingToExplain for a model with
    other inputs.

    asked  the name of the public function, for the error
    """
    forward = model.forward if isinstance(model, nn.Module) else model
    names = list(inspect.signature(forward).parameters)
    device = (
        next(model.parameters()).device if isinstance(model, nn.Module) else torch.device("cpu")
    )
    ids = torch.zeros(EXAMPLE_TOKENS, dtype=torch.int64, device=device)
    positions = torch.arange(EXAMPLE_TOKENS, device=device)
    if names[:2] == ["input_ids", "positions"]:
        return (), {"input_ids": ids, "positions": positions}
    if "input_ids" in names:
        return (), {
            "input_ids": ids[None],
            **({"use_cache": False} if "use_cache" in names else {}),
        }
    raise NothingToExplain(
        f"{asked}: give the inputs of {type(model).__name__}({', '.join(names)}) as in "
        f"{asked}(model, x, ...)"
    )


def _inspect(
    gm: GraphModule, inputs: Sequence[Input], options: Options, platform: Platform | None
) -> Report:
    """Run all stages except building: kernels are selected, but nothing is compiled."""
    report = keep(new_report(gm))
    reason = skip_reason(gm, inputs, options)
    if reason:
        report.why_not = reason
        contract.check(report, options)
        return report
    where = platform or Platform.detect(device_of(inputs))
    try:
        local = localize(gm, inputs)
        context = Context(options, where, build=False, inputs=local.inputs, keep_texts=True)
        floats = constant_floats(local.graph, local.inputs)
        with floats_stay_inputs(fake_mode_of(local.graph.graph)):
            compile_graph(local.graph, context, report, floats)
        report.treated = True
    except RestartAnalysis:  # Dynamo traces again with these floats as constants
        forget(report)
        raise
    except (ShortenTraceback, *OURS):
        raise
    except Exception as error:  # a failure is also reported
        report.why_not = f"{type(error).__name__}: {error}"
        if options.strict:
            raise
    contract.check(report, options)
    return report


def _sizes_of_symbols(gm: GraphModule, arguments: Sequence[Input]) -> dict[sympy.Symbol, int]:
    sizes: dict[sympy.Symbol, int] = {}
    for node, actual in zip(gm.graph.find_nodes(op="placeholder"), arguments, strict=True):
        fake = node.meta.get("example_value")
        pairs = [(fake, actual)]
        if isinstance(fake, Tensor) and isinstance(actual, Tensor):
            pairs = list(zip(fake.shape, actual.shape, strict=True))
        for size, number in pairs:
            if isinstance(size, torch.SymInt) and isinstance(number, int):
                sizes[expression(size)] = number
    return sizes


def empty_outputs(gm: GraphModule, arguments: Sequence[Input]) -> list[Input]:
    """Zeros with the shapes and dtypes of the graph's outputs, for code that continues after a
    graph break.
    """
    symbols = _sizes_of_symbols(gm, arguments)

    def known(size: Size) -> int:
        return int(expression(size).subs(symbols))

    def like(item: Argument) -> Input:
        fake = item.meta.get("example_value") if isinstance(item, Node) else item
        if isinstance(fake, Tensor):
            return torch.zeros(
                [known(size) for size in fake.shape], dtype=fake.dtype, device=fake.device
            )
        if isinstance(fake, torch.SymInt):
            return known(fake)
        if isinstance(fake, torch.SymBool | torch.SymFloat):
            value = fake.node.expr.subs(symbols)
            return bool(value) if isinstance(fake, torch.SymBool) else float(value)
        return fake if isinstance(fake, int | float) else None

    returned = gm.graph.output_node().args[0]
    return [like(item) for item in returned]  # type: ignore[union-attr]
