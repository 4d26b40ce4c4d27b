"""The tables of rotary positions (Su et al. 2021), which `rope` reads. n frequencies."""

import torch
from torch import Tensor

from atomc.ops.op import op
from atomc.ops.op_traits import Kind

TABLE_STYLES = ("neox", "half", "pairs")


@op(kind=Kind.OTHER, rows=None, rounds_once=lambda _: True)
def rotary_tables(
    positions: Tensor,
    inv_freq: Tensor,
    style: str = "neox",
    scaling: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """scaling * cos and scaling * sin of positions * inv_freq, computed in fp32, rounded to dtype.

    positions  [..., 1], or [..., n] if frequencies have positions of their own
    inv_freq   [n], radians per position
    style      of the `rope` that reads them: "half" has each angle once, [..., n]; "neox" all of
               them twice and "pairs" each of them twice, [..., 2n]
    """
    angles = positions.float() * inv_freq.float()
    if style == "neox":
        angles = torch.cat((angles, angles), -1)
    elif style == "pairs":
        angles = angles.repeat_interleave(2, -1)
    elif style != "half":
        raise ValueError(f"rotary_tables: style {style!r} is not one of {TABLE_STYLES}")
    angles = angles.contiguous()
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)
