"""The quantizers that fused ops can contain: one for each op that quantizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.ops.formats import FP8, MX_ROUNDINGS
from atomc.ops.op import OpFunction
from atomc.ops.schemes import Attributes
from atomc.rewriting.example import Example, ExampleValue, OneOf, tensor_example


@dataclass(frozen=True, eq=False)
class Quantizer:
    """One way to quantize a result.

    op        its op
    captured  the attributes captured at a site, and their values
    group     columns per scale, if the scheme has groups; other groups are not fused
    renamed   argument of fused ops -> what the quantizer's op calls it, if that differs
    """

    op: OpFunction[..., Tensor | tuple[Tensor, Tensor]]
    scheme: str
    captured: Mapping[str, ExampleValue]
    group: int | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_static(self) -> bool:
        return self.scheme == "fp8_static"

    @property
    def needs(self) -> dict[str, Example]:
        """For Case.needs."""
        group: Example = {"group": self.group} if self.group else {}
        return {self.op.name: {self._name(of): x for of, x in {**group, **self.captured}.items()}}

    def example(self) -> Example:
        """The arguments besides the input; only a static quantizer takes a scale."""
        scale = tensor_example(1, dtype=torch.float32) if self.is_static else None
        return {"scale": scale, **self.captured}

    def __call__(
        self, y: Tensor, scale: Tensor | None, **captured: Unpack[Attributes]
    ) -> tuple[Tensor, ...]:
        """The results of the op: codes, and scales if it computes them."""
        operands = (y, scale) if self.is_static else (y,)
        results = self.op(
            *operands, **{self._name(of): x for of, x in self.attributes(captured).items()}
        )
        return results if isinstance(results, tuple) else (results,)

    def attributes(self, captured: Attributes) -> Attributes:
        """What a fused op is called with, besides the scheme."""
        return {"group": self.group, **captured} if self.group else captured

    def _name(self, argument: str) -> str:
        return self.renamed.get(argument, argument)

    def results(
        self, fused: tuple[Tensor, ...], further: Sequence[int]
    ) -> Tensor | tuple[Tensor, ...]:
        """What replaces the results of the quantizer, then the `further` results of a fused op."""
        selected = tuple(fused[i] for i in [*([0] if self.is_static else [0, 1]), *further])
        return selected if len(selected) > 1 else selected[0]


# The dtype of fp8 codes of all quantizers.
FP8_CODES = OneOf(*FP8)
_FP8 = {"dtype": FP8_CODES}
QUANTIZERS = (
    Quantizer(ops.quant_fp8_static, "fp8_static", _FP8),
    Quantizer(ops.quant_fp8_per_token, "fp8_per_token", _FP8),
    Quantizer(
        ops.quant_fp8_group,
        "fp8_group",
        {"column_major": OneOf(False, True), **_FP8},
        128,
        {"column_major": "column_major_scales"},
    ),
    Quantizer(ops.quant_mxfp4, "mxfp4", {"rounding": OneOf(*MX_ROUNDINGS)}),
    Quantizer(ops.quant_int8_per_token, "int8_per_token", {}),
)
