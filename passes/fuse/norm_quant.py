"""A norm quantizes its own result; if that is read elsewhere, it writes it too.

    x > rms_norm > y -+- quantizer -> codes, scales        x > rms_norm_quant -+-> codes, scales
                      +-> y                          =>                        +-> y

    x, r > add_rms_norm -+- quantizer -> codes, scales     x, r > add_rms_norm_quant -+-> codes, scales
                         +-> sum                     =>                               +-> sum
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atomc import ops
from atomc.passes.fuse.quantizers import QUANTIZERS, Quantizer, scale_example
from atomc.rewrite import Rewrite, tensor_example

# Dtype of the weight, and a style with which the result's dtype is as with any other of its kind.
WEIGHTS = ((torch.bfloat16, "after"), (torch.float32, "after"), (torch.float32, "before"))


def _alone(quantizer: Quantizer, keep: bool) -> tuple[Any, Any]:
    def pattern(x: Tensor, weight: Tensor, eps: float, style: str, scale: Tensor | None) -> Any:
        y = ops.rms_norm(x, weight, eps, style)
        return (*quantizer(y, scale), y) if keep else quantizer(y, scale)

    def replacement(x: Tensor, weight: Tensor, eps: float, style: str, scale: Tensor | None) -> Any:
        made = ops.rms_norm_quant(x, weight, eps, scale, style, scheme=quantizer.scheme, keep=keep, **quantizer.fused)
        return quantizer.results(made, [2] * keep)

    return pattern, replacement


def _behind_add(quantizer: Quantizer, keep: bool) -> tuple[Any, Any]:
    def pattern(x: Tensor, residual: Tensor, weight: Tensor, eps: float, style: str, scale: Tensor | None) -> Any:
        y, total = ops.add_rms_norm(x, residual, weight, eps, style)
        return (*quantizer(y, scale), total, y) if keep else (*quantizer(y, scale), total)

    def replacement(x: Tensor, residual: Tensor, weight: Tensor, eps: float, style: str, scale: Tensor | None) -> Any:
        made = ops.add_rms_norm_quant(x, residual, weight, eps, scale, style, scheme=quantizer.scheme, keep=keep,
                                      **quantizer.fused)  # fmt: skip
        return quantizer.results(made, [2, 3] if keep else [2])

    return pattern, replacement


def _rewrites(name: str, functions: Any, residual: bool) -> Iterator[Rewrite]:
    for quantizer in QUANTIZERS:
        for keep in (False, True):
            pattern, replacement = map(quantizer.with_scale, functions(quantizer, keep))
            for dtype, style in WEIGHTS:
                example = {"x": tensor_example(3, 64), **({"residual": tensor_example(3, 64)} if residual else {}),
                           "weight": tensor_example(64, dtype=dtype), "eps": 1e-6, "style": style}  # fmt: skip
                if quantizer.is_static:
                    example["scale"] = scale_example()
                yield Rewrite(name, pattern, replacement, partial(dict, example),
                              variant=f"{quantizer.name}{', kept' * keep}, {dtype} weight, {style}",
                              attrs={"scheme": quantizer.scheme, **({"keep": True} if keep else {})},
                              needs=quantizer.needs)  # fmt: skip


RMS_NORM_QUANT = list(_rewrites("rms_norm_quant", _alone, residual=False))
ADD_RMS_NORM_QUANT = list(_rewrites("add_rms_norm_quant", _behind_add, residual=True))
