"""Whether the ops between the kernels of a lowered graph are worth the start of Inductor."""

import math
import sys
from collections import Counter

from torch import Tensor
from torch.fx import GraphModule, Node

from atomc.compiler.partition import is_trivial, piece_numbers
from atomc.cost.cost import is_product
from atomc.graph.canonical import Value, value
from atomc.graph.node_record import record_of
from atomc.graph.sizes import first_size
from atomc.graph.views import schema_name, storage_node, view_base
from atomc.platform import Platform

# At most so many ops in runs between the kernels of a graph run eagerly, such as the embedding and
# the tables of positions of a served model: they take some us a step, the start of Inductor 5 s.
FEW_OPS = 20
# On a GPU, if Inductor would also save at most this share of the bytes that the graph moves: with 3
# layers and batch 32, 0.017 of ViT, 0.045 of SigLIP, 0.07 of Whisper.
SMALL_SHARE = 0.02


def why_eager(gm: GraphModule, platform: Platform) -> str | None:
    """Why the ops between kernels run eagerly, or None. Call sink_pointwise before."""
    count = left_for_glue(gm)
    if count > FEW_OPS or (not platform.is_cpu and unfused_share(gm) > SMALL_SHARE):
        return None
    return f"{count} ops between kernels are too few to start Inductor for"


def left_for_glue(gm: GraphModule) -> int:
    """The number of ops between kernels that compute tensors, without those that stand alone, which
    Inductor could fuse with nothing; sys.maxsize without kernels. The reference of an op counts as
    four.
    """
    number = piece_numbers(gm)
    if not any(record_of(node).kernel for node in number):
        return sys.maxsize
    in_piece: Counter[int] = Counter()
    for node, piece in number.items():
        if (
            not record_of(node).kernel
            and not is_trivial(node)
            and isinstance(node.meta.get("val"), Tensor)
        ):
            in_piece[piece] += 4 if record_of(node).op else 1
    return sum(count for count in in_piece.values() if count > 1)


def unfused_share(gm: GraphModule) -> float:
    """The bytes that ops between kernels write and read, and fused ones would not, as a share of
    the bytes that all nodes read and write. Dynamic sizes are those of the first call.
    """
    number = piece_numbers(gm)
    total, unfused = 0, set[Node]()
    for node, piece in number.items():
        if is_trivial(node):
            continue
        operands = node.all_input_nodes
        total += _num_bytes([value(node), *(value(view_base(operand)) for operand in operands)])
        if _fuses(node):
            sources = map(storage_node, operands)
            unfused |= {x for x in sources if number.get(x) == piece and _fuses(x)}
    return 2 * _num_bytes([value(node) for node in unfused]) / max(total, 1)


def _fuses(node: Node) -> bool:
    """Whether Inductor can compute it in one kernel with its neighbours."""
    alone = is_product(node) or schema_name(node) == "aten::convolution"
    return node.op == "call_function" and not record_of(node).kernel and not alone


def _num_bytes(result: Value) -> int:
    """The size of a tensor, or of all tensors in a list; 0 for numbers."""
    if isinstance(result, Tensor):
        return math.prod(map(first_size, result.shape)) * result.element_size()
    return sum(map(_num_bytes, result)) if isinstance(result, tuple | list) else 0
