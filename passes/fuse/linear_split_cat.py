"""In the latent attention of DeepSeek, the product that makes keys and values writes them where they belong.

    x > linear > view +- [..., :P] --+            x --+
                      |              cat -> k         linear_split_cat -+-> k
                      +- [..., P:] ----> v   =>  k_pe +                 +-> v
    k_pe ----------------------------+

k_pe are the rotated keys, spread over the heads. Heads may lie before tokens, as they do in stock models.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from atomc import ops
from atomc.ops.formats import FP8
from atomc.rewrite import Rewrite, tensor_example

transpose = torch.ops.aten.transpose.int
_MODELS = (torch.bfloat16, torch.float16, torch.float32)


def _linear(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, scheme: str, out: torch.dtype) -> Any:
    if scheme == "fp8":
        return ops.scaled_linear_fp8(x, weight, x_scale, weight_scale, out_dtype=out)
    if scheme == "fp8_block":
        return ops.scaled_linear_fp8_block(x, weight, x_scale, weight_scale, out_dtype=out)
    return ops.linear_mxfp4(x, weight, weight_scale, x_scale, out_dtype=out)


def _pattern(scheme: str, out: torch.dtype) -> Callable[..., Any]:
    def pattern(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, k_pe: Tensor, nope: int) -> Any:
        both = _linear(x, weight, x_scale, weight_scale, scheme, out).view(*k_pe.shape[:-1], -1)
        return torch.cat((both[..., :nope], k_pe), -1), both[..., nope:]

    return pattern


def _replacement(scheme: str, out: torch.dtype) -> Callable[..., Any]:
    def replacement(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, k_pe: Tensor, nope: int) -> Any:
        return ops.linear_split_cat(x, weight, x_scale, weight_scale, k_pe, nope=nope, scheme=scheme, out_dtype=out)

    return replacement


def _heads_first_pattern(scheme: str, out: torch.dtype) -> Callable[..., Any]:
    def pattern(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, k_pe: Tensor, nope: int) -> Any:
        batch, heads, tokens, _ = k_pe.shape
        both = _linear(x, weight, x_scale, weight_scale, scheme, out).view(batch, tokens, heads, -1).transpose(1, 2)
        return torch.cat((both[..., :nope], k_pe), -1), both[..., nope:]

    return pattern


def _heads_first_replacement(scheme: str, out: torch.dtype) -> Callable[..., Any]:
    def replacement(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, k_pe: Tensor, nope: int) -> Any:
        made = ops.linear_split_cat(x, weight, x_scale, weight_scale, transpose(k_pe, 1, 2), nope=nope, scheme=scheme,
                                    out_dtype=out)  # fmt: skip
        return transpose(made[0], 1, 2), transpose(made[1], 1, 2)

    return replacement


def _operands(scheme: str, rows: tuple[int, ...], codes: torch.dtype) -> dict[str, Tensor]:
    """x and the weight with their scales; seven heads of 31 outputs."""
    if scheme == "mxfp4":
        return {"x": tensor_example(*rows, 48, dtype=codes), "weight": tensor_example(217, 48, dtype=codes),
                "x_scale": tensor_example(*rows, 3, dtype=codes),
                "weight_scale": tensor_example(217, 3, dtype=codes)}  # fmt: skip
    of_x, of_weight = ((*rows, 3), (11, 3)) if scheme == "fp8_block" else ((1,), (1,))
    return {"x": tensor_example(*rows, 320, dtype=codes), "weight": tensor_example(217, 320, dtype=codes),
            "x_scale": torch.ones(of_x), "weight_scale": torch.ones(of_weight)}  # fmt: skip


def _example(scheme: str, out: torch.dtype, codes: torch.dtype, heads_first: bool) -> dict[str, Any]:
    rows, spread = ((2, 1, 5), (2, 7, 5, 12)) if heads_first else ((5,), (5, 7, 12))
    return {**_operands(scheme, rows, codes), "k_pe": tensor_example(*spread, dtype=out), "nope": 17}


def _rewrite(scheme: str, out: torch.dtype, codes: torch.dtype, heads_first: bool) -> Rewrite:
    functions = (_heads_first_pattern, _heads_first_replacement) if heads_first else (_pattern, _replacement)
    linear = {"fp8": "scaled_linear_fp8", "fp8_block": "scaled_linear_fp8_block", "mxfp4": "linear_mxfp4"}[scheme]
    variant = f"{scheme} {codes}, {out}{', heads before tokens' * heads_first}"
    return Rewrite("linear_split_cat", functions[0](scheme, out), functions[1](scheme, out),
                   lambda: _example(scheme, out, codes, heads_first), variant=variant, attrs={"scheme": scheme},
                   needs={linear: {"out_dtype": out}, "aten::cat": {}, "aten::expand": {}})  # fmt: skip


_CODES = {"fp8": FP8, "fp8_block": FP8, "mxfp4": (torch.uint8,)}
LINEAR_SPLIT_CAT = [
    _rewrite(scheme, out, codes, heads_first)
    for scheme, out, heads_first in product(_CODES, _MODELS, (True, False)) for codes in _CODES[scheme]
]  # fmt: skip
