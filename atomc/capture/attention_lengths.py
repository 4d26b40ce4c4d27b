"""Guards that the keys, values and mask of an attention have one length.

PyTorch requires it but adds no guard for it. To Dynamo the lengths of a cache's two tensors, once
they vary, are two symbols, which no rewrite could take for equal.
"""

import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.node import Argument, Node

from atomc.torch_compat.tracing import guard_or_false

_NAMES = ("query", "key", "value", "attn_mask")


def guard_attention_lengths(gm: GraphModule) -> None:
    """Add these guards for Dynamo's graph and its regions."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.find_nodes(
                op="call_function", target=F.scaled_dot_product_attention
            ):
                _guard_lengths(dict(zip(_NAMES, node.args, strict=False)) | node.kwargs)


def _guard_lengths(arguments: dict[str, Argument]) -> None:
    key, value, mask = (_example(arguments.get(name)) for name in _NAMES[1:])
    if key is None or value is None:
        return
    guard_or_false(key.shape[-2] == value.shape[-2])
    if mask is not None and mask.dim():  # a mask for all keys has the length 1
        guard_or_false(mask.shape[-1] == key.shape[-2])


def _example(argument: Argument) -> Tensor | None:
    value = argument.meta.get("example_value") if isinstance(argument, Node) else None
    return value if isinstance(value, Tensor) and value.dim() >= 1 else None
