"""Assembles the functions of all ranges of token counts to one compiled graph."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor
from torch.fx import GraphModule

from atomc.cache.compiled import Compiled, combine_ranges, serialize_compiled
from atomc.cache.generated import CompiledFunction
from atomc.compiler import ranges
from atomc.compiler.lower_ranges import Lowered
from atomc.graph.node_record import record_of
from atomc.graph.profiler_ranges import profiled
from atomc.ops.op import Extra
from atomc.ops.state import StateSpec


def assemble(
    gm: GraphModule,
    lowered: Sequence[Lowered],
    functions: Sequence[CompiledFunction],
    state: Sequence[StateSpec],
) -> Compiled:
    """One callable of the functions for each range, which can be converted to plain data."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    inputs = [node for node in placeholders if record_of(node).extra is None]
    extras, extras_of = _number_extras(len(inputs), lowered)
    dispatch, device = ranges.dispatch(gm, [one.tokens for one in lowered]), _device(gm)
    call = profiled(
        combine_ranges([function.call for function in functions], extras_of, dispatch, device),
        lambda: combine_ranges(
            [function.named() for function in functions], extras_of, dispatch, device
        ),
    )
    compiled = Compiled(
        call,
        inputs=[node.name for node in inputs],
        packed={node.name: packed for node in inputs if (packed := record_of(node).packed)},
        runtime_inputs={node.name: x for node in inputs if (x := record_of(node).input)},
        state=list(state),
        extras=extras,
        syncing=[kernel for one in lowered for kernel in one.syncing],
        read=[node.name for node in inputs if any(node.name in one.read for one in lowered)],
    )
    return replace(
        compiled,
        plain=lambda: serialize_compiled(
            compiled, [function.plain() for function in functions], extras_of, dispatch, device
        ),
    )


def _number_extras(
    num_inputs: int, lowered: Sequence[Lowered]
) -> tuple[list[Extra], list[tuple[int, int, int]]]:
    """The extras of all ranges; and for each range the number of inputs, its first extra, and the
    number of its extras.
    """
    extras: list[Extra] = []
    extras_of = []
    for one in lowered:
        extras_of.append((num_inputs, len(extras), len(one.extras)))
        extras += one.extras
    return extras, extras_of


def _device(gm: GraphModule) -> str | None:
    """The GPU of the graph's inputs, None on the CPU."""
    values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    return next(
        (str(x.device) for x in values if isinstance(x, Tensor) and x.device.type == "cuda"), None
    )
