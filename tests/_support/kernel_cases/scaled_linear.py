"""Linear layers with weights in few bits."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atomc.ops.formats import pack_int4
from kernel_cases.draw import Cases, Draw


def fp8_operands(
    draw: Draw,
    *shape: int,
    out: int = 33,
    bias: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> dict[str, Any]:
    """Operands of a linear layer in fp8, without scales."""
    return {
        "x": (draw.normal(*shape) * 20).to(dtype),
        "weight": (draw.normal(out, shape[-1]) * 20).to(dtype),
        "bias": draw.normal(out) if bias else None,
        "out_dtype": draw.dtype,
    }


def scale_of(draw: Draw, *shape: int) -> Tensor:
    return (draw.normal(*shape, dtype=torch.float32).abs() + 0.1) / 400


def scaled_fp8(
    draw: Draw, *shape: int, per: str = "row", out: int = 33, **rest: Any
) -> dict[str, Any]:
    scales = {"x_scale": scale_of(draw, 1), "weight_scale": scale_of(draw, 1)}
    if per == "row":
        scales = {"x_scale": scale_of(draw, *shape[:-1], 1), "weight_scale": scale_of(draw, out, 1)}
    elif per == "token":
        scales["x_scale"] = scale_of(draw, *shape[:-1], 1)
    return fp8_operands(draw, *shape, out=out, **rest) | scales


def scaled_blocks(draw: Draw, *shape: int, out: int = 160, **rest: Any) -> dict[str, Any]:
    blocks = -(-shape[-1] // 128)
    scales = {
        "x_scale": scale_of(draw, *shape[:-1], blocks),
        "weight_scale": scale_of(draw, -(-out // 128), blocks),
    }
    return fp8_operands(draw, *shape, out=out, **rest) | scales


def int8_operands(draw: Draw, *shape: int, out: int = 33, bias: bool = False) -> dict[str, Any]:
    return {
        "x": (draw.below(255, *shape) - 127).to(torch.int8),
        "weight": (draw.below(255, out, shape[-1]) - 127).to(torch.int8),
        "x_scale": scale_of(draw, *shape[:-1], 1),
        "weight_scale": scale_of(draw, out, 1),
        "bias": draw.normal(out) if bias else None,
        "out_dtype": draw.dtype,
    }


def int4_operands(
    draw: Draw, *shape: int, out: int = 33, group: int = 32, zeros: bool = False, bias: bool = False
) -> dict[str, Any]:
    groups = shape[-1] // group
    return {
        "x": draw.normal(*shape),
        "weight": pack_int4(draw.below(16, out, shape[-1])),
        "weight_scale": scale_of(draw, out, groups).to(draw.dtype),
        "zeros": draw.below(16, out, groups, dtype=torch.uint8) if zeros else None,
        "bias": draw.normal(out) if bias else None,
        "group": group,
    }


def mxfp4_operands(
    draw: Draw, *shape: int, out: int = 33, activation: str = "16 bits", bias: bool = False
) -> dict[str, Any]:
    lead, width = shape[:-1], shape[-1]
    x, x_scale = draw.normal(*shape), None
    if activation == "mxfp4":
        x = draw.below(256, *lead, width // 2, dtype=torch.uint8)
        x_scale = 120 + draw.below(12, *lead, width // 32, dtype=torch.uint8)
    elif activation.startswith("fp8"):
        x = (draw.normal(*shape) * 20).to(torch.float8_e4m3fn)
        x_scale = scale_of(draw, *lead, 1) if activation == "fp8 per token" else scale_of(draw, 1)
    return {
        "x": x,
        "weight": draw.below(256, out, width // 2, dtype=torch.uint8),
        "weight_scale": 115 + draw.below(12, out, width // 32, dtype=torch.uint8),
        "x_scale": x_scale,
        "bias": draw.normal(out) if bias else None,
        "out_dtype": draw.dtype,
    }


def nvfp4_operands(draw: Draw, *shape: int, out: int = 33, bias: bool = False) -> dict[str, Any]:
    width = shape[-1]
    return {
        "x": draw.normal(*shape),
        "weight": draw.below(256, out, width // 2, dtype=torch.uint8),
        # Below 448 in a draw of a million too: more is NaN.
        "weight_scale": (draw.normal(out, width // 16).abs() * 60).to(torch.float8_e4m3fn),
        # Of three bits: most weights are exact in bf16, to which a kernel for many rows rounds.
        "global_scale": (4 + draw.below(4, out, 1)).to(torch.float32) / 2**14,
        "bias": draw.normal(out) if bias else None,
    }


def linear_shapes(make: Callable[..., dict[str, Any]], width: int = 128, **rest: Any) -> Cases:
    """The shapes that a GEMM must take: no row, one, a few, many; outputs that fill no tile."""
    return {
        "one row": partial(_linear_shape, make, (1, width), rest),
        "odd sizes": partial(_linear_shape, make, (7, width), rest | {"out": 33}),
        "bias": partial(_linear_shape, make, (33, width), rest | {"bias": True}),
        "batch": partial(_linear_shape, make, (2, 5, width), rest | {"bias": True}),
        "one vector": partial(_linear_shape, make, (width,), rest),
        "no rows": partial(_linear_shape, make, (0, width), rest),
        "sixteen rows": partial(_linear_shape, make, (16, width), rest | {"out": 64}),
        "long": partial(_linear_shape, make, (3, 33 * 128), rest | {"out": 48}),
        "many rows": partial(_linear_shape, make, (150, width), rest | {"out": 272}),
    }


def _linear_shape(
    make: Callable[..., dict[str, Any]], shape: tuple[int, ...], rest: dict[str, Any], draw: Draw
) -> dict[str, Any]:
    return make(draw, *shape, **rest)


SCALED_LINEAR_FP8: Cases = {
    **linear_shapes(scaled_fp8),
    "per tensor": lambda draw: scaled_fp8(draw, 7, 128, per="tensor"),
    "per tensor, one row, bias": lambda draw: scaled_fp8(
        draw, 1, 64, per="tensor", out=272, bias=True
    ),
    "per token, a tensor of weights": lambda draw: scaled_fp8(draw, 5, 128, per="token"),
    "width of no multiple of 16": lambda draw: scaled_fp8(draw, 5, 72, out=40),
    "fnuz": lambda draw: scaled_fp8(draw, 5, 128, dtype=torch.float8_e4m3fnuz),
}

SCALED_LINEAR_FP8_BLOCK: Cases = {
    **linear_shapes(scaled_blocks, 256),
    "blocks that are not full": lambda draw: scaled_blocks(draw, 5, 208, out=144),
    "one block": lambda draw: scaled_blocks(draw, 5, 64, out=48),
    "fnuz": lambda draw: scaled_blocks(draw, 5, 128, dtype=torch.float8_e4m3fnuz),
    "column-major scales": lambda draw: (
        scaled_blocks(draw, 16, 384, out=144) | {"x_scale": scale_of(draw, 3, 16).t()}
    ),
}

SCALED_LINEAR_INT8: Cases = {
    **linear_shapes(int8_operands),
    "width of no multiple of 16": lambda draw: int8_operands(draw, 5, 72, out=40),
}

LINEAR_W4A16: Cases = {
    **linear_shapes(int4_operands),
    "groups of 128": lambda draw: int4_operands(draw, 5, 256, group=128),
    "one group": lambda draw: int4_operands(draw, 5, 128, group=128),
    "zero points": lambda draw: int4_operands(draw, 5, 128, zeros=True),
    "parts that are not full": lambda draw: int4_operands(draw, 5, 160, out=48, zeros=True),
    "columns of several programs": lambda draw: int4_operands(draw, 9, 1568, out=144, bias=True),
    "groups of 64": lambda draw: int4_operands(draw, 20, 1088, group=64, out=80, zeros=True),
    "groups of 128, several programs": lambda draw: int4_operands(
        draw, 3, 1664, group=128, out=144, zeros=True, bias=True
    ),
    "a hundred rows": lambda draw: int4_operands(draw, 100, 160, out=48, zeros=True),
    "many rows, parts that are not full": lambda draw: int4_operands(
        draw, 260, 416, out=80, zeros=True, bias=True
    ),
    "many rows, groups of 128": lambda draw: int4_operands(draw, 257, 256, group=128, out=48),
    "zero points, one row, bias": lambda draw: int4_operands(
        draw, 1, 256, group=128, out=64, zeros=True, bias=True
    ),
}

LINEAR_MXFP4: Cases = {
    **linear_shapes(mxfp4_operands),
    "parts that are not full": lambda draw: mxfp4_operands(draw, 5, 160, out=48, bias=True),
    "columns of several programs": lambda draw: mxfp4_operands(draw, 20, 1568, out=144),
    "many rows, parts that are not full": lambda draw: mxfp4_operands(
        draw, 260, 416, out=80, bias=True
    ),
    **{
        f"{name}, {activation}": make
        for activation in ("mxfp4", "fp8", "fp8 per token")
        for name, make in linear_shapes(mxfp4_operands, activation=activation).items()
        if name in ("one row", "odd sizes", "bias", "batch", "no rows", "many rows")
    },
}

LINEAR_NVFP4: Cases = {
    **linear_shapes(nvfp4_operands),
    "width of no multiple of 32": lambda draw: nvfp4_operands(draw, 5, 144, out=40),
    "one group, one row": lambda draw: nvfp4_operands(draw, 1, 16, out=3, bias=True),
    "seventy rows of odd groups": lambda draw: nvfp4_operands(draw, 70, 208, out=17, bias=True),
}
