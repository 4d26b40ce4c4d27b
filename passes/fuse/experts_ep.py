"""Send tokens to the processes of their experts, instead of all tokens to all processes.

x, ids, weights > dispatch_tokens > moe_experts > combine_tokens
 =>
x, ids, weights > moe_experts_ep

Off by default: its kernels read on the host how many rows travel, so that steps do not run as CUDA
graphs.
"""

from itertools import product
from typing import Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.ops.experts import ACTIVATIONS, Gate
from atomc.rewriting.example import Example, OneOf, tensor_example
from atomc.rewriting.rewrite import Case, Rewrite


def _pattern(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    places: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    nowhere: int,
    ranks: int,
    process_group: str,
    **gate: Unpack[Gate],
) -> Tensor:
    tokens = ops.dispatch_tokens(x, ids, weights, places, nowhere, ranks, process_group)
    partial = ops.moe_experts(*tokens[:3], w13, w2, b13, b2, **gate)
    return ops.combine_tokens(partial, tokens[1], ranks, process_group)


def _attrs(w13: Tensor, ranks: int, **_: object) -> dict[str, str | int]:
    return {"experts": len(w13), "ranks": ranks}


def _example(biased: bool, limited: bool) -> Example:
    return {
        "x": tensor_example(3, 10),
        "ids": tensor_example(3, 7, dtype=OneOf(torch.int64, torch.int32)),
        "weights": tensor_example(3, 7, dtype=OneOf(torch.float32, torch.bfloat16)),
        "places": tensor_example(2, 8, dtype=torch.int64),
        "w13": tensor_example(4, 12, 10),
        "w2": tensor_example(4, 10, 6),
        "b13": tensor_example(4, 12) if biased else None,
        "b2": tensor_example(4, 10) if biased else None,
        "nowhere": 17,
        "ranks": 5,
        "process_group": "a group",
        "activation": OneOf(*ACTIVATIONS),
        "interleaved": OneOf(False, True),
        "alpha": 1.3,
        "limit": 6.5 if limited else None,
    }


MOE_EXPERTS_EP = Rewrite(
    "moe_experts_ep",
    _pattern,
    ops.moe_experts_ep,
    _example,
    attrs=_attrs,
    needs={"dispatch_tokens": {}},
    cases=[
        Case("", {"biased": biased, "limited": limited})
        for biased, limited in product((False, True), repeat=2)
    ],
)
