"""Linear layers of few rows with int4 weights by zentorch, where PyTorch's kernel, which is faster,
does not support the arguments.
"""

from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal
from atomc.kernels.cpu_linears import refuse_int4pack
from atomc.kernels.zentorch import linear_w4a16 as for_many
from atomc.ops.op import Refusal
from atomc.platform import Platform


def _refuse_slower(platform: Platform, **arguments: object) -> Refusal | None:
    if "zentorch" in platform.asked or refuse_int4pack(platform, **arguments):
        return None
    return Refusal(
        "slower", f"PyTorch's own kernel is faster for fewer than {for_many.FEWEST_ROWS} rows"
    )


@ops.linear_w4a16.kernel(
    "zentorch",
    refuses=first_refusal(for_many.refuse_linear_w4a16, _refuse_slower),
    prepare=for_many.PREPARE,
    keeps_original=True,
)
def linear_w4a16(
    x: Tensor, weight: tuple[Tensor], weight_scale: tuple[Tensor, Tensor], bias: Tensor | None
) -> Tensor:
    return for_many.multiply(x, weight, weight_scale, bias)
