"""Rotary positions by AITER's HIP kernel, in fp32, rounded once: each token has a row of the
tables.

S tokens, the one dimension in which the tables differ; B and H are the others of x.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.graph.sizes import known_equal
from atomc.kernels.aiter.library import Function, unfit
from atomc.kernels.checks import strided, unknown, unlike, wrong_rank
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal
from atomc.ops.rope import columns_per_angle
from atomc.platform import Platform

rope_cached_fwd_impl = Function("rope_cached_fwd_impl", "aiter")

# AITER's numbers of the pairs that rotate: the halves of a row, or neighbours in it.
ROTATIONS = {"neox": 0, "half": 0, "gptj": 1}


def rotated_width(cos: Tensor, style: str) -> int:
    """Columns of x that rotate."""
    return cos.shape[-1] * columns_per_angle(style)


def table_dimension(x: Tensor, cos: Tensor) -> int | None:
    """The one dimension of x in which the tables are as long as x; None if there are more."""
    lead = (1,) * (x.dim() - cos.dim()) + tuple(cos.shape[:-1])
    long = [d for d, size in enumerate(lead) if not known_equal(size, 1)]
    if not long:
        long = [d for d in range(x.dim() - 1) if known_equal(x.shape[d], 1)][:1]
    return long[0] if len(long) == 1 else None


def moving(rope_style: str) -> Refusal | None:
    """AITER writes a pair back where it was. Its pairs of neighbours have half-width tables."""
    return unknown(ROTATIONS, rope_style=rope_style)


def partly_rotated(width: int, cos: Tensor, style: str) -> Refusal | None:
    """Unless all columns of such rows rotate."""
    rotated = rotated_width(cos, style)
    if rotated == width:
        return None
    return Refusal("shape", f"{rotated} of {width} columns rotate: AITER's kernel rotates all")


def not_by_token(q: Tensor, cos: Tensor, sin: Tensor) -> Refusal | None:
    """Unless the tables have a row for each token of q [T, heads, D], with the same strides in
    both.
    """
    if reason := wrong_rank((3,), q=q):
        return reason
    if table_dimension(q, cos) != 0 or table_dimension(q, sin) != 0:
        return Refusal("shape", "the tables do not have a row for each token")
    if not all(known_equal(a, b) for a, b in zip(cos.stride(), sin.stride(), strict=True)):
        return Refusal("layout", "the tables of cos and sin differ in strides")
    return None


def unrotatable(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Refusal | None:
    """Why AITER cannot rotate x by these tables."""
    if reason := unlike(HALVES, x=x, cos=cos, sin=sin) or moving(style) or wrong_rank((3, 4), x=x):
        return reason
    if table_dimension(x, cos) is None or table_dimension(x, sin) is None:
        return Refusal("shape", "the tables differ in more than the tokens")
    return strided(x=x)


def token_view(x: Tensor, dimension: int) -> Tensor:
    """x seen as [S, B, H, D]."""
    front = x.movedim(dimension, 0)
    return front if front.dim() == 4 else front.unsqueeze(1)


def table_rows(table: Tensor) -> Tensor:
    """A table as [S, 1, 1, columns], one row behind the other: AITER's compiled kernel does not
    look at its strides.
    """
    return table.reshape(-1, 1, 1, table.shape[-1]).contiguous()


def empty_rotated(x: Tensor, cos: Tensor, style: str) -> Tensor:
    """Memory for the result that lies as the op says."""
    if style == "neox" and cos.shape[-1] == x.shape[-1]:
        return torch.empty_like(x)
    return x.new_empty(x.shape)


def refuse_rope(
    platform: Platform, x: Tensor, cos: Tensor, sin: Tensor, style: str
) -> Refusal | None:
    return unfit(platform, rope_cached_fwd_impl) or unrotatable(x, cos, sin, style)


@ops.rope.kernel("aiter", refuses=refuse_rope, rounds="once")
def rope(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    out = empty_rotated(x, cos, style)
    if x.numel():
        dimension = table_dimension(x, cos)
        assert dimension is not None
        rope_cached_fwd_impl(
            token_view(out, dimension),
            token_view(x, dimension),
            table_rows(cos),
            table_rows(sin),
            ROTATIONS[style],
            style != "neox",
            False,
        )
    return out
