"""How many tokens the experts of a mixture get."""

from torch import Tensor

from atomc.ops.op import op
from atomc.ops.op_shapes import written_token
from atomc.ops.op_traits import Kind


@op(kind=Kind.OTHER, rows=None, mutates=("counts",), shape=lambda counts: written_token(counts))
def count_experts(ids: Tensor, slots: Tensor, counts: Tensor) -> Tensor:
    """Add the choices of each expert to counts [E] int64. ids [T, k] int32 or int64, slots [T]
    int64.

    Rows whose slot is -1 are padding and not counted, nor are ids outside 0..E-1. Returns an empty
    tensor, [0].
    """
    counted = (slots >= 0).unsqueeze(-1) & (ids >= 0) & (ids < len(counts))
    chosen = ids.where(counted, 0).flatten()
    counts.index_add_(0, chosen, counted.flatten().to(counts.dtype))
    return counts.new_empty((0,))
