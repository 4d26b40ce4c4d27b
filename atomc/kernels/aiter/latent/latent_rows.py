"""What is written into a latent cache, as AITER's kernels take it: a row for each token, and pairs
that rotate as AITER has them.
"""

from typing import NamedTuple, TypedDict

from torch import Tensor

from atomc.graph.sizes import known_equal
from atomc.ops.op import Refusal


class Operands(TypedDict):
    """Arguments of mla_rope_kv_write and bmm_rope_kv_write."""

    q_nope: Tensor
    q_pe: Tensor
    kv_c: Tensor
    k_pe: Tensor
    cos: Tensor
    sin: Tensor
    rope_style: str


class LatentRows(NamedTuple):
    """The arguments of mla_rope_kv_write without a batch of one.

    style  "half" for "pairs_to_half", whose columns are moved here, before the rotation: AITER
           writes a pair back where it was
    """

    q_nope: Tensor  # [T, H, P]
    q_pe: Tensor  # [T, H, R]
    kv_c: Tensor  # [T, L]
    k_pe: Tensor  # [T, 1, R]
    cos: Tensor  # [T, 1, R/2]
    sin: Tensor
    style: str


def latent_rows(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    cos: Tensor,
    sin: Tensor,
    rope_style: str,
) -> LatentRows:
    """Ranks are as given if there is a batch of several. Copies, so that a refusal of the machine
    comes before it.
    """
    of_heads = (unbatched(x, 3) for x in (q_nope, q_pe, k_pe, cos, sin))
    q_nope, q_pe, k_pe, cos, sin = of_heads
    if rope_style == "pairs_to_half":
        q_pe, k_pe, rope_style = _split_pairs(q_pe), _split_pairs(k_pe), "half"
    return LatentRows(q_nope, q_pe, unbatched(kv_c, 2), k_pe, cos, sin, rope_style)


def outside_of_latents(q_nope: Tensor, kv_c: Tensor) -> Refusal | None:
    """Unless the queries are in the latent space."""
    if known_equal(q_nope.shape[-1], kv_c.shape[-1]):
        return None
    return Refusal(
        "shape",
        f"queries of {q_nope.shape[-1]} columns and a latent of {kv_c.shape[-1]}: AITER takes "
        "queries in the latent space",
    )


def unbatched(x: Tensor, rank: int) -> Tensor:
    """x without leading dimensions of one, down to so many dimensions."""
    while x.dim() > rank and known_equal(x.shape[0], 1):
        x = x.squeeze(0)
    return x


def _split_pairs(x: Tensor) -> Tensor:
    """The first columns of all pairs, then the second ones: a copy."""
    return x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
