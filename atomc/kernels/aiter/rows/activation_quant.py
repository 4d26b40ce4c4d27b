"""SiLU * up whose product AITER's HIP kernel quantizes: fp8 in groups, MXFP4 with scales rounded
up. The product stays in fp32 until it is quantized.
"""

from typing import Unpack

from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.library import Function, installed, side_by_side
from atomc.kernels.aiter.linear.packing import e2m1_view
from atomc.kernels.aiter.rows.activation import halves_of_rows
from atomc.kernels.aiter.rows.norm import MAX_COLUMNS
from atomc.kernels.aiter.rows.norm_quant import empty_outputs, groupless, unfit_codes
from atomc.kernels.checks import first_refusal, too_wide
from atomc.kernels.row_views import as_rows, with_lead
from atomc.ops.op import Refusal
from atomc.ops.schemes import SchemeArguments

aiter_silu_and_mul_quant = Function(
    "silu_and_mul_quant", "aiter", takes=["group_size", "shuffle_scale"]
)


def _ungrouped(scheme: str) -> Refusal | None:
    if scheme in ("fp8_group", "mxfp4"):
        return None
    return Refusal("argument", f"AITER's compiled activation does not quantize as {scheme}")


@ops.silu_and_mul_quant.kernel(
    "aiter",
    refuses=first_refusal(
        installed(aiter_silu_and_mul_quant),
        _ungrouped,
        halves_of_rows,
        lambda gate: too_wide(gate.shape[-1], MAX_COLUMNS),
        lambda gate: groupless(gate.shape[-1]),
        lambda platform, gate, scheme, dtype, group, rounding: unfit_codes(
            platform, gate, scheme, dtype, group, rounding
        ),
    ),
    rounds="once",
)
def silu_and_mul_quant(
    gate: Tensor, up: Tensor, **how: Unpack[SchemeArguments]
) -> tuple[Tensor, Tensor]:
    mxfp4 = how["scheme"] == "mxfp4"
    by_column = how["column_major"] and not mxfp4
    codes, scales, size = empty_outputs(
        as_rows(gate), how["scheme"], how["dtype"], how["group"], by_column
    )
    if gate.numel():
        aiter_silu_and_mul_quant(
            e2m1_view(codes) if mxfp4 else codes,
            side_by_side(gate, up),
            scales,
            size,
            shuffle_scale=by_column,
        )
    return with_lead(codes, gate), with_lead(scales.t() if by_column else scales, gate)
