"""Linear layers in 16 bits by AITER's tuned products: hipBLASLt, assembly or skinny kernels, as its
tables say.
"""

from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.library import Function, gapped, unfit
from atomc.kernels.checks import unlike
from atomc.kernels.row_views import as_rows, with_lead
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal
from atomc.platform import Platform

gemm_a16w16 = Function("gemm_a16w16", "aiter.tuned_gemm", takes=["bias"])


def _refuse(platform: Platform, x: Tensor, weight: Tensor, bias: Tensor | None) -> Refusal | None:
    if reason := unfit(platform, gemm_a16w16) or unlike(HALVES, x=x, weight=weight, bias=bias):
        return reason
    # Few rows go to a kernel that does not read strides; which ones, AITER's tables say.
    return gapped(x=x, weight=weight)


@ops.linear.kernel("aiter", refuses=_refuse)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not x.numel():
        return x.new_empty((*x.shape[:-1], weight.shape[0]))
    return with_lead(gemm_a16w16(as_rows(x), weight, bias=bias), x)
