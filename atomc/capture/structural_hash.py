"""Structural hashing of graphs: keys that are equal for nodes that differ only in their names."""

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import Argument

from atomc.graph.canonical import Value


def structural_key(item: Argument | Value, numbers: Mapping[Node, int]) -> Hashable:
    """The key of an argument or value of a node: nodes by number, sizes by symbol, tensors by
    dtype, device and layout.

    Symbols with equal hints are not equal: guards may hold for one of them only. 0.0 is not -0.0,
    and 1 is not True.
    """
    if isinstance(item, Node):
        return "node", numbers[item]
    if isinstance(item, tuple | list):
        return tuple(structural_key(part, numbers) for part in item)
    if isinstance(item, dict):
        return tuple((name, structural_key(part, numbers)) for name, part in item.items())
    if isinstance(item, slice):
        return "slice", structural_key((item.start, item.stop, item.step), numbers)
    if isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool):
        is_specialized = (
            isinstance(item, torch.SymInt) and item.node.expr.is_number
        )  # a guard of a later layer specialized it
        return (int, int(item.node.expr)) if is_specialized else ("symbol", item.node.expr)
    if isinstance(item, Tensor):
        layout = structural_key((*item.shape, *item.stride()), numbers)
        return type(item), item.dtype, item.device, item.requires_grad, item.dim(), layout
    if isinstance(item, float):
        return float, repr(item)
    return type(item), item if isinstance(item, Hashable) else id(item)
