"""More cases for rows and products: widths that fill no dword, memory with gaps, the fp8 of an
architecture, and the tiles of AITER's compiled products.
"""

from functools import partial
from typing import Any

import torch
from kernel_cases.draw import EPS, Cases, Draw
from kernel_cases.linear import linear
from kernel_cases.quant import normed_pair
from kernel_cases.rows import reducing
from kernel_cases.scaled_linear import int8_operands, mxfp4_operands, scaled_blocks, scaled_fp8

from atomc.ops.norm import RMS_NORM_STYLES

ODD_WIDTH = (5, 77)


def halves(draw: Draw, *shape: int, **rest: Any) -> dict[str, Any]:
    gate, up = draw.packed(*shape)
    return {"gate": gate, "up": up, **rest}


def gates_of_minus_3(draw: Draw, **rest: Any) -> dict[str, Any]:
    """Where the two GELUs differ by a tenth."""
    given = halves(draw, 5, 64, **rest)
    given["gate"].mul_(0.01).sub_(3)
    return given


def with_gaps(given: dict[str, Any], *names: str) -> dict[str, Any]:
    """These tensors in every second part of a larger one: the rows have gaps between them."""
    for name in names:
        rows = given[name]
        given[name] = torch.stack((rows, rows), 1).flatten(1)[:, : rows.shape[1]]
    return given


def of_rows(fp8: torch.dtype) -> dict[str, Cases]:
    gated: Cases = {
        "halves, odd sizes": lambda draw: halves(draw, 33, 80),
        "halves, batch": lambda draw: halves(draw, 2, 7, 8),
        "halves, odd width": lambda draw: halves(draw, *ODD_WIDTH),
    }
    norm: dict[bool, Cases] = {
        residual: {
            "odd width": partial(_normed, ODD_WIDTH, residual),
            "odd width, one_plus": partial(_normed, ODD_WIDTH, residual, style="one_plus"),
            "widest": partial(_normed, (3, 8192), residual),
        }
        for residual in (False, True)
    }
    norm_quant: dict[bool, Cases] = {
        residual: {
            f"{scheme}, {width} columns, native": partial(
                _normed, (3, width), residual, scheme=scheme, dtype=fp8, rounding="up"
            )
            for scheme in ("fp8_per_token", "fp8_group", "mxfp4", "int8_per_token")
            for width in (384, 2560, 5120, 8192)
        }
        | {
            "fp8_per_token, odd width": partial(
                _normed, ODD_WIDTH, residual, scheme="fp8_per_token", dtype=fp8
            ),
            "fp8_group, column-major, native": partial(
                _normed, (5, 384), residual, scheme="fp8_group", dtype=fp8, column_major=True
            ),
            "fp8_group, batch, one_plus, native": partial(
                _normed, (2, 3, 256), residual, scheme="fp8_group", dtype=fp8, style="one_plus"
            ),
        }
        for residual in (False, True)
    }
    per_row: Cases = {
        f"{shape}, native": partial(_quantized, shape, dtype=fp8)
        for shape in ((5, 128), (33, 80), (2, 7, 300), ODD_WIDTH, (3, 9000))
    }
    return {
        "silu_and_mul": gated,
        "gelu_and_mul": gated
        | {
            f"gates of -3, {name}": partial(gates_of_minus_3, approximate=name)
            for name in ("none", "tanh")
        }
        | {f"{name}, tanh": partial(_tanh, make) for name, make in gated.items()},
        "rms_norm": norm[False],
        "add_rms_norm": norm[True],
        "rms_norm_quant": norm_quant[False],
        "add_rms_norm_quant": norm_quant[True],
        "allreduce_add_rms_norm": {
            f"{shape}, {style}": reducing(partial(_normed, shape, True, style=style))
            for shape in ((1, 512), (2, 3, 1024), (33, 2056))
            for style in RMS_NORM_STYLES
        }
        | {"packed": reducing(_packed_norm)},
        "allreduce_add_rms_norm_quant": {
            f"{scheme}, {shape}{', kept' * keep}, native": reducing(
                partial(
                    _normed,
                    shape,
                    True,
                    scheme=scheme,
                    dtype=fp8,
                    keep=keep,
                    column_major=shape[0] == 70,
                    scale=torch.tensor([0.02]) if scheme == "fp8_static" else None,
                    style="one_plus" if scheme == "fp8_per_token" and keep else "before",
                )
            )
            for scheme in ("fp8_static", "fp8_per_token", "fp8_group", "mxfp4")
            for shape in ((3, 512), (2, 3, 1024), (70, 2048), (1, 7168))
            for keep in (False, True)
        },
        "rms_norm_pair_quant": {
            f"{scheme}, {kind}, {style}, native": partial(
                normed_pair,
                kind=kind,
                style=style,
                scheme=scheme,
                dtype=fp8,
                quantize_y=False,
                keep_x=kind == "packed batch",
                group=32 if kind == "packed batch" else 64 if kind == "one vector" else 128,
                column_major=style == "one_plus",
                rounding="up",
            )
            for scheme in ("fp8_per_token", "fp8_group", "mxfp4")
            for kind in ("packed", "packed batch", "one vector", "no rows", "wide")
            for style in ("before", "one_plus")
        },
        "silu_and_mul_quant": {
            f"{scheme}, {shape}, native": partial(
                _gated,
                shape,
                scheme=scheme,
                dtype=fp8,
                group=64 if len(shape) == 3 else 128,
                column_major=shape[0] == 5,
                rounding="up",
            )
            for scheme in ("fp8_group", "mxfp4")
            for shape in ((5, 384), (2, 7, 192), (3, 2176), (1, 8192), (0, 128))
        },
        "quant_fp8_per_token": per_row,
        "quant_fp8_static": {name: partial(_static, make) for name, make in per_row.items()},
        "quant_fp8_group": {
            f"{shape}, groups of {group}{column_major * ', column-major'}, native": partial(
                _quantized, shape, dtype=fp8, group=group, column_major_scales=column_major
            )
            for shape, group in (((5, 384), 128), ((2, 7, 384), 64), ((33, 96), 32))
            for column_major in (False, True)
        },
        "linear": {
            "weight with gaps, two rows": lambda draw: with_gaps(linear(draw, 2, 64), "weight"),
            "weight with gaps": lambda draw: with_gaps(linear(draw, 33, 64), "weight"),
        },
        "scaled_linear_fp8": {
            "tiles of 256, native": lambda draw: scaled_fp8(draw, 33, 192, out=256, dtype=fp8),
            "tiles of 128, native": lambda draw: scaled_fp8(draw, 5, 512, out=128, dtype=fp8),
            "tiles of 64, native": lambda draw: scaled_fp8(draw, 1, 1536, out=64, dtype=fp8),
            "tiles, batch, native": lambda draw: scaled_fp8(draw, 2, 3, 512, out=128, dtype=fp8),
            "scales with gaps, native": lambda draw: with_gaps(
                scaled_fp8(draw, 3, 512, out=128, dtype=fp8), "x_scale", "weight_scale"
            ),
            "per tensor, batch, native": lambda draw: scaled_fp8(
                draw, 2, 3, 256, out=64, per="tensor", dtype=fp8
            ),
            "per tensor, one row, native": lambda draw: scaled_fp8(
                draw, 1, 64, out=48, per="tensor", dtype=fp8
            ),
        },
        "scaled_linear_fp8_block": {
            "many blocks, native": lambda draw: scaled_blocks(draw, 5, 640, out=320, dtype=fp8),
            "many blocks, one row, native": lambda draw: scaled_blocks(
                draw, 1, 384, out=256, dtype=fp8
            ),
            "many blocks, batch, native": lambda draw: scaled_blocks(
                draw, 2, 3, 384, out=192, dtype=fp8
            ),
            "column-major scales, native": lambda draw: by_column(
                scaled_blocks(draw, 33, 384, out=320, dtype=fp8)
            ),
            "column-major scales, one row, native": lambda draw: by_column(
                scaled_blocks(draw, 1, 256, out=192, dtype=fp8)
            ),
            "column-major scales, no rows, native": lambda draw: by_column(
                scaled_blocks(draw, 0, 256, out=192, dtype=fp8)
            ),
            "scales with gaps, native": lambda draw: with_gaps(
                scaled_blocks(draw, 33, 384, out=320, dtype=fp8), "weight_scale"
            ),
        },
        "scaled_linear_int8": {
            "weight with gaps": lambda draw: with_gaps(
                int8_operands(draw, 5, 64, out=32), "weight"
            ),
            "scales with gaps": lambda draw: with_gaps(
                int8_operands(draw, 5, 64, out=32), "x_scale", "weight_scale"
            ),
        },
        "linear_mxfp4": {
            f"tiles, {shape} to {out}": partial(_mxfp4, shape, out)
            for shape, out in (
                ((1, 256), 32),
                ((33, 512), 272),
                ((300, 768), 48),
                ((2, 3, 256), 64),
                ((7, 384), 64),
                ((16, 512), 64),
                ((17, 512), 64),
                ((64, 256), 64),
            )
        },
        "quant_mxfp4": {
            f"{shape}, up": partial(_quantized, shape, rounding="up")
            for shape in ((33, 512), (2, 3, 288))
        },
    }


