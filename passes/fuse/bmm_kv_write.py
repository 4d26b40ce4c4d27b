"""In the latent attention of DeepSeek, the product that brings queries to the latent space joins
rotation and write.

    q_nope > quantizer > bmm -+
    q_pe ---------------------+- mla_rope_kv_write -> q, token    =>    bmm_rope_kv_write -> q,
                                                                  token
    kv_c, k_pe ---------------+

The quantizer is that of the product: fp8 in groups of 128 under one scale of the weight, or MXFP4.
"""

from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor

from atomc import ops
from atomc.ops.formats import FP8
from atomc.passes.fuse.mla_kv_write import example
from atomc.rewriting.matching.captures import OneOf
from atomc.rewriting.rewrite import Case, Rewrite, tensor_example


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
    style: str,
    scheme: str,
    out: torch.dtype,
    **how: Any,
) -> tuple[Tensor, Tensor]:
    if scheme == "fp8":
        codes, scales = ops.quant_fp8_group(q_nope, 128, False, **how)
        latent = ops.scaled_bmm_fp8(codes, weight, scales, weight_scale, out_dtype=out)
    else:
        codes, scales = ops.quant_mxfp4(q_nope, **how)
        latent = ops.bmm_mxfp4(codes, weight, scales, weight_scale, out_dtype=out)
    q, token = ops.mla_rope_kv_write(
        latent, q_pe, kv_c, k_pe, cos, sin, kv_cache, slots, scale, style
    )
    return q, token


def _replacement(
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
    style: str,
    scheme: str,
    out: torch.dtype,
    **how: Any,
) -> Any:
    return ops.bmm_rope_kv_write(
        q_nope,
        weight,
        weight_scale,
        q_pe,
        kv_c,
        k_pe,
        cos,
        sin,
        kv_cache,
        slots,
        scale,
        scheme=scheme,
        rope_style=style,
        **how,
    )


def _example(scheme: str, scaled: bool) -> dict[str, Any]:
    # `out` is the dtype of what is multiplied: the product's result is in the model's dtype here,
    # and so at every site.
    return {
        **example(scaled),
        **({} if scaled else {"scale": None}),
        "q_nope": tensor_example(5, 7, 64),
        **(_fp8() if scheme == "fp8" else _mxfp4()),
        "scheme": scheme,
        "out": _MODELS,
    }


def _fp8() -> dict[str, Any]:
    dtype = OneOf(*FP8)
    return {
        "weight": tensor_example(7, 22, 64, dtype=dtype),
        "weight_scale": torch.ones(1),
        "dtype": dtype,
    }


def _mxfp4() -> dict[str, Any]:
    return {
        "weight": tensor_example(7, 22, 32, dtype=torch.uint8),
        "weight_scale": tensor_example(7, 22, 2, dtype=torch.uint8),
        "rounding": "even",
    }


def _attrs(scheme: str, **_: object) -> Mapping[str, Any]:
    return {"scheme": scheme}


_MODELS = OneOf(torch.bfloat16, torch.float16, torch.float32)
_PRODUCTS = {"mxfp4": "bmm_mxfp4", "fp8": "scaled_bmm_fp8"}
BMM_ROPE_KV_WRITE = Rewrite(
    "bmm_rope_kv_write",
    _pattern,
    _replacement,
    _example,
    attrs=_attrs,
    cases=[
        Case(
            f"{scheme}{', fp8 cache' * scaled}",
            {"scheme": scheme, "scaled": scaled},
            {_PRODUCTS[scheme]: {"out_dtype": _MODELS}},
        )
        for scaled, scheme in product((False, True), _PRODUCTS)
    ],
)
