"""The origin of a node: module path, layer, source line; and how rewritten nodes inherit it."""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from torch import nn
from torch.fx import GraphModule, Node

from atomc.graph.canonical import spell
from atomc.graph.node_record import NodeRecord, origins_of

# nn_module_stack of a node, the innermost module last: key -> (path, class or its name).
Stack = Mapping[str, tuple[str, type[nn.Module] | str]]


class Provenance(TypedDict):
    """Metadata of a node that a rewrite made; `atomc` is the key RECORD."""

    nn_module_stack: Stack
    stack_trace: str | None
    atomc: NodeRecord


_NOT_USER_CODE = {
    str(Path(__file__).parents[1] / file) for file in ("ops/op.py", "stock/adapter.py")
}
_SELF = re.compile(r"^L\['\w+'\]|^G\['\w+'\]")
_KEY = re.compile(r"\['?([^'\]]+)'?\]")
_FRAME = re.compile(r'File "([^"]*)", line (\d+), in (\S+)\n\s*(.*)')


def module_path(node: Node) -> str:
    """The path of the innermost module that made the node, as in `named_modules`:
    "model.layers.3.mlp".
    """
    stack = node.meta.get("nn_module_stack")
    return clean_path(next(reversed(stack.values()))[0]) if stack else ""


def clean_path(path: str) -> str:
    """Dynamo's expression for a module as a dotted path."""
    path = _SELF.sub("", path).replace("_modules", "").replace(".slice(", ".(")
    path = re.sub(r"\([^)]*\)", "", _KEY.sub(r".\1", path))
    return re.sub(r"\.+", ".", path).strip(".")


def use_tree_names(gm: GraphModule, names: Mapping[int, tuple[str, nn.Module]]) -> None:
    """Name modules in the stacks of nodes, in place, as the module tree does. Dynamo spells how the
    compiled function got a module: L['args'][0].layers.3 below a decorator.

    names  (name, root of the tree) by id; a name that Dynamo took from the same tree stays
    """
    renamed: dict[int, Stack] = {}  # nodes of one module share their stack
    for graph in (part.graph for part in gm.modules() if isinstance(part, GraphModule)):
        for node in graph.nodes:
            stack = node.meta.get("nn_module_stack")
            if stack and id(stack) not in renamed:
                renamed[id(stack)] = {
                    key: (_tree_name(key, path, names), kind) for key, (path, kind) in stack.items()
                }
            if stack:
                node.meta["nn_module_stack"] = renamed[id(stack)]


def _tree_name(key: str, path: str, names: Mapping[int, tuple[str, nn.Module]]) -> str:
    """key: the id of the module, and "@" with a number for a later call of it."""
    number = key.partition("@")[0]
    module = int(number) if number.isdigit() else 0
    if module not in names:
        return path
    name, root = names[module]
    with suppress(AttributeError):  # no such submodule
        if id(root.get_submodule(clean_path(path))) == module:
            return path
    return name


def layer_of(path: str) -> int | None:
    """The number of the repeated layer that contains a module path; None outside of layers."""
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path)
    return int(match[1]) if match else None


def frames(node: Node) -> list[tuple[str, int, str, str]]:
    """(file, line, function, code) of the user's stack, innermost last, without the frames of atomc
    that call ops.
    """
    parsed = _FRAME.findall(node.meta.get("stack_trace") or "")
    return [(f, int(line), name, code) for f, line, name, code in parsed if f not in _NOT_USER_CODE]


def source_line(node: Node) -> str:
    """The line of the user's program the node was traced from, "file.py:12"; the file without its
    folder.
    """
    stack = frames(node)
    return f"{stack[-1][0].rsplit('/', 1)[-1]}:{stack[-1][1]}" if stack else ""


def describe(node: Node) -> str:
    """`mul(other=2.0) in model.layers.0.mlp (model.py:12)`."""
    path, line = module_path(node), source_line(node)
    return spell(node) + (f" in {path}" if path else "") + (f" ({line})" if line else "")


def inherited(
    matched: Iterable[Node], first_output: Node, rewrite: str, consumed: tuple[str, ...] = ()
) -> Provenance:
    """Metadata of the nodes that replace `matched`: common module, the first output's line, all
    origins, and the ops that they consume.
    """
    matched = list(matched)
    origins = frozenset[str]().union(*map(origins_of, matched))
    return {
        "nn_module_stack": _common_stack(matched),
        "stack_trace": first_output.meta.get("stack_trace"),
        "atomc": NodeRecord(made_by=rewrite, origins=origins, consumed=consumed),
    }


def _common_stack(nodes: Iterable[Node]) -> Stack:
    stacks = [list((node.meta.get("nn_module_stack") or {}).items()) for node in nodes]
    stacks = [stack for stack in stacks if stack]
    common = []
    for level in zip(*stacks, strict=False):
        if any(entry[1][0] != level[0][1][0] for entry in level):
            break
        common.append(level[0])
    return dict(common)
