"""Recognize latent attention whose kv_b_proj is quantized, in the runtime.

    latent > quantizer > quantized linear > ...  =>  codes, scales > kv_b_weight -+
                                                     latent, ... -----------------+- mla_attention

The rest is as in passes/recognize/mla.py. The runtime then caches the latent, and multiplies by the
dequantized weight what it reads from there, which it does not quantize. So the result is not that
of the quantized product, but lacks the error of its activations. A user's program keeps the
quantized product.
"""

from itertools import product
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.ops.formats import FLOATS
from atomc.ops.schemes import Attributes
from atomc.passes.fuse.quantizers import FP8_CODES, QUANTIZERS, Quantizer
from atomc.passes.recognize import mla
from atomc.rewriting.example import Example, ExampleValue, OneOf, tensor_example
from atomc.rewriting.rewrite import Case, Needs, Rewrite


class _Linear(NamedTuple):
    """A quantized linear as models call it.

    scheme       that of kv_b_weight
    quantizer    of its activations, or None
    zeros        whether its weight has zero points
    """

    scheme: str
    quantizer: Quantizer | None = None
    zeros: bool = False

    @property
    def activations(self) -> str:
        """The format of what the weight is multiplied by: "fp8", "int8", "mxfp4" or ""."""
        return "" if self.quantizer is None else self.quantizer.scheme.split("_")[0]

    def needs(self, sparse: bool) -> Needs:
        quantizer = {} if self.quantizer is None else self.quantizer.needs
        masked: Needs = {"chosen_mask": {}} if sparse else {}
        operands = ("q", "k", "v", "kv", *["mask"] * sparse)
        return {**quantizer, **masked, _OPS[self.scheme]: {}, "attention": {"given": operands}}

    def __str__(self) -> str:
        rows = "16-bit rows" if self.quantizer is None else self.quantizer.scheme
        return f"{self.scheme}, {rows}{', zeros' * self.zeros}"


def _pattern(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    zeros: Tensor | None,
    x_scale: Tensor | None,
    kv: Tensor,
    chosen: Tensor | None,
    scale: float,
    heads_first: bool,
    linear: _Linear,
    out: torch.dtype | None = None,
    **captured: Unpack[Attributes],
) -> Tensor:
    both = _product(latent, weight, weight_scale, zeros, x_scale, linear, out, **captured)
    return mla.attended(q_nope, q_rope, both, k_rope, kv, chosen, scale, heads_first)


def _product(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    zeros: Tensor | None,
    x_scale: Tensor | None,
    linear: _Linear,
    out: torch.dtype | None = None,
    **captured: Unpack[Attributes],
) -> Tensor:
    if linear.scheme == "int4":
        return ops.linear_w4a16(x, weight, weight_scale, zeros, group=captured["group"])
    assert out is not None
    if linear.quantizer is None:
        return ops.linear_mxfp4(x, weight, weight_scale, out_dtype=out)
    codes, *scales = linear.quantizer(x, x_scale, **captured)
    scale = scales[0] if scales else x_scale
    assert scale is not None
    match linear.scheme:
        case "fp8":
            return ops.scaled_linear_fp8(codes, weight, scale, weight_scale, out_dtype=out)
        case "fp8_block":
            return ops.scaled_linear_fp8_block(codes, weight, scale, weight_scale, out_dtype=out)
        case "int8":
            return ops.scaled_linear_int8(codes, weight, scale, weight_scale, out_dtype=out)
    return ops.linear_mxfp4(codes, weight, weight_scale, scale, out_dtype=out)


def _replacement(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    zeros: Tensor | None,
    x_scale: Tensor | None,
    kv: Tensor,
    chosen: Tensor | None,
    scale: float,
    heads_first: bool,
    linear: _Linear,
    out: torch.dtype | None = None,
    **captured: Unpack[Attributes],
) -> Tensor:
    dequantized = ops.kv_b_weight(
        weight,
        weight_scale,
        zeros,
        scheme=linear.scheme,
        activations=linear.activations,
        group=captured.get("group", 128),
        dtype=out,
    )
    return mla.replacement(
        q_nope, q_rope, latent, k_rope, dequantized, kv, chosen, scale, heads_first
    )


def _example(linear: _Linear, heads_first: bool, sparse: bool) -> Example:
    # The result of the product is in the model's dtype, here and so at every site.
    codes, columns, scales = _STORED[linear.scheme]
    quantizer = linear.quantizer
    captured = {} if quantizer is None else dict(quantizer.captured)
    return {
        **mla.rows_example(heads_first, _LATENT, sparse),
        "weight": tensor_example(259, columns, dtype=codes),
        "weight_scale": scales,
        "zeros": tensor_example(259, 11, dtype=torch.uint8) if linear.zeros else None,
        "x_scale": tensor_example(1, dtype=torch.float32)
        if quantizer is not None and quantizer.is_static
        else None,
        "linear": linear,
        **captured,
        **({"group": 32} if linear.scheme == "int4" else {"out": OneOf(*FLOATS)}),
    }


def _attrs(linear: _Linear, **_: object) -> dict[str, str]:
    return {"scheme": linear.scheme}


_LATENT = 352
_OPS = {
    "fp8": "scaled_linear_fp8",
    "fp8_block": "scaled_linear_fp8_block",
    "int8": "scaled_linear_int8",
    "int4": "linear_w4a16",
    "mxfp4": "linear_mxfp4",
}
# Scheme: dtype and columns of its codes, and its scales. fp8 is that of the quantizer.
_STORED: dict[str, tuple[torch.dtype | OneOf[torch.dtype], int, ExampleValue]] = {
    "fp8": (FP8_CODES, _LATENT, tensor_example(1, dtype=torch.float32)),
    "fp8_block": (FP8_CODES, _LATENT, tensor_example(11, 3, dtype=torch.float32)),
    "int8": (torch.int8, _LATENT, tensor_example(259, 1, dtype=torch.float32)),
    "int4": (torch.int32, _LATENT // 8, tensor_example(259, 11)),
    "mxfp4": (torch.uint8, _LATENT // 2, tensor_example(259, 11, dtype=torch.uint8)),
}
_QUANTIZERS = {quantizer.scheme: quantizer for quantizer in QUANTIZERS}
_LINEARS = (
    _Linear("fp8_block", _QUANTIZERS["fp8_group"]),
    _Linear("fp8", _QUANTIZERS["fp8_per_token"]),
    _Linear("fp8", _QUANTIZERS["fp8_static"]),
    _Linear("int8", _QUANTIZERS["int8_per_token"]),
    _Linear("mxfp4", _QUANTIZERS["mxfp4"]),
    _Linear("mxfp4", _QUANTIZERS["fp8_per_token"]),
    _Linear("mxfp4"),
    _Linear("int4"),
    _Linear("int4", zeros=True),
)
MLA_QUANTIZED = Rewrite(
    "mla_attention",
    _pattern,
    _replacement,
    _example,
    guard=mla.guard,
    attrs=_attrs,
    variant="quantized",
    paged=True,
    needs={"aten::cat": {}, "aten::expand": {}},
    cases=[
        Case(
            f"{linear}, {'heads before tokens' if first else 'tokens before heads'}"
            f"{', of chosen keys' * sparse}",
            {"linear": linear, "heads_first": first, "sparse": sparse},
            linear.needs(sparse),
        )
        for sparse, linear, first in product((False, True), _LINEARS, (False, True))
    ],
)
