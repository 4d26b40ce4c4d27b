"""Routers, and mixtures of experts with weights of all formats."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atomc import ops
from atomc.ops.formats import pack_int4
from kernel_cases.draw import E4M3FNUZ, Cases, Draw
from kernel_cases.rows import one_process_group
from kernel_cases.scaled_linear import scale_of

T, E, K, H, I = 5, 6, 2, 64, 48  # noqa: E741
E4M3 = torch.float8_e4m3fn
OAI: dict[str, Any] = {"activation": "swiglu_oai", "interleaved": True, "limit": 2.0}
GROUPED = {"groups": 4, "topk_groups": 2, "group_score": "top2"}
DEEPSEEK: dict[str, Any] = {
    "score": "sigmoid",
    "renormalize": True,
    "eps": 1e-20,
    "scale": 2.5,
    **GROUPED,
}


def route(
    draw: Draw, *, tokens: int = 7, experts: int = 16, k: int = 4, bias: bool = False, **rest: Any
) -> dict[str, Any]:
    given = draw.normal(experts, dtype=torch.float32) / 4 if bias else None
    return {"logits": draw.normal(tokens, experts), "bias": given, "k": k, **rest}


ROUTES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "renormalized": {"renormalize": True},
    "one token": {"tokens": 1, "renormalize": True},
    "no tokens": {"tokens": 0},
    "one choice": {"k": 1},
    "all experts": {"k": 16, "renormalize": True},
    "odd number of experts": {"experts": 37, "k": 5, "renormalize": True},
    "many experts": {"experts": 384, "k": 8, "score": "sigmoid", "bias": True},
    "of chosen": {"score": "softmax_of_chosen", "experts": 32},
    "sigmoid with bias": {"score": "sigmoid", "bias": True, "renormalize": True},
    "groups of two": {"bias": True, **DEEPSEEK},
    "groups of one": {"groups": 4, "topk_groups": 3, "scale": 16.0},
    "least sum": {"bias": True, "renormalize": True, "min_sum": 0.9},
    "square root": {"score": "sqrt_softplus", "bias": True, "renormalize": True, "scale": 1.5},
    "rounded weights": {"renormalize": True, "dtype": torch.bfloat16},
}
TOPK_ROUTE: Cases = {name: partial(route, **given) for name, given in ROUTES.items()}


def counted(
    draw: Draw, *, tokens: int = 7, k: int = 4, padding: int = 0, low: int = 0
) -> dict[str, Any]:
    """Choices among E experts; the last rows are padding, ids below 0 are of another device."""
    slots = [*range(tokens - padding), *[-1] * padding]
    ids = draw.below(E - low, tokens, k, dtype=torch.int32) + low
    return {"ids": ids, "slots": draw.ints(slots), "counts": draw.below(1000, E)}


COUNT_EXPERTS: Cases = {
    "all rows": counted,
    "padding": partial(counted, padding=3),
    "only padding": partial(counted, padding=7),
    "other devices": partial(counted, low=-3, padding=1),
    "one token": partial(counted, tokens=1, k=1),
    "no tokens": partial(counted, tokens=0),
    "many tokens": partial(counted, tokens=2100, padding=52),
}


def linear_route(
    draw: Draw,
    *,
    hidden: int = 72,
    linear_bias: bool = False,
    logits_dtype: torch.dtype | None = None,
    **rest: Any,
) -> dict[str, Any]:
    made = route(draw, **rest)
    tokens, experts = made.pop("logits").shape
    return {
        "x": draw.normal(tokens, hidden),
        "weight": draw.normal(experts, hidden) / hidden**0.5,
        "linear_bias": draw.normal(experts) if linear_bias else None,
        "logits_dtype": logits_dtype or draw.dtype,
        **made,
    }


LINEAR_TOPK_ROUTE: Cases = {
    "one token": partial(linear_route, tokens=1, renormalize=True),
    "Qwen3-MoE": partial(linear_route, renormalize=True, experts=128, k=8),
    "GPT-OSS": partial(linear_route, score="softmax_of_chosen", linear_bias=True, experts=32),
    "GLM-4.5": partial(linear_route, bias=True, logits_dtype=torch.float32, **DEEPSEEK),
    "no tokens": partial(linear_route, tokens=0),
    "long": partial(linear_route, hidden=2056, tokens=3),
}


def choices(draw: Draw, tokens: int, k: int, experts: int, dtype: torch.dtype) -> dict[str, Any]:
    """Different experts for each token, and weights that sum to 1."""
    order = torch.rand(tokens, experts, generator=draw.generator).argsort(-1)[:, :k]
    weights = draw.normal(tokens, k, dtype=torch.float32).softmax(-1)
    return {"ids": order.to(torch.int32).to(draw.device), "weights": weights.to(dtype)}


def routed(
    draw: Draw,
    *,
    tokens: int = T,
    experts: int = E,
    k: int = K,
    hidden: int = H,
    inner: int = I,
    bias: bool = False,
    rounded: bool = False,
    **rest: Any,
) -> dict[str, Any]:
    """Everything of a call but weights and scales."""
    made = choices(draw, tokens, k, experts, draw.dtype if rounded else torch.float32)
    biases = {
        "b13": draw.normal(experts, 2 * inner) if bias else None,
        "b2": draw.normal(experts, hidden) if bias else None,
    }
    return {"x": draw.normal(tokens, hidden), **made, **biases, **rest}


def sizes(given: dict[str, Any]) -> tuple[int, int, int]:
    return given.get("experts", E), given.get("hidden", H), given.get("inner", I)


def full(draw: Draw, **given: Any) -> dict[str, Any]:
    experts, hidden, inner = sizes(given)
    made = routed(draw, **given)
    return made | {
        "w13": draw.normal(experts, 2 * inner, hidden) / hidden**0.5,
        "w2": draw.normal(experts, hidden, inner) / inner**0.5,
    }


def transposed(draw: Draw, **given: Any) -> dict[str, Any]:
    """Weights as transformers stores those of GPT-OSS and Llama 4: [E, H, 2I] and [E, I, H]."""
    made = full(draw, **given)
    turned = {
        name: made[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("w13", "w2")
    }
    return made | turned


def outside(make: Callable[..., dict[str, Any]], draw: Draw, **given: Any) -> dict[str, Any]:
    """Some ids are experts of another device."""
    made = make(draw, **given)
    ids = made["ids"].clone()
    ids[0], ids[-1, -1] = given.get("experts", E), -1
    return made | {"ids": ids}


SIZES: dict[str, dict[str, Any]] = {
    "one token": {"tokens": 1},
    "odd sizes": {"tokens": 7, "hidden": 96, "inner": 32, "experts": 5, "k": 3},
    "no tokens": {"tokens": 0},
    "one expert": {"experts": 1, "k": 1},
    "seventeen tokens": {"tokens": 17, "experts": 8},
    "many tokens": {"tokens": 67, "experts": 4},
    "many experts, few tokens": {"tokens": 2, "experts": 40, "k": 4},
    "some experts of two tokens": {"tokens": 3, "experts": 20, "k": 4},
    "biases": {"bias": True},
    "GPT-OSS": {"bias": True, "rounded": True, **OAI},
    "gelu": {"activation": "gelu"},
    "gelu by tanh": {"activation": "gelu_tanh", "limit": 1.0},
}
# More than 96 pairs per expert.
FULL_BLOCKS: dict[str, Any] = {"tokens": 105, "experts": 2, "k": 2}
MOE_EXPERTS: Cases = {
    **{name: partial(full, **given) for name, given in SIZES.items()},
    "width of no power of two": partial(full, hidden=80, inner=40),
    "int64 ids": lambda draw: (made := full(draw)) | {"ids": made["ids"].to(torch.int64)},
    "weight on input": partial(full, weight_on_input=True, k=1),
    "transposed": partial(transposed, bias=True, rounded=True, **OAI),
    "transposed halves": partial(transposed, tokens=19),
    "full blocks": partial(full, **FULL_BLOCKS),
    "other devices' experts": partial(outside, full),
    "packed rows": lambda draw: full(draw) | {"x": draw.packed(T, H)[1]},
    "one expert for all": lambda draw: (
        (made := full(draw, tokens=33)) | {"ids": torch.full_like(made["ids"], 2)}
    ),
}


def fp8_weights(draw: Draw, given: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    experts, hidden, inner = sizes(given)
    return {
        "w13": (draw.normal(experts, 2 * inner, hidden) * 20).to(dtype),
        "w2": (draw.normal(experts, hidden, inner) * 20).to(dtype),
    }


def fp8(draw: Draw, *, per: str = "row", dtype: torch.dtype = E4M3, **given: Any) -> dict[str, Any]:
    """per: "row", "expert" (rows of x have scales), or "tensor" (x has one scale, and so has the
    gated activation).
    """
    experts, hidden, inner = sizes(given)
    made = routed(draw, out_dtype=draw.dtype, **given)
    tokens = len(made["x"])
    rows = (2 * inner, hidden) if per == "row" else (1, 1)
    spread = 10 if made["b13"] is not None else 0.05  # biases are larger than products
    static = {"x_scale": scale_of(draw, 1), "act_scale": scale_of(draw, 1) * spread}
    dynamic = {"x_scale": scale_of(draw, tokens, 1)}
    return (
        made
        | fp8_weights(draw, given, dtype)
        | {
            "x": (made["x"].float() * 20).to(dtype),
            "w13_scale": scale_of(draw, experts, rows[0], 1),
            "w2_scale": scale_of(draw, experts, rows[1], 1),
        }
        | (static if per == "tensor" else dynamic)
    )


def fp8_block(draw: Draw, *, dtype: torch.dtype = E4M3, block: int = 128, **given: Any) -> Any:
    experts, hidden, inner = sizes(given)
    made = routed(draw, out_dtype=draw.dtype, block=block, **given)
    across, up, down = (-(-size // block) for size in (hidden, 2 * inner, inner))
    return (
        made
        | fp8_weights(draw, given, dtype)
        | {
            "x": (made["x"].float() * 20).to(dtype),
            "x_scale": scale_of(draw, len(made["x"]), across),
            "w13_scale": scale_of(draw, experts, up, across),
            "w2_scale": scale_of(draw, experts, across, down),
        }
    )


def int8(draw: Draw, **given: Any) -> dict[str, Any]:
    experts, hidden, inner = sizes(given)
    made = routed(draw, out_dtype=draw.dtype, **given)
    shapes = {"x": made["x"].shape, "w13": (experts, 2 * inner, hidden)}
    shapes["w2"] = (experts, hidden, inner)
    codes = {name: (draw.below(255, *s) - 127).to(torch.int8) for name, s in shapes.items()}
    scales = {
        "x_scale": scale_of(draw, len(made["x"]), 1),
        "w13_scale": scale_of(draw, experts, 2 * inner, 1),
        "w2_scale": scale_of(draw, experts, hidden, 1),
    }
    return made | codes | scales


def int4(draw: Draw, *, group: int = 32, zeros: bool = False, **given: Any) -> dict[str, Any]:
    experts, hidden, inner = sizes(given)
    made = routed(draw, group=group, **given)
    for name, rows, columns in (("w13", 2 * inner, hidden), ("w2", hidden, inner)):
        groups = columns // group
        made[name] = pack_int4(draw.below(16, experts, rows, columns))
        made[f"{name}_scale"] = scale_of(draw, experts, rows, groups).to(draw.dtype) * 4
        drawn = draw.below(16, experts, rows, groups, dtype=torch.uint8) if zeros else None
        made[f"{name}_zeros"] = drawn
    return made


def mxfp4(draw: Draw, *, activation_format: str = "16 bits", **given: Any) -> dict[str, Any]:
    experts, hidden, inner = sizes(given)
    made = routed(draw, out_dtype=draw.dtype, **given)
    for name, rows, columns in (("w13", 2 * inner, hidden), ("w2", hidden, inner)):
        weight = draw.normal(experts, rows, columns) / columns**0.5
        # Neighbouring groups have different scales.
        sizes_of_groups = 2.0 ** draw.below(5, experts, rows, columns // 32)
        weight *= sizes_of_groups.repeat_interleave(32, -1) / 4
        made[name], made[f"{name}_scale"] = ops.quant_mxfp4.reference(weight)
    if activation_format == "mxfp4":
        made["x"], made["x_scale"] = ops.quant_mxfp4.reference(made["x"])
    elif activation_format == "fp8":
        made["x"], made["x_scale"] = ops.quant_fp8_per_token.reference(made["x"])
    return made


def dispatched(draw: Draw, **given: Any) -> dict[str, Any]:
    """For experts in another order than their ids, on the one process of a group."""
    made = full(draw, **given)
    held = len(made["w13"])
    rows = draw.ints([(3 + e) % held for e in range(held)])
    return {name: made[name] for name in ("x", "ids", "weights")} | {
        "places": torch.stack((rows, rows)),
        "nowhere": held,
        "ranks": 1,
        "process_group": one_process_group(),
    }


DISPATCH_TOKENS: Cases = {
    "some tokens": dispatched,
    "no tokens": partial(dispatched, tokens=0),
    "int64 ids": lambda draw: (made := dispatched(draw)) | {"ids": made["ids"].to(torch.int64)},
    "rounded weights": partial(dispatched, rounded=True),
    "packed rows": lambda draw: dispatched(draw) | {"x": draw.packed(T, H)[1]},
    "codes with scales": lambda draw: (
        dispatched(draw) | {"x": draw.normal(T, H).to(E4M3), "x_scale": scale_of(draw, T, 1)}
    ),
}
COMBINE_TOKENS: Cases = {
    name: lambda draw, tokens=tokens: {
        "partial": draw.normal(tokens, H),
        "ids": draw.below(2, tokens, 2),
        "ranks": 1,
        "process_group": one_process_group(),
    }
    for name, tokens in (("some tokens", T), ("no tokens", 0))
}
WHOLE_GROUPS = {
    name: given | ({"inner": 64} if "inner" not in given else {}) for name, given in SIZES.items()
}
MOE_EXPERTS_FP8: Cases = {
    **{name: partial(fp8, **given) for name, given in SIZES.items()},
    "one scale per expert": partial(fp8, per="expert"),
    "static": partial(fp8, per="tensor", bias=True),
    "fnuz": partial(fp8, dtype=E4M3FNUZ),
    "blocks": partial(fp8_block, hidden=256, inner=128),
    "blocks, interleaved": partial(fp8_block, hidden=128, inner=128, bias=True, **OAI),
    "full blocks": partial(fp8, **FULL_BLOCKS),
    "blocks, ragged": partial(fp8_block, hidden=160, inner=96, tokens=3),
    "blocks, many tokens": partial(fp8_block, hidden=128, inner=256, tokens=35),
    "other devices' experts": partial(outside, fp8),
    "other devices' of many": partial(outside, fp8, tokens=2, experts=40, k=4),
}
MOE_EXPERTS_INT8: Cases = {
    **{name: partial(int8, **given) for name, given in SIZES.items()},
    "other devices' experts": partial(outside, int8),
}
MOE_EXPERTS_W4A16: Cases = {
    **{name: partial(int4, **given) for name, given in WHOLE_GROUPS.items()},
    "zeros": partial(int4, zeros=True, inner=64),
    "full blocks": partial(int4, inner=64, **FULL_BLOCKS),
    "several parts": partial(int4, hidden=288, inner=160, bias=True),
    "group of 64": partial(int4, group=64, zeros=True, hidden=192, inner=128),
    "group of 128": partial(int4, group=128, hidden=256, inner=128),
    "group of 128, zeros": partial(int4, group=128, zeros=True, hidden=256, inner=128),
    "other devices' experts": partial(outside, int4, inner=64),
}
MOE_EXPERTS_MXFP4: Cases = {
    **{name: partial(mxfp4, **given) for name, given in WHOLE_GROUPS.items()},
    "several parts": partial(mxfp4, hidden=288, inner=160, bias=True),
    "fp8 activations": partial(mxfp4, activation_format="fp8", inner=64),
    "mxfp4 activations": partial(mxfp4, activation_format="mxfp4", inner=64),
    "other devices' experts": partial(outside, mxfp4, inner=64),
}
