"""Rotary position embedding (Su et al. 2021), alone, after the q/k norms, and with the write to the
cache.

D head width, R rotated width: cos and sin are R wide (neox, pairs) or R/2 wide (the other styles)
and broadcast against x in all dimensions but the last. Columns from R on are unchanged. A style
says which pairs of columns are rotated, and where the results are written:
neox           (x[i], x[i + R/2]), full-width tables (Llama, Qwen3: `rotate_half`)
half           the same pairs, half-width tables (GPT-OSS)
pairs_to_half  (x[2i], x[2i + 1]), written to i and i + R/2 (DeepSeek "interleaved")
gptj           (x[2i], x[2i + 1]), written back in place
pairs          the same as gptj, full-width tables (GPT-J, GLM, Cohere: `rotate_every_two`)
Scaling (llama3, yarn, linear) is part of cos and sin.
"""

import torch
from torch import Tensor

from atomc.ops.attention import kv_write
from atomc.ops.norm import normed_shape, rms_norm
from atomc.ops.op import op
from atomc.ops.op_cost import state_write
from atomc.ops.op_traits import Arguments, Kind

ROPE_STYLES = ("neox", "half", "pairs_to_half", "gptj", "pairs")
FULL_WIDTH_STYLES = ("neox", "pairs")


def columns_per_angle(style: str) -> int:
    """The number of columns of x per column of cos and sin."""
    return 1 if style in FULL_WIDTH_STYLES else 2


def rotate(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """x with its whole last dimension rotated."""
    half = x.shape[-1] // 2
    if style == "neox":
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin
    if style == "pairs":
        return x * cos + torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2) * sin
    if style == "half":
        a, b = x[..., :half], x[..., half:]
    elif style in ("pairs_to_half", "gptj"):
        a, b = x[..., 0::2], x[..., 1::2]
    else:
        raise ValueError(f"rope: style {style!r} is not one of {ROPE_STYLES}")
    first, second = a * cos - b * sin, b * cos + a * sin
    if style == "gptj":
        return torch.stack((first, second), -1).flatten(-2)
    return torch.cat((first, second), -1)


def _rope_shape(x: Tensor, cos: Tensor, style: str, in_fp32: bool = False) -> Tensor:
    """Equal to the reference on fake tensors, with one call instead of ten: products keep the
    strides of x, cat and stack are contiguous.
    """
    dtype = x.dtype if in_fp32 else torch.result_type(x, cos)
    if style in FULL_WIDTH_STYLES and cos.shape[-1] == x.shape[-1]:
        return torch.empty_like(x, dtype=dtype)
    return x.new_empty(x.shape, dtype=dtype)


def _rounds_once(arguments: Arguments) -> bool:
    return bool(arguments["in_fp32"])


@op(kind=Kind.ROPE, rows=None, rounds_once=_rounds_once, shape=_rope_shape)
def rope(x: Tensor, cos: Tensor, sin: Tensor, style: str = "neox", in_fp32: bool = False) -> Tensor:
    """x with its first R columns rotated (Su et al. 2021, eq. 34). x [..., D], cos and sin
    [..., R or R/2] -> [..., D] in the promoted dtype of x and cos. in_fp32: computed in fp32 and
    rounded once, to x.dtype (ModernBERT, vision towers of Qwen-VL).
    """
    if in_fp32:
        return rope.reference(x.float(), cos, sin, style).to(x.dtype)
    width = cos.shape[-1] * columns_per_angle(style)
    if width == x.shape[-1]:
        return rotate(x, cos, sin, style)
    return torch.cat((rotate(x[..., :width], cos, sin, style), x[..., width:]), -1)


def _qk_norm_rope_shape(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    norm_style: str,
    rope_style: str,
) -> tuple[Tensor, Tensor]:
    return (
        _rope_shape(normed_shape(q, q_weight, norm_style), cos, rope_style),
        _rope_shape(normed_shape(k, k_weight, norm_style), cos, rope_style),
    )


@op(kind=Kind.NORM | Kind.ROPE, rows=None, shape=_qk_norm_rope_shape)
def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    norm_style: str = "after",
    rope_style: str = "neox",
) -> tuple[Tensor, Tensor]:
    """rope(rms_norm(q)) and rope(rms_norm(k)), as in Qwen3. q [..., N, D], k [..., K, D], weights
    [D] -> the shapes of q and k; dtypes as in rms_norm and rope.
    """
    q_normed = rms_norm.reference(q, q_weight, eps, norm_style)
    k_normed = rms_norm.reference(k, k_weight, eps, norm_style)
    return rope.reference(q_normed, cos, sin, rope_style), rope.reference(
        k_normed, cos, sin, rope_style
    )


def _rope_kv_write_shape(
    q: Tensor, cos: Tensor, rope_style: str, in_fp32: bool = False
) -> tuple[Tensor, Tensor]:
    q_rotated = _rope_shape(q, cos, rope_style, in_fp32)
    return q_rotated, q_rotated.new_empty((0,))


@op(
    kind=Kind.ROPE | Kind.STATE_WRITE,
    rows=None,
    cost=state_write,
    rounds_once=_rounds_once,
    mutates=("k_cache", "v_cache", "k_scale", "v_scale"),
    shape=_rope_kv_write_shape,
)
def rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    rope_style: str = "neox",
    in_fp32: bool = False,
) -> tuple[Tensor, Tensor]:
    """rope(q), and the token of kv_write(rope(k), v). q [..., N, D], k and v [..., K, D]; cos, sin
    and in_fp32 as in rope, caches, slots and scales as in kv_write.
    """
    k_rotated = rope.reference(k, cos, sin, rope_style, in_fp32)
    token = kv_write.reference(k_rotated, v, k_cache, v_cache, slots, k_scale, v_scale)
    return rope.reference(q, cos, sin, rope_style, in_fp32), token


def _qk_norm_rope_kv_write_shape(
    q: Tensor, q_weight: Tensor, cos: Tensor, norm_style: str, rope_style: str
) -> tuple[Tensor, Tensor]:
    return _rope_kv_write_shape(normed_shape(q, q_weight, norm_style), cos, rope_style)


@op(
    kind=Kind.NORM | Kind.ROPE | Kind.STATE_WRITE,
    rows=None,
    cost=state_write,
    mutates=("k_cache", "v_cache", "k_scale", "v_scale"),
    shape=_qk_norm_rope_kv_write_shape,
)
def qk_norm_rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    norm_style: str = "after",
    rope_style: str = "neox",
) -> tuple[Tensor, Tensor]:
    """qk_norm_rope, then kv_write of its k and of v -> q [..., N, D] and the token. Shapes as in
    these ops.
    """
    q_rotated, k_rotated = qk_norm_rope.reference(
        q, k, q_weight, k_weight, cos, sin, eps, norm_style, rope_style
    )
    return q_rotated, kv_write.reference(k_rotated, v, k_cache, v_cache, slots, k_scale, v_scale)
