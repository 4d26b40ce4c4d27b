"""The quantizers of schemes in Triton, with the codes of the references."""

from torch import Tensor

from atomc.kernels.moe.schemes import ExpertsScheme, Fp8PerBlock, Fp8PerToken, Int8PerToken
from atomc.kernels.triton.rows.quant import (
    quant_fp8_group,
    quant_fp8_per_token,
    quant_int8_per_token,
)


def quantize(scheme: ExpertsScheme, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Codes and scales of x, as ExpertsScheme.quantize."""
    if isinstance(scheme, Fp8PerBlock):
        return quant_fp8_group(x, scheme.block, dtype=scheme.dtype)
    if isinstance(scheme, Fp8PerToken):
        return quant_fp8_per_token(x, scheme.dtype)
    if isinstance(scheme, Int8PerToken):
        return quant_int8_per_token(x)
    return scheme.quantize(x)
