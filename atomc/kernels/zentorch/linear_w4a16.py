"""Linear layers with int4 weights and bf16 activations by zentorch. T rows, K inputs, N outputs, G
groups.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal
from atomc.kernels.cpu_linears import unlike_int4
from atomc.kernels.row_views import as_rows, with_lead
from atomc.kernels.zentorch.library import function, unfit, unpacked
from atomc.ops.op import Prepared, Refusal

# Zen 4, one thread, speedup over F.linear in fp32 (and that of PyTorch's kernel) at 2048x1024 and
# 4096x4096. 1 row: 2.6 (4.2), 2.3 (3.6); 8: 2.2 (2.7), 3.0 (3.5); 16: 1.8 (1.9), 2.0 (2.0); 32: 1.4
# (1.4), 1.7 (1.6); 256: 2.5 (1.1), 2.7 (1.1).
FEWEST_ROWS = 32


def _group_major(weight_scale: Tensor, zeros: Tensor | None) -> Prepared:
    """Scales and zero points [N, G] as [G, N]; the zero points are 8 for layers without."""
    scale = weight_scale.detach().t().contiguous()
    zero = (
        torch.full_like(scale, 8, dtype=torch.int8)
        if zeros is None
        else zeros.detach().t().to(torch.int8).contiguous()
    )
    return Prepared((scale, zero))


def _other_dtypes(x: Tensor, bias: Tensor | None) -> Refusal | None:
    if x.dtype != torch.bfloat16:
        return Refusal("dtype", f"x is {x.dtype}: zentorch has this for torch.bfloat16")
    if bias is not None and bias.dtype not in (torch.bfloat16, torch.float32):
        return Refusal(
            "dtype",
            f"the bias is {bias.dtype}: zentorch has this for torch.bfloat16 and torch.float32",
        )
    return None


refuse_linear_w4a16 = first_refusal(
    _other_dtypes, unlike_int4, lambda platform: unfit(platform, "int4")
)


PREPARE: dict[str | tuple[str, ...], Callable[..., Prepared]] = {
    "weight": unpacked,
    ("weight_scale", "zeros"): _group_major,
}


def multiply(
    x: Tensor, weight: tuple[Tensor], weight_scale: tuple[Tensor, Tensor], bias: Tensor | None
) -> Tensor:
    """linear_w4a16 of prepared weights."""
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], weight[0].shape[0]))
    scale, zero = weight_scale
    rows = as_rows(x)
    # The order of codes is that of atomc; it takes words as [K/8, N].
    out: Tensor = function("zentorch_woq_linear")(rows, weight[0].t(), scale, zero, bias)
    return with_lead(out, x)


@ops.linear_w4a16.kernel(
    "zentorch",
    tokens=ops.Tokens(FEWEST_ROWS),
    refuses=refuse_linear_w4a16,
    prepare=PREPARE,
    keeps_original=True,
)
def linear_w4a16(
    x: Tensor, weight: tuple[Tensor], weight_scale: tuple[Tensor, Tensor], bias: Tensor | None
) -> Tensor:
    return multiply(x, weight, weight_scale, bias)
