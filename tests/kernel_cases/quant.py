"""Quantizers, and norms and activations that quantize their result."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atomc.ops.formats import MX_ROUNDINGS
from atomc.ops.norm import RMS_NORM_STYLES
from atomc.ops.schemes import SCHEMES
from kernel_cases.draw import FNUZ, Cases, Draw, Make
from kernel_cases.rows import ROWS, normed, row_inputs


def rows_to_quantize(draw: Draw, kind: str, **attributes: Any) -> dict[str, Any]:
    """One tensor [..., K], among its values zeros, and numbers on the border between two codes."""
    x = row_inputs(draw, kind)[0]
    if x.numel():
        x[..., ::7] = x[..., ::7].mul(8).round().div(8)
    return {"x": x, **attributes}


def with_a_row_of(draw: Draw, value: float, *shape: int) -> Tensor:
    x = draw.normal(*shape)
    x[..., 1, :] = value
    return x


def quant_cases(kinds: tuple[str, ...], width: int, **attributes: Any) -> Cases:
    return {
        **{kind: partial(rows_to_quantize, kind=kind, **attributes) for kind in kinds},
        "a row of zeros": lambda draw: {"x": with_a_row_of(draw, 0.0, 3, width), **attributes},
        "a tiny row": lambda draw: {"x": with_a_row_of(draw, 2.0**-24, 3, width), **attributes},
        "negative": lambda draw: {"x": -draw.normal(3, width).abs(), **attributes},
        "large": lambda draw: {"x": draw.normal(3, width) * 5000, **attributes},
        "an outlier": lambda draw: (
            {"x": with_a_row_of(draw, 0.01, 3, width).index_fill_(-1, draw.ints([5]), 300.0)}
            | attributes
        ),
        "batch": lambda draw: {"x": draw.normal(2, 5, width), **attributes},
    }


MX_ROWS = (
    "one row",
    "no rows",
    "one vector",
    "packed",
    "heads of a packed projection",
    "transposed",
)


def quant_fp8_group_cases() -> Cases:
    cases = quant_cases((*ROWS, "many"), 384)
    for name in ("one row", "odd sizes", "no rows", "wide", "transposed"):
        cases[f"{name}, column-major"] = partial(
            rows_to_quantize, kind=name, column_major_scales=True
        )
    cases["batch, column-major"] = lambda draw: {
        "x": draw.normal(2, 5, 384),
        "column_major_scales": True,
    }
    cases["groups of 64"] = lambda draw: {"x": draw.normal(5, 384), "group": 64}
    cases["fnuz"] = lambda draw: {"x": draw.normal(5, 384), **FNUZ}
    return cases


def every_size(draw: Draw) -> dict[str, Any]:
    """Groups whose scale is 1, of all numbers up to 6 of 16 bits; of fp32, those of fp16 and their
    neighbours.
    """
    half = draw.dtype if draw.dtype.itemsize == 2 else torch.float16
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(half)
    numbers = numbers[numbers.abs() <= 6].to(draw.dtype)
    if draw.dtype == torch.float32:
        numbers = torch.cat(
            [numbers, *(numbers.nextafter(torch.full_like(numbers, end)) for end in (-6.0, 6.0))]
        )
    rows = torch.cat([numbers, numbers[: -len(numbers) % 31]]).view(-1, 31)
    return {"x": torch.nn.functional.pad(rows, (1, 0), value=6.0).to(draw.device)}


def quant_mxfp4_cases() -> Cases:
    cases: Cases = {"every size": every_size}
    for rounding in MX_ROUNDINGS:
        for name, make in quant_cases(MX_ROWS, 96, rounding=rounding).items():
            cases[f"{name}, {rounding}"] = make
        cases[f"many, {rounding}"] = lambda draw, rounding=rounding: {
            "x": draw.normal(2050, 64),
            "rounding": rounding,
        }
    return cases


QUANT_FP8_STATIC: Cases = {
    name: lambda draw, make=make: (
        make(draw) | {"scale": draw.normal(1, dtype=torch.float32).abs() / 50}
    )
    for name, make in (
        quant_cases((*ROWS, "many"), 128)
        | {
            "fnuz": lambda draw: {"x": draw.normal(5, 128), **FNUZ},
        }
    ).items()
}


def quantizing(scheme: str, make: Make) -> Make:
    """The case with a quantizer at its end."""

    def made(draw: Draw) -> dict[str, Any]:
        scale = torch.tensor([0.02], device=draw.device) if scheme == "fp8_static" else None
        return make(draw) | {"scale": scale, "scheme": scheme}

    return made


def quantizing_cases(make: Callable[..., dict[str, Any]], **attributes: Any) -> Cases:
    """`make(draw, kind=...)` under every scheme; attributes of one case each, by name."""
    cases: Cases = {}
    for scheme in SCHEMES:
        kinds = MX_ROWS if scheme == "mxfp4" else (*ROWS, "many")
        cases |= {
            f"{scheme}, {kind}": quantizing(scheme, partial(make, kind=kind)) for kind in kinds
        }
        for name, more in attributes.items():
            cases[f"{scheme}, {name}"] = quantizing(scheme, partial(make, kind="packed", **more))
    one = partial(make, kind="packed")
    for scheme in ("fp8_static", "fp8_per_token", "fp8_group"):
        cases[f"{scheme}, fnuz"] = lambda draw, scheme=scheme: quantizing(scheme, one)(draw) | FNUZ
    cases["fp8_group, column-major"] = lambda draw: (
        quantizing("fp8_group", one)(draw) | {"column_major": True}
    )
    cases["fp8_group, groups of 64"] = lambda draw: (
        quantizing("fp8_group", one)(draw) | {"group": 64}
    )
    cases["mxfp4, rounded up"] = lambda draw: quantizing("mxfp4", one)(draw) | {"rounding": "up"}
    return cases


def norm_quant_cases(residual: bool) -> Cases:
    styles = {
        f"{style}, {dtype or 'model dtype'} weight": {"style": style, "weight": dtype}
        for style in RMS_NORM_STYLES
        for dtype in (None, torch.float32)
    }
    kept = {"kept": {"keep": True}, "kept, one_plus": {"keep": True, "style": "one_plus"}}
    return quantizing_cases(
        partial(normed, residual=residual), **styles, **kept, large={"scale": 200.0}
    )
