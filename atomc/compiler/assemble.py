"""Assembles the functions of all ranges of token counts to one compiled graph."""

from collections.abc import Sequence
from itertools import chain

from torch import Tensor
from torch.fx import GraphModule, Node

from atomc.cache.compiled import Compiled, Ranges
from atomc.cache.generated import CompiledFunction
from atomc.compiler.lower_ranges import Lowered
from atomc.compiler.ranges import dispatch
from atomc.graph.node_record import record_of
from atomc.graph.profiler_ranges import profiled
from atomc.ops.state import StateSpec


def assemble(
    gm: GraphModule,
    lowered: Sequence[Lowered],
    functions: Sequence[CompiledFunction],
    state: Sequence[StateSpec],
) -> Compiled:
    """One callable of the functions for each range, which can be converted to plain data."""
    inputs = _inputs(gm)
    ranges = _ranges(gm, len(inputs), lowered)
    return Compiled(
        profiled(
            ranges.combine([function.call for function in functions]),
            lambda: ranges.combine([function.named() for function in functions]),
        ),
        inputs=[node.name for node in inputs],
        packed={node.name: packed for node in inputs if (packed := record_of(node).packed)},
        runtime_inputs={node.name: x for node in inputs if (x := record_of(node).input)},
        state=list(state),
        extras=list(chain.from_iterable(one.extras for one in lowered)),
        syncing=list(chain.from_iterable(one.syncing for one in lowered)),
        read=[node.name for node in inputs if any(node.name in one.read for one in lowered)],
        ranges=ranges,
        plain=lambda: [function.plain() for function in functions],
    )


def _inputs(gm: GraphModule) -> list[Node]:
    """The inputs of the graph, without those that lowering added."""
    return [x for x in gm.graph.find_nodes(op="placeholder") if record_of(x).extra is None]


def _ranges(gm: GraphModule, num_inputs: int, lowered: Sequence[Lowered]) -> Ranges:
    num_extras = tuple(len(one.extras) for one in lowered)
    choice = dispatch(gm, [one.tokens for one in lowered])
    return Ranges(num_inputs, num_extras, choice, _device(gm))


def _device(gm: GraphModule) -> str | None:
    """The GPU of the graph's inputs, None on the CPU."""
    values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    return next(
        (str(x.device) for x in values if isinstance(x, Tensor) and x.device.type == "cuda"), None
    )
