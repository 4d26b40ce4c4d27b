"""Mixtures of experts for few tokens with unquantized weights, in Triton; see experts_decode.py."""

from typing import Unpack

from torch import Tensor

from atomc import ops
from atomc.graph.sizes import known_equal
from atomc.kernels.checks import first_refusal, unlike, unsupported
from atomc.kernels.triton.experts.experts_decode import (
    FEW,
    Form,
    Stored,
    compute,
    refuse_more_tokens,
    unfit,
    up_to_half,
)
from atomc.kernels.triton.launch.tile_table import ExpertsFewTile
from atomc.kernels.triton.launch.tiles import EXPERTS_FEW
from atomc.kernels.triton.rows.gate import GateConstants
from atomc.ops.experts import ExpertOperands, Gate
from atomc.ops.formats import FLOATS
from atomc.ops.op import Refusal

# Rows are contiguous, not columns: 64 of them, 128 bytes, a program. A token of GPT-OSS takes 74 us
# (H200), and 55 with the kernels for many tokens, so that this is for results that must not depend
# on the number of tokens.
TRANSPOSED = ExpertsFewTile(8192, 4096, 128, 8, apart=True)


def _order(weight: Tensor) -> str | None:
    """Which of the last two dimensions is contiguous, "columns" or "rows"."""
    if known_equal(weight.stride(2), 1):
        return "columns"
    return "rows" if known_equal(weight.stride(1), 1) else None


def refuse_order(w13: Tensor) -> Refusal | None:
    if _order(w13) == "rows":
        return Refusal("slower", "the rows of the weights are contiguous, not their columns")
    return None


def unfit_weights(
    x: Tensor, w13: Tensor, w2: Tensor, b13: Tensor | None, b2: Tensor | None, weight_on_input: bool
) -> Refusal | None:
    if _order(w13) is None or _order(w13) != _order(w2):
        return Refusal("layout", "neither the rows nor the columns of both weights are contiguous")
    return unlike(FLOATS, x=x, w13=w13, w2=w2, b13=b13, b2=b2) or unsupported(
        "the kernel for few tokens", weight_on_input=weight_on_input
    )


@ops.moe_experts.kernel(
    "triton",
    tokens=FEW,
    limit=up_to_half,
    refuses=first_refusal(refuse_order, refuse_more_tokens, unfit, unfit_weights),
    tuned_for=EXPERTS_FEW.archs,
)
def moe_experts(**operands: Unpack[ExpertOperands]) -> Tensor:
    return compute_tiled(len(operands["x"]), **operands)


def compute_tiled(
    tokens: int,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    **gate: Unpack[Gate],
) -> Tensor:
    """The op, with the tile for this number of tokens."""
    up, down = Stored(w13, bias=b13), Stored(w2, bias=b2)
    by_columns = _order(w13) == "columns"
    tile = EXPERTS_FEW.choose(x.device, tokens) if by_columns else TRANSPOSED
    constants = GateConstants(**gate)
    return compute(x, ids, weights, up, down, Form("numbers"), constants, x.dtype, tile)
