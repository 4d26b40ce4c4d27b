"""Quantizers, and norms and activations that quantize their result."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atomc.ops.formats import MX_ROUNDINGS
from atomc.ops.norm import RMS_NORM_STYLES
from atomc.ops.schemes import SCHEMES
from kernel_cases.draw import EPS, FNUZ, Cases, Draw, Make
from kernel_cases.rows import ROWS, normed, reducing, row_inputs


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
    kept = {"kept": {"keep": True}, "kept, one_plus": {"keep": True, "style": "one_plus"}}
    return quantizing_cases(
        partial(normed, residual=residual), **NORM_STYLES, **kept, large={"scale": 200.0}
    )


def reducing_norm_quant_cases(residual: bool) -> Cases:
    """A few of each scheme: behind the sum stand the kernels that all cases of norm_quant run."""
    make = partial(normed, residual=residual)
    choices: dict[str, dict[str, Any]] = {
        "one row": {"kind": "one row"},
        "packed": {"kind": "packed"},
        "kept, one_plus": {"kind": "packed", "keep": True, "style": "one_plus"},
    }
    return {
        f"{scheme}, {name}": reducing(quantizing(scheme, partial(make, **choice)))
        for scheme in SCHEMES
        for name, choice in choices.items()
    }


def normed_pair(
    draw: Draw,
    kind: str,
    weight: torch.dtype | None = None,
    scale: float = 1.0,
    **attributes: Any,
) -> dict[str, Any]:
    """Rows of two widths; "packed": columns of one tensor, beside others."""
    match kind:
        case "one row":
            x, y = draw.normal(1, 96), draw.normal(1, 32)
        case "odd sizes":
            x, y = draw.normal(33, 81), draw.normal(33, 200)
        case "no rows":
            x, y = draw.normal(0, 64), draw.normal(0, 96)
        case "one vector":
            x, y = draw.normal(128), draw.normal(64)
        case "packed":
            x, y, _ = draw.normal(7, 256 + 160 + 32).split([256, 160, 32], -1)
        case "packed batch":
            x, y, _ = draw.normal(2, 5, 160 + 96 + 8).split([160, 96, 8], -1)
        case "transposed":
            x, y = draw.normal(5, 7, 64).transpose(0, 1), draw.normal(5, 7, 160).transpose(0, 1)
        case "last dimension strided":
            x, y = draw.normal(7, 64), draw.normal(64, 7).t()
        case "other rows":
            x, y = draw.normal(3, 2, 64), draw.normal(3, 4, 64)
        case "wide":
            x, y = draw.normal(3, 1536), draw.normal(3, 5000)
        case "many":
            x, y = draw.normal(4100, 40), draw.normal(4100, 24)
    return {
        "x": x * scale,
        "y": y * scale,
        "x_weight": draw.normal(x.shape[-1], dtype=weight),
        "y_weight": draw.normal(y.shape[-1], dtype=weight),
        "eps": EPS,
        **attributes,
    }


PAIRS = (
    "one row",
    "odd sizes",
    "no rows",
    "one vector",
    "packed",
    "packed batch",
    "transposed",
    "last dimension strided",
    "other rows",
    "wide",
    "many",
)
MX_PAIRS = ("one row", "no rows", "one vector", "packed", "packed batch", "transposed")
NORM_STYLES: dict[str, dict[str, Any]] = {
    f"{style}, {dtype or 'model dtype'} weight": {"style": style, "weight": dtype}
    for style in RMS_NORM_STYLES
    for dtype in (None, torch.float32)
}


def norm_pair_cases() -> Cases:
    cases: Cases = {kind: partial(normed_pair, kind=kind) for kind in PAIRS}
    return cases | {
        name: partial(normed_pair, kind="packed", **style) for name, style in NORM_STYLES.items()
    }


def norm_pair_quant_cases() -> Cases:
    """Every scheme; in each of them every choice of results once."""
    choices: dict[str, dict[str, Any]] = {
        "x": {"quantize_y": False},
        "x, x kept": {"quantize_y": False, "keep_x": True},
        "x kept": {"keep_x": True},
        "y kept": {"keep_y": True},
        "both kept, one_plus": {"keep_x": True, "keep_y": True, "style": "one_plus"},
    }
    cases: Cases = {}
    for scheme in SCHEMES:
        kinds = MX_PAIRS if scheme == "mxfp4" else PAIRS
        made: Cases = {kind: partial(normed_pair, kind=kind) for kind in kinds}
        made |= {
            name: partial(normed_pair, kind="packed", **given) for name, given in choices.items()
        }
        cases |= {
            f"{scheme}, {name}": _quantizing_pair(scheme, make) for name, make in made.items()
        }
    more = {
        "fp8_group, column-major": {"scheme": "fp8_group", "column_major": True},
        "fp8_group, groups of 64": {"scheme": "fp8_group", "group": 64},
        "mxfp4, rounded up": {"scheme": "mxfp4", "rounding": "up"},
        "fp8_per_token, fnuz": {"scheme": "fp8_per_token", **FNUZ},
    }
    one = partial(normed_pair, kind="packed")
    for name, given in more.items():
        cases[name] = lambda draw, given=given: one(draw) | given
    return cases


def _quantizing_pair(scheme: str, make: Make) -> Make:
    def made(draw: Draw) -> dict[str, Any]:
        static = scheme == "fp8_static"
        scales = [torch.tensor([s], device=draw.device) if static else None for s in (0.02, 0.03)]
        return make(draw) | {"scheme": scheme, "x_scale": scales[0], "y_scale": scales[1]}

    return made