def by_column(given: dict[str, Any]) -> dict[str, Any]:
    return given | {"x_scale": given["x_scale"].t().contiguous().t()}


def _normed(shape: tuple[int, ...], residual: bool, draw: Draw, **rest: Any) -> dict[str, Any]:
    given = {"x": draw.normal(*shape), "weight": draw.normal(shape[-1]), "eps": EPS, **rest}
    return given | ({"residual": draw.normal(*shape)} if residual else {})


def _packed_norm(draw: Draw) -> dict[str, Any]:
    x, residual = draw.packed(7, 1024)
    return _normed(x.shape, True, draw) | {"x": x, "residual": residual}


def _gated(shape: tuple[int, ...], draw: Draw, **rest: Any) -> dict[str, Any]:
    return halves(draw, *shape, **rest)


def _quantized(shape: tuple[int, ...], draw: Draw, **rest: Any) -> dict[str, Any]:
    return {"x": draw.normal(*shape), **rest}


def _static(make: Any, draw: Draw) -> dict[str, Any]:
    return make(draw) | {"scale": draw.normal(1, dtype=torch.float32).abs() / 50}


def _tanh(make: Any, draw: Draw) -> dict[str, Any]:
    return make(draw) | {"approximate": "tanh"}


def _mxfp4(shape: tuple[int, ...], out: int, draw: Draw) -> dict[str, Any]:
    return mxfp4_operands(draw, *shape, out=out, activation="mxfp4")
