"""The products of one LoRA adapter of all rows, by a linear layer whose rows do not depend on
others.
"""

from collections.abc import Callable

from torch import Tensor

from atomc.ops.op import Refusal


def several(a: Tensor, rows: Tensor | None, widths: list[int] | None) -> Refusal | None:
    """Refuse adapters of rows, and those of layers that are merged."""
    if rows is None and widths is None and a.shape[0] == 1:
        return None
    return Refusal("argument", "written for one adapter of one layer, of all rows")


def adapted(
    linear: Callable[[Tensor, Tensor], Tensor],
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float,
) -> Tensor:
    """The op lora_linear, for what `several` does not refuse."""
    delta = linear(linear(x.to(a.dtype), a[0]), b[0].t())
    return (y + (delta if scale == 1.0 else delta * scale)).to(y.dtype)
