"""Routers and experts that AITER computes otherwise, or not at all, are refused with the reason."""

from typing import Any

import pytest
import stand_ins
import torch
from aiter_cases import FP8_OF, KERNELS
from compare import compare
from expert_cases import COLUMNS, GROUPS, WHOLE
from kernel_cases.draw import Draw
from kernel_cases.experts import DEEPSEEK, OAI, fp8, fp8_block, full, mxfp4, route
from test_kernels import run

from atomc import ops
from atomc.kernels.aiter.experts import experts as over_aiter
from atomc.ops.op import refusal
from atomc.platform import Platform

DRAW = Draw(torch.bfloat16)
V3 = {"experts": 256, "k": 8, "bias": True, **DEEPSEEK, "groups": 8, "topk_groups": 4}


def reason(name: str, given: dict[str, Any], arch: str = "gfx950") -> str | None:
    found = refusal(KERNELS[name], Platform.named(arch), given)
    return found and f"{found.code}: {found.text}"


def routed(**given: Any) -> str | None:
    return reason("route.topk_route", route(DRAW, **given))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"renormalize": True, "eps": 1e-6},
            "argument: AITER divides by the sum of the weights, here eps=1e-06 and min_sum=0.0",
        ),
        ({"renormalize": True, "eps": 1e-20, "min_sum": 1e-12}, None),
        ({"eps": 1.0, "min_sum": 1.0}, None),
        (
            {"score": "softmax_of_chosen", "bias": True},
            "argument: AITER adds the bias to the softmax, the op to the logits",
        ),
        (
            {"groups": 4, "topk_groups": 2, "group_score": "top2", "score": "sigmoid"},
            "argument: AITER has no router of groups by 'top2' of 'sigmoid' without bias",
        ),
        (
            {"groups": 4, "topk_groups": 2, "bias": True, "score": "sigmoid"},
            "argument: AITER has no router of groups by 'max' of 'sigmoid' with bias",
        ),
        ({"experts": 128, "k": 65}, "shape: choices of 65 exceed the limit of 64"),
        (V3, "argument: AITER does not sort 8 choices from 4 of 8 groups of 256 experts"),
        (V3 | {"in_order": False}, None),
        (
            V3 | {"in_order": False, "renormalize": False},
            "argument: AITER does not scale the undivided weights of 8 choices from 4 of 8 groups "
            "of 256 experts",
        ),
        (V3 | {"in_order": False, "renormalize": False, "scale": 1.0}, None),
        (V3 | {"k": 6}, None),
        (
            {"experts": 24, "bias": True, **DEEPSEEK, "groups": 3},
            "shape: 24 experts in 3 groups: AITER takes 2, 4 or 8 groups of a multiple of 4 "
            "experts",
        ),
    ],
)
def test_a_router_that_aiter_has_not_is_refused(given: dict[str, Any], said: str | None) -> None:
    assert routed(**given) == said


def test_logits_whose_rows_have_no_stride_of_their_own_are_refused() -> None:
    given = route(DRAW)
    turned = given | {"logits": given["logits"].t().contiguous().t()}
    said = "layout: the last dimension of logits is not contiguous"
    assert reason("route.topk_route", turned) == said


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ({"bias": True}, "argument: AITER's kernel does not support b13"),
        ({"limit": 7.0}, "argument: AITER's kernel does not support limit"),
        (OAI, "argument: AITER's kernel does not support interleaved"),
        (
            {"activation": "gelu_tanh"},
            "argument: activation 'gelu_tanh' is not one of ('silu', 'gelu')",
        ),
    ],
)
@pytest.mark.parametrize(
    ("name", "make", "more"),
    [
        ("experts.moe_experts", full, {}),
        ("experts.moe_experts_fp8", fp8, {"per": "tensor", "dtype": FP8_OF["gfx950"]}),
        ("experts_blocks.moe_experts_fp8", fp8_block, {"dtype": FP8_OF["gfx950"]}),
        ("experts_mxfp4.moe_experts_mxfp4", mxfp4, GROUPS),
    ],
)
def test_experts_that_aiters_kernels_have_not_are_refused(
    name: str, make: Any, more: dict[str, Any], rest: dict[str, Any], said: str
) -> None:
    made = WHOLE | more
    assert reason(name, make(DRAW, **made)) is None
    assert reason(name, make(DRAW, **made, **rest)) == said


@pytest.mark.parametrize(
    ("arch", "hidden", "inner", "columns"),
    [
        ("gfx942", 128, 192, None),
        ("gfx942", 128, 320, 128),
        ("gfx942", 128, 384, None),
        ("gfx942", 64, 128, 64),
        ("gfx950", 128, 192, 256),
        ("gfx950", 128, 384, 256),
        ("gfx950", 256, 512, None),
    ],
)
def test_experts_in_fp8_fill_cks_tiles_for_any_number_of_tokens(
    arch: str, hidden: int, inner: int, columns: int | None
) -> None:
    given = fp8(DRAW, hidden=hidden, inner=inner, dtype=FP8_OF[arch])
    said = f"shape: experts of {hidden} x {inner} do not fill CK's tiles of 128 x {columns}"
    assert reason("experts.moe_experts_fp8", given, arch) == (said if columns else None)


def test_scales_by_blocks_choose_the_kernel() -> None:
    rows = fp8(DRAW, **WHOLE, dtype=FP8_OF["gfx950"])
    blocks = fp8_block(DRAW, **WHOLE, dtype=FP8_OF["gfx950"])
    names = ("experts.moe_experts_fp8", "experts_blocks.moe_experts_fp8")
    assert [[reason(name, given) for given in (rows, blocks)] for name in names] == [
        [None, "argument: AITER's tables have kernels by blocks that read x in 16 bits"],
        ["argument: this kernel takes scales by blocks", None],
    ]


