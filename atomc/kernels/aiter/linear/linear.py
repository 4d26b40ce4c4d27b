"""Linear layers in 16 bits by AITER's tuned products: hipBLASLt, assembly or skinny kernels, as its
tables say.
"""

from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.library import Function, gapped, installed
from atomc.kernels.checks import first_refusal, named, unlike
from atomc.kernels.row_views import as_rows, with_lead
from atomc.ops.formats import HALVES

gemm_a16w16 = Function("gemm_a16w16", "aiter.tuned_gemm", takes=["bias"])


@ops.linear.kernel(
    "aiter",
    refuses=first_refusal(
        installed(gemm_a16w16),
        named("x", unlike, HALVES),
        # Few rows go to a kernel that does not read strides; which ones, AITER's tables say.
        named("x weight", gapped),
    ),
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not x.numel():
        return x.new_empty((*x.shape[:-1], weight.shape[0]))
    return with_lead(gemm_a16w16(as_rows(x), weight, bias=bias), x)
