"""Run passes on the graph of a plain function, traced as the backend traces it, and compare numbers
before and after.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from atomc import passes
from atomc.capture.functional import capture, dynamo_graph
from atomc.compiler import pipeline
from atomc.graph.node_record import record_of, step_input
from atomc.ops.inputs import StateInput, StepInput
from atomc.options import Options
from atomc.platform import Platform
from atomc.report.report import Report, reports
from atomc.rewriting.graph_pass import Context, Pass, rewriting
from atomc.rewriting.rewrite import Fired, Rewrite
from atomc.torch_compat.core import outside_of_tracing
from atomc.torch_compat.tracing import lifted_floats, source_name

T = TypeVar("T")
TIDY = passes.PIPELINE[0]


def since(before: Sequence[Report]) -> list[Report]:
    """The reports that were added to these; only the last are kept, so their number tells
    nothing.
    """
    return [report for report in reports() if not any(report is old for old in before)]


@dataclass
class Traced:
    """What became of a function: the report of lifting and passes, the graph as text, and how often
    each pass fired.
    """

    report: Report = field(default_factory=lambda: Report("function"))
    text: str = ""
    error: float = 0.0  # the largest difference to eager, in units of the largest value


def rewritten(
    what: Rewrite | Pass | Sequence[Rewrite | Pass],
    function: Callable[..., Any],
    *inputs: Tensor,
    matches: int = 1,
    dynamic: bool | None = False,
    tolerance: float = 0.0,
) -> str:
    """The graph of function(*inputs) after `what`, as short text; `matches` counts the sites of its
    last rewrite.

    The numbers must be those of eager: equal, or within `tolerance` of the largest.
    """
    chosen = _passes(what)
    traced = after_passes(chosen, function, *inputs, dynamic=dynamic)
    assert traced.error <= tolerance, f"off by {traced.error:.1e} of the largest value"
    found = sum(stage.changed for stage in traced.report.stages if stage.name == chosen[-1].name)
    assert found == matches, f"{found} sites instead of {matches} in\n{traced.text}"
    return traced.text


def explained(
    function: Callable[..., Any],
    *inputs: Tensor,
    paged: bool = False,
    dynamic: bool | None = False,
    tolerance: float = 0.0,
    off: Sequence[str] = (),
    on: Sequence[str] = (),
    **options: Any,
) -> Report:
    """The report of the whole pipeline on function(*inputs); paged as for the runtime. Numbers as
    in `rewritten`.

    off, on  passes that options turn off or on
    """
    context = _context(paged, off, on, **options)
    chosen, left_out = pipeline.selected(passes.PIPELINE, context)
    traced = after_passes(chosen, function, *inputs, dynamic=dynamic, context=context)
    assert traced.error <= tolerance, f"off by {traced.error:.1e} of the largest value"
    traced.report.off, traced.report.treated = left_out, True
    return traced.report


def after_passes(
    chosen: Sequence[Pass],
    function: Callable[..., Any],
    *inputs: Tensor,
    dynamic: bool | None = False,
    context: Context | None = None,
) -> Traced:
    """Lift, trace, run the passes, run the result, and compare with eager. Inputs that are written
    are compared too.
    """
    context = context or _context()
    traced = Traced()

    def change(gm: GraphModule, names: list[str]) -> Callable[..., Any]:
        inputs_before = len(gm.graph.find_nodes(op="placeholder"))
        pipeline.run(gm, chosen, context, traced.report)
        traced.text = text_of(gm.graph, names)
        added = gm.graph.find_nodes(op="placeholder")[inputs_before:]
        rows = inputs[0].shape[0]
        return lambda *args: gm.forward(*args, *(_state_input(node, added, rows) for node in added))

    def lift(dynamo: GraphModule) -> None:
        pipeline.run(dynamo, [passes.LIFT], context, traced.report)

    written, expected_written = ([x.clone() for x in inputs] for _ in range(2))
    with torch.no_grad():
        result = _compiled(function, change, lift, dynamic)(*written)
        expected = function(*expected_written)
    traced.error = max(
        [error(a, b) for a, b in zip(_flat(result), _flat(expected), strict=True)]
        + [error(a, b) for a, b in zip(written, expected_written, strict=True)]
    )
    return traced


def functional_graph(
    function: Callable[..., Any], *inputs: Tensor, dynamic: bool | None = False
) -> Graph:
    """The functional ATen graph of a function, before any pass."""
    graphs: list[Graph] = []

    def keep(gm: GraphModule, names: list[str]) -> Callable[..., Any]:
        graphs.append(gm.graph)
        return gm.forward

    with torch.no_grad():
        _compiled(function, keep, lambda dynamo: None, dynamic)(*inputs)
    return graphs[0]


def error(actual: Any, expected: Any) -> float:
    """The largest difference in units of the largest value; infinite if shape, dtype or kind
    differ.
    """
    if not isinstance(expected, Tensor):
        return 0.0 if actual == expected else float("inf")
    if (
        actual.shape != expected.shape
        or actual.dtype != expected.dtype
        or actual.device != expected.device
    ):
        return float("inf")
    if expected.is_meta or not expected.numel() or torch.equal(actual, expected):
        return 0.0
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())


def text_of(graph: Graph, names: Sequence[str]) -> str:
    """The graph, one op a line: `%0 = add(x, r)`; result i of several is `%0.i`. names: of the
    first placeholders.
    """
    placeholders = graph.find_nodes(op="placeholder")
    spelled = {node: node.name for node in placeholders} | dict(
        zip(placeholders, names, strict=False)
    )
    lines: list[str] = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append("return " + ", ".join(_spell(part, spelled) for part in node.args[0]))
        elif node.target is operator.getitem:
            spelled[node] = f"{spelled[node.args[0]]}.{node.args[1]}"
        elif node.op == "get_attr":
            spelled[node] = str(node.target)
        elif node.op == "call_function":
            spelled[node] = f"%{len(lines)}"
            schema = getattr(node.target, "_schema", None)
            name = schema.name.split("::")[1] if schema else node.target.__name__
            given = [_spell(a, spelled) for a in node.args]
            given += [f"{key}={_spell(a, spelled)}" for key, a in node.kwargs.items()]
            lines.append(f"{spelled[node]} = {name}({', '.join(given)})")
    return "\n".join(lines)


def _spell(argument: Any, spelled: dict[Node, str]) -> str:
    if isinstance(argument, Node):
        return spelled[argument]
    if isinstance(argument, list | tuple):
        return "[" + ", ".join(_spell(part, spelled) for part in argument) + "]"
    return (
        str(argument).removeprefix("torch.")
        if isinstance(argument, torch.dtype)
        else repr(argument)
    )


def _passes(what: Rewrite | Pass | Sequence[Rewrite | Pass]) -> list[Pass]:
    parts = [what] if isinstance(what, Rewrite | Pass) else list(what)
    rewrites = [part for part in parts if isinstance(part, Rewrite)]
    return [TIDY, rewriting(*rewrites)] if rewrites else [p for p in parts if isinstance(p, Pass)]


def _context(
    paged: bool = False, off: Sequence[str] = (), on: Sequence[str] = (), **options: Any
) -> Context:
    switches = dict.fromkeys(off, False) | dict.fromkeys(on, True)
    chosen = Options(strict=True, passes=switches, **options)
    return Context(chosen, Platform.detect("cpu"), paged=paged)


def _compiled(
    function: Callable[..., Any],
    change: Callable[[GraphModule, list[str]], Callable[..., Any]],
    lift: Callable[[GraphModule], None],
    dynamic: bool | None,
) -> Callable[..., Any]:
    def backend(gm: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        placeholders = gm.graph.find_nodes(op="placeholder")
        names = [_name(source_name(node)) for node in placeholders]
        floats = {
            placeholders.index(node): float(examples[placeholders.index(node)])
            for node in lifted_floats(gm.graph)
        }
        dynamo = dynamo_graph(gm, examples, floats)
        lift(dynamo)
        captured = capture(dynamo, examples)
        return captured.wrap(change(captured.graph, names))

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)


def _name(source: str | None) -> str:
    """L['x'] -> x, L['x'].size()[0] -> x.size(0)"""
    return (
        (source or "?")
        .removeprefix("L['")
        .replace("']", "", 1)
        .replace("()[", "(")
        .replace("]", ")")
    )


def _flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, list | tuple) else [result]


def _state_input(node: Node, added: Sequence[Node], rows: int) -> Tensor:
    """What a step of one sequence, from its first token on, gives an input that binding the state
    has added. rows: the tokens of a graph whose state is all per sequence.
    """
    fake = node.meta["val"]
    tokens = next(
        (
            other.meta["val"].shape[0]
            for other in added
            if (of := step_input(other)) and of.field == "slots"
        ),
        rows,
    )
    tokens = tokens if isinstance(tokens, int) else tokens.node.hint
    match record_of(node).input:
        case StepInput("slots"):
            return torch.arange(tokens)
        case StepInput("block_tables"):
            return torch.arange(2, dtype=torch.int32)[None]
        case StepInput("query_start"):
            return torch.tensor([0, tokens], dtype=torch.int32)
        case StepInput("seq_lens"):
            return torch.tensor([tokens], dtype=torch.int32)
        case StepInput("state_slots"):
            return torch.ones(1, dtype=torch.int64)
        case StateInput(per_sequence=True):
            return torch.zeros(2, *fake.shape[1:], dtype=fake.dtype)
        case StateInput(is_scale=True):
            return torch.ones(1)
    return torch.zeros(2, 16, *fake.shape[2:], dtype=fake.dtype)


def _strides_hold(gm: GraphModule, context: Context) -> list[Fired]:
    class Compared(torch.fx.Interpreter):
        def run_node(self, n: Node) -> Any:
            made, known = super().run_node(n), n.meta.get("val")
            if n.op == "call_function" and isinstance(known, Tensor):
                assert (made.shape, made.stride()) == (known.shape, known.stride()), n.format_node()
            return made

    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    with outside_of_tracing():
        Compared(gm).run(*(torch.zeros(fake.shape, dtype=fake.dtype) for fake in fakes))
    return []


# Fails if a value of a static graph has other strides than running the graph gives.
STRIDES_HOLD = Pass("strides_hold", _strides_hold)
