"""Rotary positions. T tokens, N heads, D columns of a head, and tables that broadcast over heads."""

import torch
from torch import Tensor

from spellings import Spelling

T, N, D = 7, 3, 22


def tables(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of D / 2 angles, once for each column of a pair if they are D wide."""
    angle = 3 * torch.randn(T, 1, D // 2)
    angle = angle.repeat(1, 1, width // angle.shape[-1])
    return angle.cos().to(dtype), angle.sin().to(dtype)


def heads(dtype: torch.dtype) -> Tensor:
    return torch.randn(T, N, D).to(dtype)


def full(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return heads(dtype), *tables(D, dtype)


def half(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return heads(dtype), *tables(D // 2, dtype)


def tables_in_fp32(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return heads(dtype), *tables(D, torch.float32)


def turned(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return heads(dtype), torch.polar(torch.ones(T, 1, D // 2), 3 * torch.randn(T, 1, D // 2))


def cached(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return heads(dtype), torch.stack(tables(D // 2, torch.float32), -1)


def rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1)


def rotate_every_two(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def rotate_pairwise(x: Tensor) -> Tensor:
    first, second = x.view(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack((-second, first), -1).flatten(-2)


def neox(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin


def in_fp32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return neox(x.float(), cos.float(), sin.float()).to(x.dtype)


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def pairs_to_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def pairs_in_place(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def repeated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (table.repeat_interleave(2, -1) for table in (cos, sin))
    return x * cos + rotate_every_two(x) * sin


def cohere(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = x.float()
    return (y * cos + rotate_every_two(y) * sin).to(x.dtype)


def ernie(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x.float() * cos + rotate_every_two(x).float() * sin).to(x.dtype)


def cast_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x.float() * cos + rotate_half(x).float() * sin).to(x.dtype)


def pairwise(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_pairwise(x) * sin


def torchtune(x: Tensor, cache: Tensor) -> Tensor:
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    turned = torch.stack(
        [
            pairs[..., 0] * cache[..., 0] - pairs[..., 1] * cache[..., 1],
            pairs[..., 1] * cache[..., 0] + pairs[..., 0] * cache[..., 1],
        ],
        -1,
    )
    return turned.flatten(-2).type_as(x)


def multiplied(x: Tensor, turn: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2).type_as(x)


def minus_after(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.cat((x[..., D // 2 :], -x[..., : D // 2]), -1) * sin


def minus_outside(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos - torch.cat((x[..., D // 2 :], -x[..., : D // 2]), -1) * sin


def back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos - rotate_half(x) * sin


def partial(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    head, rest = torch.cat((x, x), -1).split((D, D), -1)
    return torch.cat((repeated(head, cos, sin), rest), -1)


def matrices(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turn = torch.stack((cos, -sin, sin, cos), -1).unflatten(-1, (2, 2))
    pairs = x.reshape(*x.shape[:-1], -1, 1, 2)
    return (pairs * turn).sum(-1).flatten(-2)


BOTH = (torch.bfloat16, torch.float32)
SPELLINGS = (
    Spelling("x * cos + rotate_half(x) * sin", "Llama, Qwen3, most", "rope", neox, full),
    Spelling("cat((a * cos - b * sin, b * cos + a * sin))", "GPT-OSS", "rope", halves, half),
    Spelling(
        "cat((a * cos - b * sin, ..)) of a, b = x[..., ::2], x[..., 1::2]",
        "DeepSeek-V3",
        "rope",
        pairs_to_half,
        half,
    ),
    Spelling(
        "stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)",
        "OpenAI's privacy filter",
        "rope",
        pairs_in_place,
        half,
    ),
    Spelling(
        "x * cos.repeat_interleave(2, -1) + rotate_every_two(x) * ..",
        "GPT-J, CodeGen, GLM, GLM4, Helium",
        "rope",
        repeated,
        half,
    ),
    Spelling(
        "y * cos + rotate_every_two(y) * sin of y = x.float()", "Cohere", "rope", cohere, full
    ),
    Spelling(
        "x.float() * cos + rotate_every_two(x).float() * sin",
        "ERNIE 4.5, DeepSeek-V4",
        "rope",
        ernie,
        tables_in_fp32,
    ),
    Spelling(
        "x * cos + rotate_pairwise(x) * sin by view and unbind", "SAM 2, V-JEPA 2", "rope",
        pairwise, full,
    ),
    Spelling("stack of select of view(.., n, 2)", "torchtune", "rope", torchtune, cached),
    Spelling(
        "view_as_real(view_as_complex(x) * turn)",
        "DeepSeek-V2, Llama 4, Meta's Llama",
        "rope",
        multiplied,
        turned,
    ),
    Spelling(
        "x.float() * cos.float() + rotate_half(x.float()) * ..",
        "vision towers of Qwen2-VL, GLM-4V, Kimi",
        "rope",
        in_fp32,
        full,
    ),
    Spelling("x * cos.float() + rotate_half(x) * sin.float()", "autocast, OLMo", "rope", neox,
             tables_in_fp32, dtypes=(torch.bfloat16,)),
    Spelling("x * cos + cat((b, -a)) * sin", "NanoChat", "rope", minus_after, full),
    Spelling("x * cos - cat((b, -a)) * sin", "", "rope", minus_outside, full),
    Spelling("x * cos - rotate_half(x) * sin", "the way back", "rope", back, full),
    Spelling("cat((rope(x[..., :r]), x[..., r:]))", "GLM, Phi-3, GPT-NeoX", "rope_partial",
             partial, half),
    Spelling(
        "x.float() * cos + rotate_half(x).float() * sin",
        "",
        "rope",
        cast_halves,
        tables_in_fp32,
        reason="cast",
        table="two casts instead of one, the second after the rotation",
        dtypes=(torch.bfloat16,),
    ),
    Spelling(
        "(x.view(.., n, 1, 2) * matrices).sum(-1)",
        "Perception Encoder",
        "rope",
        matrices,
        half,
        reason="no anchor",
        table="a product with a matrix for each pair",
    ),
)  # fmt: skip
