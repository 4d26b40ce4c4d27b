"""What two pieces of a graph have in common whatever their nodes are called: a spelling that is equal if they are alike."""

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node


def spelled(item: Any, numbers: Mapping[Node, int]) -> Hashable:
    """An argument or value of a node. Nodes are told by their number, sizes by their symbols, tensors by how they lie.

    Of two sizes that look alike only one may be known to be, say, even. 0.0 is not -0.0, and 1 is not True.
    """
    if isinstance(item, Node):
        return "node", numbers[item]
    if isinstance(item, tuple | list):
        return tuple(spelled(part, numbers) for part in item)
    if isinstance(item, dict):
        return tuple((name, spelled(part, numbers)) for name, part in item.items())
    if isinstance(item, slice):
        return "slice", spelled((item.start, item.stop, item.step), numbers)
    if isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool):
        known = isinstance(item, torch.SymInt) and item.node.expr.is_number  # since a later layer asked for it
        return (int, int(item.node.expr)) if known else ("symbol", item.node.expr)
    if isinstance(item, Tensor):
        lies = spelled((*item.shape, *item.stride()), numbers)
        return type(item), item.dtype, item.device, item.requires_grad, item.dim(), lies
    if isinstance(item, float):
        return float, repr(item)
    return type(item), item if isinstance(item, Hashable) else id(item)
