"""Linear layers with int4 weights and bf16 activations, by PyTorch's kernel, which has its own
order of codes.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.cpu_linears import refuse_int4pack
from atomc.kernels.row_views import as_rows, with_lead
from atomc.ops.formats import unpack_int4
from atomc.ops.op import Prepared

# Zen 4, one thread, speedup over F.linear in fp32 at 2048x1024 and 4096x4096. 1 row: 4.0, 3.7; 8:
# 2.7, 3.5; 64: 1.3, 1.6; 256: 1.1, 1.1. The reference compiled by Inductor, at 2560x2560: 0.4 with
# 1 row, 0.7 with 64.
MOST_ROWS = 128


def _packed(weight: Tensor) -> Prepared:
    """[N, K/8] int32 as [N, K/2] uint8 in the order of the kernel; the same number of bytes."""
    # The number of inner tiles, 1, is used on a GPU only.
    return Prepared(
        (torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpack_int4(weight.detach()), 1),),
    )


def _scales_and_zeros(weight_scale: Tensor, zeros: Tensor | None) -> Prepared:
    """[G, N, 2] bf16. The kernel computes (q - 8) * scale + zero of a code q, the op (q - z) *
    scale.
    """
    scale = weight_scale.detach().t()
    zero = (
        torch.zeros_like(scale)
        if zeros is None
        else (8.0 - zeros.detach().t().to(torch.float32)) * scale
    )
    return Prepared((torch.stack((scale, zero.to(scale.dtype)), -1).contiguous(),))


@ops.linear_w4a16.kernel(
    "onednn",
    tokens=ops.Tokens(1, MOST_ROWS),
    refuses=refuse_int4pack,
    prepare={"weight": _packed, ("weight_scale", "zeros"): _scales_and_zeros},
)
def linear_w4a16(
    x: Tensor, weight: tuple[Tensor], weight_scale: tuple[Tensor], bias: Tensor | None, group: int
) -> Tensor:
    rows = as_rows(x)
    out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        rows.contiguous(), weight[0], group, weight_scale[0]
    )
    if bias is not None:
        out.add_(bias)
    return with_lead(out, x)
