"""The sum that a norm reads gets contiguous rows, and so do the sums of later layers.

    norm(permute(x) + y)    =>    norm(clone(permute(x)) + y)

A convolution has its channels before its patches: added as they are, they give each later sum of
an encoder rows with gaps, which kernels refuse and every other op reads slowly. Exact.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from atomc.graph.canonical import call, value
from atomc.graph.edit import insert
from atomc.graph.sizes import known_equal, same_shape
from atomc.graph.strides import Values, values_behind
from atomc.ops.op import op_of
from atomc.ops.op_traits import Kind
from atomc.rewriting.graph_pass import Context
from atomc.rewriting.rewrite import Fired


def contiguous_sums(gm: GraphModule, context: Context) -> Iterator[Fired]:
    """Copy the only operand with gaps of each sum that a norm reads, unless the graph returns a
    value whose strides would change.
    """
    values = Values(gm.graph)
    for node in list(gm.graph.nodes):
        is_read = call(node).op == "add" and any(map(_is_norm, node.users))
        if not is_read or not _has_gaps(value(node)):
            continue
        strided = [operand for operand in call(node).operands if _has_gaps(value(operand))]
        if len(strided) != 1 or not same_shape(value(strided[0]), value(node)):
            continue
        [source] = strided
        rows = insert(
            node, torch.ops.aten.clone.default, source, memory_format=torch.contiguous_format
        )
        total = values.of(node, {source: value(rows)})
        assert isinstance(total, Tensor)
        changed = values_behind(node, total, values)
        if changed is None:
            gm.graph.erase_node(rows)
            continue
        node.replace_input_with(source, rows)
        for reader, new in changed.items():
            reader.meta["val"] = new
        yield Fired("contiguous_sums", node, {}, {node})


def _is_norm(node: Node) -> bool:
    op = op_of(node.target)
    return op is not None and Kind.NORM in op.kind


def _has_gaps(x: Tensor) -> bool:
    """Whether the elements of its rows may be apart."""
    return x.dim() > 0 and not known_equal(x.stride(-1), 1) and not known_equal(x.shape[-1], 1)
