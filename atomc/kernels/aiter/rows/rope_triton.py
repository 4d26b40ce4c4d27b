"""Rotary positions by AITER's Triton kernel: all columns, or half of them, and a power of two."""

from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.library import Function, installed
from atomc.kernels.aiter.rows.rope import (
    ROTATIONS,
    empty_rotated,
    rotated_width,
    table_dimension,
    table_rows,
    token_view,
    unrotatable,
)
from atomc.kernels.checks import first_refusal
from atomc.ops.op import Refusal

triton_rope_cached_fwd = Function(
    "rope_cached_fwd", "aiter.ops.triton.rope.rope", "aiter.ops.triton.rope"
)


def _other_width(x: Tensor, cos: Tensor, style: str) -> Refusal | None:
    width, rotated = x.shape[-1], rotated_width(cos, style)
    if rotated not in (width, width // 2) or rotated & (rotated - 1):
        return Refusal(
            "shape",
            f"{rotated} of {width} columns rotate: AITER's Triton kernel rotates all or half, "
            "a power of two",
        )
    return None


@ops.rope.kernel(
    "aiter",
    refuses=first_refusal(installed(triton_rope_cached_fwd), unrotatable, _other_width),
    rounds="once",
)
def rope(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    out = empty_rotated(x, cos, style)
    if x.numel():
        dimension = table_dimension(x, cos)
        assert dimension is not None
        rotated = triton_rope_cached_fwd(
            token_view(x, dimension),
            table_rows(cos),
            table_rows(sin),
            ROTATIONS[style],
            style != "neox",
            False,
        )
        token_view(out, dimension).copy_(rotated)
    return out
