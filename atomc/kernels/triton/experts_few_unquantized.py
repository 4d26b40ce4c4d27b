"""Mixtures of experts for few tokens with unquantized weights, in Triton; see experts_few.py."""

from torch import Tensor

from atomc import ops
from atomc.graph.sizes import known_equal
from atomc.kernels.checks import unlike, unsupported
from atomc.kernels.triton.experts_few import FEW, Form, Gate, Stored, compute, unfit_call
from atomc.kernels.triton.tiles import EXPERTS_FEW, EXPERTS_FEW_TRANSPOSED
from atomc.ops.formats import FLOATS
from atomc.ops.op import Refusal
from atomc.platform import Platform


def _order(weight: Tensor) -> str | None:
    """Which of the last two dimensions is contiguous, "columns" or "rows"."""
    if known_equal(weight.stride(2), 1):
        return "columns"
    return "rows" if known_equal(weight.stride(1), 1) else None


def refuse_moe_experts_few(
    platform: Platform,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    *,
    activation: str = "silu",
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float | None = None,
    weight_on_input: bool = False,
) -> Refusal | None:
    if reason := unfit_call(platform, x, ids, weights, w13, w2, b13, b2, activation):
        return reason
    if _order(w13) is None or _order(w13) != _order(w2):
        return Refusal("layout", "neither the rows nor the columns of both weights are contiguous")
    return unlike(FLOATS, x=x, w13=w13, w2=w2, b13=b13, b2=b2) or unsupported(
        "the kernel for few tokens", weight_on_input=weight_on_input
    )


@ops.moe_experts.kernel(
    "triton", tokens=FEW, refuses=refuse_moe_experts_few, tuned_for=EXPERTS_FEW.archs
)
def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    *,
    activation: str = "silu",
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float | None = None,
    weight_on_input: bool = False,
) -> Tensor:
    table = EXPERTS_FEW if _order(w13) == "columns" else EXPERTS_FEW_TRANSPOSED
    return compute(
        x,
        None,
        ids,
        weights,
        Stored(w13, None, None, b13),
        Stored(w2, None, None, b2),
        Form("numbers"),
        Gate(activation, interleaved, alpha, limit),
        x.dtype,
        table.choose(x.device, len(x)),
    )
