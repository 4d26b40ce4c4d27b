"""The graph of a function, recorded call by call for comparison with others. make_fx, whose graphs
can be run, takes several times as long.
"""

import operator
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import BooleanAtom
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch.fx import Graph, Node
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from atomc.torch_compat.core import FakeTensorMode, outside_of_tracing
from atomc.torch_compat.tracing import sizes_stay_symbolic


class _Sizes(ShapeEnv):
    """Symbolic sizes that are those of an example, which decides conditions: guards would not be
    read. Sizes that must be equal become one.
    """

    def evaluate_sym_node(
        self, sym_node: SymNode, size_oblivious: bool = False, fallback_value: bool | None = None
    ) -> sympy.Basic:
        condition, holds = sym_node.expr, sym_node.hint
        equal = isinstance(condition, sympy.Eq if holds else sympy.Ne)
        if isinstance(condition, sympy.Rel | BooleanAtom) and not equal:
            return sympy.sympify(holds)
        return super().evaluate_sym_node(sym_node, size_oblivious, fallback_value)

    def size(self, number: int) -> int | torch.SymInt:
        """The symbol of a number; 0 and 1 are themselves."""
        symbol = self.create_symbol(number, ConstantSource(f"size_{number}"), DimDynamic.DUCK)
        return self.create_symintnode(symbol, hint=number)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the calls of ATen as nodes of a graph."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = Graph()
        self.nodes: MutableMapping[Tensor, Node] = WeakTensorKeyDictionary()

    def record(self, node: Node, result: object) -> None:
        node.meta["val"] = result
        if isinstance(result, Tensor):
            # torch copies a new tensor, with another call, while something else refers to it.
            node.meta["val"] = result.data
            self.nodes[result] = node
        elif isinstance(result, Sequence):
            for i, part in enumerate(result):
                self.record(self.graph.call_function(operator.getitem, (node, i)), part)

    def replaced(self, values: Any) -> Any:
        """The values with the nodes of tensors in place of these."""
        return map_aggregate(values, lambda x: self.node(x) if isinstance(x, Tensor) else x)

    def node(self, tensor: Tensor) -> Node:
        if tensor not in self.nodes:
            raise ValueError(f"pattern: reads a tensor that is not an argument: {tensor}")
        return self.nodes[tensor]

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        node = self.graph.call_function(func)
        # Graph.call_function warns of sizes that are not nodes.
        node.args, node.kwargs = self.replaced((args, kwargs or {}))
        self.record(node, result)
        return result


def aten_graph(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    arguments: Mapping[str, object],
    *,
    symbolic: bool,
) -> Graph:
    """The calls of ATen that a function makes, each with its result as "val". The placeholders are
    the tensors among the arguments, of which only sizes, dtypes and devices are read: those on
    "meta" are the fastest, others become fake tensors.

    symbolic  with symbolic sizes, one symbol for equal sizes; a size of 0 or 1 is a number

    Raises ValueError if the function reads another tensor.
    """
    sizes, recorder = _Sizes(), _Recorder()
    inputs = dict(arguments)
    with ExitStack() as contexts:
        contexts.enter_context(outside_of_tracing())
        if symbolic:
            contexts.enter_context(sizes_stay_symbolic())
        tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
        if any(x.device.type != "meta" for x in tensors.values()):
            mode = contexts.enter_context(FakeTensorMode())
            mode.cache_enabled = not symbolic  # an entry with symbolic sizes is not read again
        for name, x in tensors.items():
            shape = [sizes.size(n) if symbolic else n for n in x.shape]
            inputs[name] = torch.empty(shape, dtype=x.dtype, device=x.device)
            recorder.record(recorder.graph.placeholder(name), inputs[name])
        with recorder:
            returned = function(**inputs)
    recorder.graph.output(recorder.replaced(returned))
    return recorder.graph