def test_static_and_dynamic_scales_are_not_mixed() -> None:
    per_tensor = fp8(DRAW, **WHOLE, per="tensor", dtype=FP8_OF["gfx950"])
    of_rows = fp8(DRAW, **WHOLE, dtype=FP8_OF["gfx950"])
    said = (
        "argument: under one scale for x, AITER takes one for the gated activation and for each "
        "expert"
    )
    for given in (
        per_tensor | {"act_scale": None},
        per_tensor | {"w13_scale": of_rows["w13_scale"]},
        per_tensor | {"w2_scale": of_rows["w2_scale"]},
    ):
        assert reason("experts.moe_experts_fp8", given) == said


@pytest.mark.parametrize(
    ("given", "arch", "said"),
    [
        ({}, "gfx950", None),
        ({"bias": True, **OAI}, "gfx950", None),
        ({}, "gfx942", "hardware: gfx942 does not multiply MXFP4"),
        (
            {"activation_format": "mxfp4"},
            "gfx950",
            "argument: AITER's Triton kernel gets x in bf16, not in codes with scales",
        ),
        (
            {"hidden": 96},
            "gfx950",
            "shape: experts of 96 x 64: AITER's kernel needs multiples of 64",
        ),
        (
            {"inner": 96},
            "gfx950",
            "shape: experts of 128 x 96: AITER's kernel needs multiples of 64",
        ),
    ],
)
def test_experts_in_mxfp4_get_whole_tiles_of_columns_in_bf16(
    given: dict[str, Any], arch: str, said: str | None
) -> None:
    made = mxfp4(DRAW, **COLUMNS | given)
    assert reason("experts_mxfp4_triton.moe_experts_mxfp4", made, arch) == said


@pytest.mark.parametrize(
    ("given", "arch", "said"),
    [
        ({}, "gfx950", None),
        ({}, "gfx942", "hardware: gfx942 does not multiply MXFP4"),
        (
            {"activation_format": "16 bits"},
            "gfx950",
            "dtype: AITER's kernel multiplies MXFP4 by MXFP4, here x is torch.bfloat16",
        ),
        (
            {"activation_format": "fp8"},
            "gfx950",
            "dtype: AITER's kernel multiplies MXFP4 by MXFP4, here x is torch.float8_e4m3fn",
        ),
        (
            {"hidden": 384},
            "gfx950",
            "shape: experts of 384 x 256: AITER takes multiples of 256 up to 16384",
        ),
        (
            {"inner": 128},
            "gfx950",
            "shape: experts of 256 x 128: AITER takes multiples of 256 up to 16384",
        ),
        (
            {"hidden": 16640, "experts": 1, "k": 1},
            "gfx950",
            "shape: experts of 16640 x 256: AITER takes multiples of 256 up to 16384",
        ),
        ({"inner": 16384, "experts": 1, "k": 1}, "gfx950", None),
    ],
)
def test_experts_in_mxfp4_get_whole_tiles_of_codes(
    given: dict[str, Any], arch: str, said: str | None
) -> None:
    made = mxfp4(DRAW, **GROUPS | given)
    assert reason("experts_mxfp4.moe_experts_mxfp4", made, arch) == said


def test_experts_in_mxfp4_are_not_multiplied_by_rows_in_fp16() -> None:
    made = mxfp4(Draw(torch.float16), **COLUMNS)
    found = reason("experts_mxfp4_triton.moe_experts_mxfp4", made)
    assert found is not None and found.startswith("dtype: ")


def test_no_kernel_over_aiter_has_experts_in_int8_whose_activation_it_truncates() -> None:
    assert not [name for name, kernel in KERNELS.items() if kernel.op == "moe_experts_int8"]


UNGUARDED = {
    "DeepSeek-V3": ("route.topk_route", route(DRAW, **V3)),
    "DeepSeek-V3, undivided": (
        "route.topk_route",
        route(DRAW, **V3 | {"renormalize": False, "in_order": False}),
    ),
    "bias": ("experts.moe_experts", full(DRAW, **WHOLE, bias=True)),
    "limit": ("experts.moe_experts", full(DRAW, **WHOLE, limit=0.1)),
}


def test_the_choices_of_deepseek_v3_are_those_of_the_op_in_another_order() -> None:
    given = route(DRAW, **V3, in_order=False)
    with stand_ins.installed("gfx950"):
        weights, ids = run(KERNELS["route.topk_route"], given)
    expected_weights, expected_ids = ops.topk_route.reference(**given)
    order, expected_order = ids.argsort(-1), expected_ids.argsort(-1)
    assert not torch.equal(ids, expected_ids)
    assert torch.equal(ids.gather(-1, order), expected_ids.gather(-1, expected_order))
    torch.testing.assert_close(
        weights.gather(-1, order), expected_weights.gather(-1, expected_order)
    )


@pytest.mark.parametrize("name", UNGUARDED)
def test_what_is_refused_would_give_wrong_results(name: str) -> None:
    kernel, given = UNGUARDED[name]
    with stand_ins.installed("gfx950"), pytest.raises(AssertionError, match=r"off by|other whole"):
        compare(KERNELS[kernel], lambda: dict(given), torch.bfloat16)


def test_experts_are_relaid_once() -> None:
    given = full(DRAW, **WHOLE)
    for prepare, name in ((over_aiter.relaid_gate_up, "w13"), (over_aiter.relaid_weight, "w2")):
        made = prepare(given[name])
        assert made.tensors[0].shape == given[name].shape
        assert not torch.equal(made.tensors[0], given[name])
