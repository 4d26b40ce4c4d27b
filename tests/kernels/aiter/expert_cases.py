"""More cases for routers and experts: what AITER's kernels have tiles for, in the fp8 of an
architecture.
"""

from functools import partial
from typing import Any

import torch
from kernel_cases.draw import Cases, Draw
from kernel_cases.experts import DEEPSEEK, OAI, fp8, fp8_block, full, mxfp4, outside, route

WHOLE = {"hidden": 128, "inner": 256}
COLUMNS = {"hidden": 128, "inner": 64}
GROUPS = {"hidden": 256, "inner": 256, "activation_format": "mxfp4"}


def logits_with_gaps(draw: Draw, **rest: Any) -> dict[str, Any]:
    given = route(draw, **rest)
    return given | {"logits": draw.packed(*given["logits"].shape)[1]}


def in_fp32(draw: Draw, **rest: Any) -> dict[str, Any]:
    given = route(draw, **rest)
    return given | {"logits": draw.normal(*given["logits"].shape, dtype=torch.float32)}


ROUTES: Cases = {
    "scaled": partial(route, renormalize=True, scale=2.5),
    "of chosen, scaled": partial(route, score="softmax_of_chosen", scale=2.5),
    "softmax with bias": partial(route, bias=True),
    "groups by sigmoid": partial(
        route, groups=2, topk_groups=1, score="sigmoid", renormalize=True, scale=1.5
    ),
    "groups of 20": partial(route, experts=160, k=6, bias=True, **DEEPSEEK | {"groups": 8}),
    "groups of 3": partial(route, experts=24, bias=True, **DEEPSEEK | {"groups": 8}),
    "not divided": partial(route, bias=True, **DEEPSEEK | {"renormalize": False}),
    "DeepSeek-V3": partial(
        route, experts=256, k=8, bias=True, **DEEPSEEK | {"groups": 8, "topk_groups": 4}
    ),
    **{
        f"gaps, {name}": partial(logits_with_gaps, **given)
        for name, given in {
            "softmax": {},
            "sigmoid": {"score": "sigmoid"},
            "groups": {"groups": 4, "topk_groups": 3, "tokens": 3},
            "biased groups": {"bias": True, **DEEPSEEK},
        }.items()
    },
    "fp32 logits": partial(in_fp32, bias=True, **DEEPSEEK),
    "fp32 logits, softmax": partial(in_fp32, renormalize=True),
}


def of_experts(native: torch.dtype) -> dict[str, Cases]:
    sizes: dict[str, dict[str, Any]] = {
        "whole tiles": WHOLE,
        "more tiles": {"hidden": 256, "inner": 512, "tokens": 19, "experts": 5, "k": 3},
        "no tokens, whole tiles": {**WHOLE, "tokens": 0},
        "one token, whole tiles": {**WHOLE, "tokens": 1},
        "rounded weights": {**WHOLE, "rounded": True},
        "gelu, whole tiles": {**WHOLE, "activation": "gelu"},
        "gelu by tanh, whole tiles": {**WHOLE, "activation": "gelu_tanh"},
    }
    return {
        "topk_route": ROUTES,
        "moe_experts": {
            **{name: partial(full, **given) for name, given in sizes.items()},
            "narrow tiles": partial(full, hidden=128, inner=192),
            "int64 ids, whole tiles": lambda draw: (
                (made := full(draw, **WHOLE)) | {"ids": made["ids"].to(torch.int64)}
            ),
            "weight on input, whole tiles": partial(full, weight_on_input=True, k=1, **WHOLE),
            "weights on input, whole tiles": partial(full, weight_on_input=True, k=2, **WHOLE),
            "ids far outside, whole tiles": lambda draw: (
                (made := full(draw, **WHOLE)) | {"ids": made["ids"] * 5 - 7}
            ),
            "other devices' experts, whole tiles": partial(outside, full, **WHOLE),
            "packed rows, whole tiles": lambda draw: (
                full(draw, **WHOLE) | {"x": draw.packed(5, WHOLE["hidden"])[1]}
            ),
        },
        "moe_experts_fp8": {
            **{
                f"{name}, per {per}": partial(fp8, per=per, dtype=native, **given)
                for per in ("row", "expert", "tensor")
                for name, given in sizes.items()
            },
            "other devices' experts, whole tiles": partial(outside, fp8, dtype=native, **WHOLE),
            **{
                f"blocks, {name}": partial(fp8_block, dtype=native, **given)
                for name, given in sizes.items()
            },
            "blocks, other devices' experts": partial(outside, fp8_block, dtype=native, **WHOLE),
        },
        "moe_experts_mxfp4": {
            "whole columns": partial(mxfp4, **COLUMNS),
            "more columns": partial(mxfp4, hidden=192, inner=128, tokens=19, experts=5, k=3),
            "one token, whole columns": partial(mxfp4, **COLUMNS, tokens=1, k=1),
            "no tokens, whole columns": partial(mxfp4, **COLUMNS, tokens=0),
            "GPT-OSS": partial(mxfp4, **COLUMNS, bias=True, **OAI),
            "GPT-OSS, other devices' experts": partial(outside, mxfp4, **COLUMNS, bias=True, **OAI),
            "other devices' experts, whole columns": partial(outside, mxfp4, **COLUMNS),
            **{
                f"codes, {name}": partial(mxfp4, **GROUPS | given)
                for name, given in {
                    "whole tiles": {},
                    "more tiles": {"hidden": 512, "inner": 256, "tokens": 33, "experts": 3},
                    "one choice": {"k": 1},
                    "one token": {"tokens": 1, "k": 3},
                    "no tokens": {"tokens": 0},
                    "rounded weights": {"rounded": True},
                    "gelu": {"activation": "gelu"},
                }.items()
            },
            "codes, other devices' experts": partial(outside, mxfp4, **GROUPS),
        },
    }
