"""The quantizers that fused ops take in: one entry per op and set of attributes that a site may have."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atomc import ops
from atomc.ops.formats import FP8, MX_ROUNDINGS


@dataclass(frozen=True)
class Quantizer:
    """One way to quantize a result.

    op          its op
    attributes  those of the op's node; the rounding of MXFP4 is captured, whichever it is
    fused       the keyword arguments by which a fused op does the same
    """

    op: ops.Op
    scheme: str
    attributes: Mapping[str, Any]
    fused: Mapping[str, Any]

    @property
    def is_static(self) -> bool:
        return self.scheme == "fp8_static"

    @property
    def needs(self) -> dict[str, Mapping[str, Any]]:
        """For Rewrite.needs."""
        return {self.op.name: self.attributes}

    @property
    def name(self) -> str:
        """The scheme with its attributes, to tell variants apart."""
        return " ".join([self.scheme, *(f"{key}={found}" for key, found in self.attributes.items())])

    def __call__(self, y: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
        """Its results: codes, and scales unless they are given."""
        if self.is_static:
            return (self.op(y, scale, **self.attributes),)
        return tuple(self.op(y, **self.attributes))

    def results(self, made: Any, further: Sequence[int]) -> Any:
        """What a fused op returns in place of these results and its own `further` ones."""
        found = tuple(made[i] for i in [*([0] if self.is_static else [0, 1]), *further])
        return found if len(found) > 1 else found[0]

    def with_scale(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose last argument is a scale, as it is if this quantizer needs one, else without it."""
        if self.is_static:
            return function
        parameters = list(inspect.signature(function).parameters.values())[:-1]

        def without(**given: Any) -> Any:
            return function(**given, scale=None)

        without.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return without


def _all() -> list[Quantizer]:
    found = []
    for dtype in FP8:
        fp8 = {"dtype": dtype}
        found += [Quantizer(ops.quant_fp8_static, "fp8_static", fp8, fp8),
                  Quantizer(ops.quant_fp8_per_token, "fp8_per_token", fp8, fp8)]  # fmt: skip
        for column_major in (False, True):
            attributes = {"group": 128, "column_major_scales": column_major, **fp8}
            fused = {"group": 128, "column_major": column_major, **fp8}
            found.append(Quantizer(ops.quant_fp8_group, "fp8_group", attributes, fused))
    found += [Quantizer(ops.quant_mxfp4, "mxfp4", {"rounding": name}, {"rounding": name}) for name in MX_ROUNDINGS]
    return [*found, Quantizer(ops.quant_int8_per_token, "int8_per_token", {}, {})]


QUANTIZERS = _all()


def scale_example() -> Tensor:
    """The scale of a static quantizer in an example."""
    return torch.empty(1, dtype=torch.float32)
