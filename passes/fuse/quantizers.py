"""The quantizers that fused ops take in: one for each op that quantizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from atomc import ops
from atomc.ops.formats import FP8, MX_ROUNDINGS
from atomc.rewriting.matching.captures import OneOf
from atomc.rewriting.rewrite import tensor_example


@dataclass(frozen=True, eq=False)
class Quantizer:
    """One way to quantize a result.

    op       its op
    decided  attributes of which a site decides, by the names that they have as arguments of fused
             ops
    fixed    attributes that the op's node must have
    renamed  what the quantizer's op calls an argument of fused ops
    """

    op: ops.Op
    scheme: str
    decided: Mapping[str, OneOf]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_static(self) -> bool:
        return self.scheme == "fp8_static"

    @property
    def needs(self) -> dict[str, Mapping[str, Any]]:
        """For Case.needs."""
        return {self.op.name: self._attributes(self.decided)}

    def example(self) -> dict[str, Any]:
        """What a site decides; a scale is absent where the quantizer makes it."""
        return {
            "scale": tensor_example(1, dtype=torch.float32) if self.is_static else None,
            **self.decided,
        }

    def __call__(self, y: Tensor, scale: Tensor | None, **decided: Any) -> tuple[Tensor, ...]:
        """Its results: codes, and scales unless they are given."""
        attributes = self._attributes(decided)
        return (
            (self.op(y, scale, **attributes),)
            if self.is_static
            else tuple(self.op(y, **attributes))
        )

    def _attributes(self, decided: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **self.fixed,
            **{self.renamed.get(name, name): given for name, given in decided.items()},
        }

    def results(self, made: Any, further: Sequence[int]) -> Any:
        """What a fused op returns in place of these results and its own `further` ones."""
        found = tuple(made[i] for i in [*([0] if self.is_static else [0, 1]), *further])
        return found if len(found) > 1 else found[0]


_FP8 = {"dtype": OneOf(*FP8)}
QUANTIZERS = (
    Quantizer(ops.quant_fp8_static, "fp8_static", _FP8),
    Quantizer(ops.quant_fp8_per_token, "fp8_per_token", _FP8),
    Quantizer(
        ops.quant_fp8_group,
        "fp8_group",
        {"column_major": OneOf(False, True), **_FP8},
        {"group": 128},
        {"column_major": "column_major_scales"},
    ),
    Quantizer(ops.quant_mxfp4, "mxfp4", {"rounding": OneOf(*MX_ROUNDINGS)}),
    Quantizer(ops.quant_int8_per_token, "int8_per_token", {}),
)
