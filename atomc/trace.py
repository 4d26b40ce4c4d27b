"""What torch's own tools see of us: graphs in the structured trace, and ranges with names in profiles."""

import ast
from collections.abc import Callable, Mapping

from torch.fx import Graph, GraphModule, Node

from atomc.cost import FREE, name_of
from atomc.listing import listing
from atomc.op import ALL_TOKENS
from atomc.provenance import module_path
from atomc.torch_compat import profiler_is_on, structured_trace, traces_structured

Observer = Callable[[str, GraphModule], None]


def observers() -> list[Observer]:
    """One that writes each graph it is shown to the structured trace, if there is one (TORCH_TRACE=folder)."""
    return [_numbered()] if traces_structured() else []


def _numbered() -> Observer:
    """Names in the order of the passes, so that what a pass did lies between two neighbours of the list."""
    number = 0

    def write(name: str, gm: GraphModule) -> None:
        nonlocal number
        tokens = gm.meta.get("tokens", ALL_TOKENS)
        behind = ""
        if name == "lower" and tokens != ALL_TOKENS:
            behind = "_" + str(tokens).replace(" ", "_")
        structured_trace(f"atomc_{number:02d}_{name}{behind}", lambda: listing(gm))
        number += 1

    return write


def labels_of(graph: Graph) -> dict[str, str]:
    """Node -> the name of its range, "model.layers.3.mlp: silu_and_mul [triton]", of all that compute."""
    return {node.name: label_of(node) for node in graph.nodes
            if node.op == "call_function" and ("op" in node.meta or name_of(node) not in FREE)}  # fmt: skip


def label_of(node: Node) -> str:
    by = f" [{node.meta['kernel']}]" if "kernel" in node.meta else ""
    return f"{module_path(node) or '-'}: {name_of(node)}{by}"


def with_ranges(source: str, labels: Mapping[str, str]) -> ast.Module:
    """Generated code in which each assignment to a name with a label lies in a range of that name."""
    tree = ast.parse(source)
    for function in (item for item in ast.walk(tree) if isinstance(item, ast.FunctionDef)):
        function.body = [_ranged(line, labels) for line in function.body]
    return ast.fix_missing_locations(tree)


def _ranged(line: ast.stmt, labels: Mapping[str, str]) -> ast.stmt:
    target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
    label = labels.get(target.id) if isinstance(target, ast.Name) else None
    if label is None or (isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant)):  # `x = None` frees x
        return line
    entered = ast.parse(f"with record_function({label!r}): pass").body[0]
    assert isinstance(entered, ast.With)
    entered.body = [line]
    return entered


def profiled(call: Callable[..., object], named: Callable[[], Callable[..., object]]) -> Callable[..., object]:
    """`call`; while a profiler listens, what `named` makes of it once: the same with ranges around each kernel."""
    made: list[Callable[..., object]] = []

    def run(*args: object) -> object:
        if not profiler_is_on():
            return call(*args)
        if not made:
            made.append(named())
        return made[0](*args)

    return run
