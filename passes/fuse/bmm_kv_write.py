"""Fuse the product that maps queries into the latent space with their rotation and the write
(DeepSeek's latent attention).

    q_nope > quantizer > bmm -+
    q_pe ---------------------+- mla_rope_kv_write -> q, token
    kv_c, k_pe ---------------+
 =>
    q_nope, q_pe, kv_c, k_pe > bmm_rope_kv_write -> q, token

The product is in fp8, with activations in groups of 128 and one scale for the weight, or in MXFP4.
"""

from itertools import product
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.ops.formats import FLOATS, FP8
from atomc.passes.fuse.mla_kv_write import example
from atomc.rewriting.example import Example, OneOf, tensor_example
from atomc.rewriting.rewrite import Case, Rewrite


class _CodeAttributes(TypedDict, total=False):
    """Attributes of the quantizer: dtype in fp8, rounding in MXFP4."""

    dtype: torch.dtype
    rounding: str


def _pattern(
    q_nope: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    scale: Tensor | None,
    rope_style: str,
    scheme: str,
    out: torch.dtype,
    **captured: Unpack[_CodeAttributes],
) -> tuple[Tensor, Tensor]:
    if scheme == "fp8":
        codes, scales = ops.quant_fp8_group(q_nope, 128, False, dtype=captured["dtype"])
        latent = ops.scaled_bmm_fp8(codes, weight, scales, weight_scale, out_dtype=out)
    else:
        codes, scales = ops.quant_mxfp4(q_nope, rounding=captured["rounding"])
        latent = ops.bmm_mxfp4(codes, weight, scales, weight_scale, out_dtype=out)
    return ops.mla_rope_kv_write(
        latent, q_pe, kv_c, k_pe, cos, sin, kv_cache, slots, scale, rope_style
    )


def _example(scheme: str, scaled: bool) -> Example:
    # The result of the product is in the model's dtype, here and so at every site.
    return {
        **example(scaled),
        **({} if scaled else {"scale": None}),
        "q_nope": tensor_example(5, 7, 64),
        **(_fp8() if scheme == "fp8" else _mxfp4()),
        "scheme": scheme,
        "out": _MODELS,
    }


def _fp8() -> Example:
    dtype = OneOf(*FP8)
    return {
        "weight": tensor_example(7, 22, 64, dtype=dtype),
        "weight_scale": tensor_example(1, dtype=torch.float32),
        "dtype": dtype,
    }


def _mxfp4() -> Example:
    return {
        "weight": tensor_example(7, 22, 32, dtype=torch.uint8),
        "weight_scale": tensor_example(7, 22, 2, dtype=torch.uint8),
        "rounding": "even",
    }


_MODELS = OneOf(*FLOATS)
_PRODUCTS = {"mxfp4": "bmm_mxfp4", "fp8": "scaled_bmm_fp8"}
BMM_ROPE_KV_WRITE = Rewrite(
    "bmm_rope_kv_write",
    _pattern,
    ops.bmm_rope_kv_write,
    _example,
    attrs=lambda scheme, **_: {"scheme": scheme},
    cases=[
        Case(
            f"{scheme}{', fp8 cache' * scaled}",
            {"scheme": scheme, "scaled": scaled},
            {_PRODUCTS[scheme]: {"out_dtype": _MODELS}},
        )
        for scaled, scheme in product((False, True), _PRODUCTS)
    ],
)
