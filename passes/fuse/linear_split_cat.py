"""Let the linear layer that computes keys and values write them to their final places (DeepSeek's
latent attention).

    x > linear > view +- [..., :P] --+            x --+
                      |              cat -> k         linear_split_cat -+-> k
                      +- [..., P:] ----> v   =>  k_pe +                 +-> v
    k_pe ----------------------------+

k_pe are the rotated keys, expanded over the heads. The dimension of heads may be before that of
tokens, as in the classes of transformers.
"""

from itertools import product

import torch
from torch import Tensor

from atomc import ops
from atomc.ops.formats import FLOATS, FP8
from atomc.passes.typed_aten import transpose
from atomc.rewriting.example import Example, OneOf, tensor_example
from atomc.rewriting.rewrite import Case, Rewrite


def _pattern(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    k_pe: Tensor,
    nope: int,
    scheme: str,
    heads_first: bool,
    out: torch.dtype,
) -> tuple[Tensor, Tensor]:
    if scheme == "fp8":
        both = ops.scaled_linear_fp8(x, weight, x_scale, weight_scale, out_dtype=out)
    elif scheme == "fp8_block":
        both = ops.scaled_linear_fp8_block(x, weight, x_scale, weight_scale, out_dtype=out)
    else:
        both = ops.linear_mxfp4(x, weight, weight_scale, x_scale, out_dtype=out)
    if heads_first:
        batch, heads, tokens, _ = k_pe.shape
        both = both.view(batch, tokens, heads, -1).transpose(1, 2)
    else:
        both = both.view(*k_pe.shape[:-1], -1)
    return torch.cat((both[..., :nope], k_pe), -1), both[..., nope:]


def _replacement(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    k_pe: Tensor,
    nope: int,
    scheme: str,
    heads_first: bool,
    out: torch.dtype,
) -> tuple[Tensor, Tensor]:
    rotated = transpose(k_pe, 1, 2) if heads_first else k_pe
    results = ops.linear_split_cat(
        x, weight, x_scale, weight_scale, rotated, nope=nope, scheme=scheme, out_dtype=out
    )
    return (transpose(results[0], 1, 2), transpose(results[1], 1, 2)) if heads_first else results


def _example(scheme: str, heads_first: bool) -> Example:
    rows, spread = ((2, 1, 5), (2, 7, 5, 12)) if heads_first else ((5,), (5, 7, 12))
    operands = _mxfp4(rows) if scheme == "mxfp4" else _fp8(rows, scheme == "fp8_block")
    return {
        **operands,
        "k_pe": tensor_example(*spread),
        "nope": 17,
        "scheme": scheme,
        "heads_first": heads_first,
        "out": _MODELS,
    }


def _fp8(rows: tuple[int, ...], blocks: bool) -> Example:
    """x and the weight with their scales; seven heads of 31 outputs."""
    codes = OneOf(*FP8)
    of_x, of_weight = ((*rows, 3), (11, 3)) if blocks else ((1,), (1,))
    return {
        "x": tensor_example(*rows, 320, dtype=codes),
        "weight": tensor_example(217, 320, dtype=codes),
        "x_scale": tensor_example(*of_x, dtype=torch.float32),
        "weight_scale": tensor_example(*of_weight, dtype=torch.float32),
    }


def _mxfp4(rows: tuple[int, ...]) -> Example:
    shapes = {
        "x": (*rows, 48),
        "weight": (217, 48),
        "x_scale": (*rows, 3),
        "weight_scale": (217, 3),
    }
    return {name: tensor_example(*shape, dtype=torch.uint8) for name, shape in shapes.items()}


_MODELS = OneOf(*FLOATS)
_LINEARS = {
    "fp8": "scaled_linear_fp8",
    "fp8_block": "scaled_linear_fp8_block",
    "mxfp4": "linear_mxfp4",
}
LINEAR_SPLIT_CAT = Rewrite(
    "linear_split_cat",
    _pattern,
    _replacement,
    _example,
    attrs=lambda scheme, **_: {"scheme": scheme},
    needs={"aten::cat": {}, "aten::expand": {}},
    cases=[
        Case(
            f"{scheme}{', heads before tokens' * first}",
            {"scheme": scheme, "heads_first": first},
            {linear: {"out_dtype": _MODELS}},
        )
        for (scheme, linear), first in product(_LINEARS.items(), (True, False))
    ],
)
