"""Norms, gated activations, and sums over processes: rows [..., D], however they lie in memory."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from atomc.ops.norm import RMS_NORM_STYLES
from kernel_cases.draw import EPS, Cases, Draw, Make


def row_inputs(draw: Draw, kind: str) -> tuple[Tensor, Tensor]:
    """Two tensors [..., D] that lie in memory as `kind` says."""
    match kind:
        case "one row":
            return draw.normal(1, 64), draw.normal(1, 64)
        case "odd sizes":
            return draw.normal(33, 80), draw.normal(33, 80)
        case "narrow batch":
            return draw.normal(2, 7, 8), draw.normal(2, 7, 8)
        case "no rows":
            return draw.normal(0, 64), draw.normal(0, 64)
        case "one vector":
            return draw.normal(128), draw.normal(128)
        case "packed":
            return draw.packed(7, 128)
        case "heads of a packed projection":
            first, second = draw.heads(7, 4, 4, width=64)
            return first, second
        case "transposed":
            return draw.normal(5, 7, 64).transpose(0, 1), draw.normal(5, 7, 64).transpose(0, 1)
        case "last dimension strided":
            return draw.normal(64, 7).t(), draw.normal(64, 7).t()
        case "wide":
            return draw.normal(3, 5000), draw.normal(3, 5000)
        case "many":
            return draw.normal(4100, 40), draw.normal(4100, 40)
    raise AssertionError(kind)


ROWS = (
    "one row",
    "odd sizes",
    "narrow batch",
    "no rows",
    "one vector",
    "packed",
    "heads of a packed projection",
    "transposed",
    "last dimension strided",
    "wide",
)


def gated(draw: Draw, kind: str, **attributes: Any) -> dict[str, Any]:
    gate, up = row_inputs(draw, kind)
    return {"gate": gate, "up": up, **attributes}


def sigmoid_gated(
    draw: Draw, kind: str, one_gate: bool, added: bool, alike: bool = True
) -> dict[str, Any]:
    """one_gate: of each row; added: a sum behind it; alike: operands lie in memory alike."""
    gate, up = row_inputs(draw, kind)
    gate = gate if alike else gate.contiguous()
    if one_gate:  # torch's opcheck cannot clone parts of nothing
        gate = gate[..., :1] if gate.numel() else draw.normal(*up.shape[:-1], 1)
    made = {"gate": gate, "up": up}
    return made | ({"added": draw.normal(*up.shape)} if added else {})


def normed(
    draw: Draw,
    kind: str,
    residual: bool,
    weight: torch.dtype | None = None,
    scale: float = 1.0,
    **attributes: Any,
) -> dict[str, Any]:
    x, other = row_inputs(draw, kind)
    arguments = {
        "x": x * scale,
        "weight": draw.normal(x.shape[-1], dtype=weight),
        "eps": EPS,
        **attributes,
    }
    return arguments | {"residual": other * scale} if residual else arguments


def gated_norm(
    draw: Draw, kind: str, weight: torch.dtype | None = None, style: str = "after"
) -> dict[str, Any]:
    x, gate = row_inputs(draw, kind)
    scale = draw.normal(x.shape[-1], dtype=weight)
    return {"x": x, "gate": gate, "weight": scale, "eps": EPS, "style": style}


def gated_norm_cases() -> Cases:
    cases: Cases = {kind: partial(gated_norm, kind=kind) for kind in ROWS}
    for style in RMS_NORM_STYLES:
        cases[style] = partial(gated_norm, kind="packed", style=style)
        cases[f"{style}, fp32 weight"] = partial(
            gated_norm, kind="odd sizes", style=style, weight=torch.float32
        )
    return cases


def rms_norm_cases(residual: bool) -> Cases:
    cases: Cases = {kind: partial(normed, kind=kind, residual=residual) for kind in (*ROWS, "many")}
    for style in RMS_NORM_STYLES:
        cases[style] = partial(normed, kind="odd sizes", residual=residual, style=style)
        cases[f"{style}, fp32 weight"] = partial(
            normed, kind="packed", residual=residual, style=style, weight=torch.float32
        )
    cases["large"] = partial(normed, kind="packed", residual=residual, scale=200.0)
    cases["eps matters"] = partial(normed, kind="packed", residual=residual, scale=0.01)
    return cases


def left_out_sums(cases: Cases) -> Cases:
    """The cases of a norm after an add, and some of them without the sum."""
    return cases | {
        f"{kind}, no sum": lambda draw, make=cases[kind]: make(draw) | {"keep_sum": False}
        for kind in ("odd sizes", "no rows", "packed", "transposed")
    }


def normed_sum(
    draw: Draw, kind: str, weight: torch.dtype | None = None, **attributes: Any
) -> dict[str, Any]:
    """A norm, an add, and a norm of the sum. weight: the dtype of that of the sum."""
    arguments = normed(draw, kind, residual=True)
    x_weight, eps = arguments.pop("weight"), arguments.pop("eps")
    sum_weight = draw.normal(len(x_weight), dtype=weight)
    eps_of_both = {"x_eps": eps, "sum_eps": 0.1}
    return {
        **arguments,
        "x_weight": x_weight,
        "sum_weight": sum_weight,
        **eps_of_both,
        **attributes,
    }


def normed_sum_cases() -> Cases:
    cases: Cases = {kind: partial(normed_sum, kind=kind) for kind in (*ROWS, "many")}
    for x_style in RMS_NORM_STYLES:
        for sum_style in RMS_NORM_STYLES:
            cases[f"{x_style}, {sum_style}"] = partial(
                normed_sum, kind="odd sizes", x_style=x_style, sum_style=sum_style
            )
    cases["fp32 weight"] = partial(normed_sum, kind="packed", weight=torch.float32)
    return left_out_sums(cases)


def layer_normed(
    draw: Draw, kind: str, residual: bool, weight: bool = True, bias: bool = True
) -> dict[str, Any]:
    arguments = normed(draw, kind, residual)
    width = arguments["x"].shape[-1]
    return arguments | {
        "weight": arguments["weight"] if weight else None,
        "bias": draw.normal(width) if bias else None,
    }


def layer_norm_cases(residual: bool) -> Cases:
    return {kind: partial(layer_normed, kind=kind, residual=residual) for kind in ROWS} | {
        "no bias": partial(layer_normed, kind="packed", residual=residual, bias=False),
        "neither weight nor bias": partial(
            layer_normed, kind="packed", residual=residual, weight=False, bias=False
        ),
    }


def one_process_group() -> str:
    """The name of a group of this process alone."""
    if not distributed.is_initialized():
        # gloo crashes if it gets tensors of a GPU to send from one to all.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    assert distributed.group.WORLD is not None
    return distributed.group.WORLD.group_name


def reducing(make: Make) -> Make:
    return lambda draw: make(draw) | {"process_group": one_process_group()}


def reducing_norm_cases(residual: bool) -> Cases:
    """Without the longest shape: the kernels behind the sum run it in their own cases."""
    cases = rms_norm_cases(residual)
    return {name: reducing(make) for name, make in cases.items() if name != "many"}


def padding_cases() -> Cases:
    kinds = {
        kind: partial(normed, kind=kind, residual=True, columns=64) for kind in (*ROWS, "many")
    }
    return kinds | {
        "one column": partial(normed, kind="odd sizes", residual=True, columns=1),
        "before, fp32 weight": partial(
            normed, kind="packed", residual=True, columns=17, style="before", weight=torch.float32
        ),
    }
