"""Let the router compute its logits.

    x > linear > topk_route -+-> weights              x > linear_topk_route -+-> weights
                             +-> ids          =>                             +-> ids

x and the weight may be cast to fp32 before (GLM-4.5, DeepSeek-V3). Off by default: without a
kernel, Inductor would get the product too, which has kernels of its own.
"""

from itertools import product

import torch
from torch import Tensor

from atomc import ops
from atomc.ops.op import OpFunction
from atomc.ops.route import GROUP_SCORES, SCORES
from atomc.rewriting.example import Example, OneOf, tensor_example
from atomc.rewriting.rewrite import Case, Rewrite

# `choice` are the keyword arguments of the router.
_topk_route: OpFunction[..., tuple[Tensor, Tensor]] = ops.topk_route


def _pattern(
    x: Tensor,
    weight: Tensor,
    linear_bias: Tensor | None,
    bias: Tensor | None,
    logits_dtype: torch.dtype,
    **choice: object,
) -> tuple[Tensor, Tensor]:
    logits = ops.linear(x.to(logits_dtype), weight.to(logits_dtype), linear_bias)
    return _topk_route(logits, bias, **choice)


def _example(
    stored: tuple[torch.dtype, ...], logits: torch.dtype, biased: bool, chosen_by_bias: bool
) -> Example:
    one = OneOf(*stored)
    return {
        "x": tensor_example(3, 10, dtype=one),
        "weight": tensor_example(21, 10, dtype=one),
        "linear_bias": tensor_example(21, dtype=one) if biased else None,
        "bias": tensor_example(21, dtype=OneOf(torch.float32, *_16_BITS))
        if chosen_by_bias
        else None,
        "logits_dtype": logits,
        "k": 2,
        "score": OneOf(*SCORES),
        "groups": 4,
        "topk_groups": 8,
        "group_score": OneOf(*GROUP_SCORES),
        "renormalize": OneOf(False, True),
        "eps": 1e-20,
        "min_sum": 1e-12,
        "scale": 2.5,
        "dtype": OneOf(torch.float32, *_16_BITS),
        "in_order": OneOf(True, False),
    }


def _case(
    stored: tuple[torch.dtype, ...], logits: torch.dtype, biased: bool, chosen_by_bias: bool
) -> Case:
    return Case(
        "logits in fp32" if stored != (logits,) else "",
        {
            "stored": stored,
            "logits": logits,
            "biased": biased,
            "chosen_by_bias": chosen_by_bias,
        },
        {
            "linear": {"given": ("x", "weight", *(["bias"] * biased))},
            "topk_route": {"given": ("logits", *(["bias"] * chosen_by_bias))},
        },
    )


_16_BITS = (torch.bfloat16, torch.float16)
LINEAR_TOPK_ROUTE = Rewrite(
    "linear_topk_route",
    _pattern,
    ops.linear_topk_route,
    _example,
    attrs=lambda score, **_: {"score": score},
    cases=[
        _case(stored, logits, *biases)
        for (stored, logits), biases in product(
            [
                (_16_BITS, torch.float32),
                *(((each,), each) for each in (*_16_BITS, torch.float32)),
            ],
            product((False, True), (False, True)),
        )
        if not (stored != (logits,) and biases[0])  # no model casts a bias of logits
    ],
)
