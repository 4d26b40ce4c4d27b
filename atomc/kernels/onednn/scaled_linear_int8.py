"""Linear layers in int8 by oneDNN: exact sums, scaled in fp32. T rows, K inputs, N outputs."""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal
from atomc.kernels.cpu_linears import finish, unlike_int8
from atomc.kernels.row_views import as_rows
from atomc.ops.op import Prepared, Refusal
from atomc.platform import Platform

# Zen 4, one thread, speedup over F.linear in fp32 (and that of the unpacked kernel) at 2048x1024
# and 4096x4096. 1 row: 1.7 (2.1), 2.3 (3.3); 2: 2.4 (2.4), 4.2 (1.2); 8: 3.1 (2.6), 7.5 (1.7); 64:
# 4.2 (3.3), 6.6 (3.6); 256: 4.2 (4.1), 5.1 (4.2).
FEWEST_ROWS = 2


def _without_vnni(platform: Platform) -> Refusal | None:
    if platform.has("avx512_vnni") or platform.has("avx_vnni"):
        return None
    return Refusal(
        "hardware",
        "without VNNI, oneDNN sums int8 products inexactly or slowly",
    )


refuse_scaled_linear_int8 = first_refusal(unlike_int8, _without_vnni)


def _packed(weight: Tensor) -> Prepared:
    """[N, K] in oneDNN's blocked layout, and zero points, which are all 0."""
    zeros = torch.zeros(weight.shape[0], dtype=torch.int32)
    return Prepared((torch.ops.onednn.qlinear_prepack(weight.detach(), None), zeros))


@ops.scaled_linear_int8.kernel(
    "onednn",
    tokens=ops.Tokens(FEWEST_ROWS),
    refuses=refuse_scaled_linear_int8,
    prepare={"weight": _packed},
)
def scaled_linear_int8(
    x: Tensor,
    weight: tuple[Tensor, Tensor],
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    packed, zeros = weight
    # oneDNN's kernel for signed activations is a hundred times slower: pass code + 128 unsigned,
    # with the zero point 128.
    rows = as_rows(x).contiguous().view(torch.uint8) ^ 128
    total = torch.ops.onednn.qlinear_pointwise(
        rows,
        1.0,
        128,
        packed,
        weight_scale.flatten(),
        zeros,
        None,
        1.0,
        0,
        torch.float32,
        "none",
        [],
        "",
    )
    return finish(total, x, x_scale, bias, out_dtype)
