"""Guards that an attention has as many keys as values.

PyTorch requires it but adds no guard for it. To Dynamo the lengths of a cache's two tensors, once
they vary, are two symbols, which no rewrite could take for equal.
"""

import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from atomc.torch_compat.tracing import guard_or_false

_NAMES = ("query", "key", "value")


def guard_attention_lengths(gm: GraphModule) -> None:
    """Add these guards for Dynamo's graph and its regions."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.find_nodes(
                op="call_function", target=F.scaled_dot_product_attention
            ):
                _guard_length(node)


def _guard_length(node: Node) -> None:
    arguments = dict(zip(_NAMES, node.args, strict=False)) | node.kwargs
    key, value = (
        argument.meta.get("example_value") if isinstance(argument, Node) else argument
        for argument in (arguments["key"], arguments["value"])
    )
    if isinstance(key, Tensor) and isinstance(value, Tensor):
        guard_or_false(key.shape[-2] == value.shape[-2])
