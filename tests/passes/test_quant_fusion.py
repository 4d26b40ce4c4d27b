"""Norms and gated activations take in the quantizer that reads them, whatever the scheme."""

from itertools import product

import pytest
import torch
from rewriting import after_passes, explained, rewritten
from torch import nn

from atomc import ops, passes
from atomc.ops.norm import RMS_NORM_STYLES
from atomc.ops.schemes import SCHEMES
from atomc.passes.fuse.quantizers import QUANTIZERS

# Every quantizer with every value that its attributes may have.
KINDS = [
    (quantizer, dict(zip(quantizer.captured, values, strict=True)))
    for quantizer in QUANTIZERS
    for values in product(*(choice.values for choice in quantizer.captured.values()))
]
EACH_KIND = pytest.mark.parametrize(
    ("quantizer", "decided"),
    KINDS,
    ids=[" ".join([q.scheme, *map(str, decided.values())]) for q, decided in KINDS],
)
NAMED = {p.name: p for p in passes.PIPELINE}
X, R, W = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
W = W[0]
SCALE = torch.tensor([0.1])


def to_values(codes):
    """Codes as what can be compared: fp8 has no equality of its own everywhere."""
    return codes.to(torch.float32) if codes.dtype != torch.uint8 else codes


def shown(results):
    return tuple(to_values(result) if i == 0 else result for i, result in enumerate(results))


def only(name):
    return [NAMED["tidy"], NAMED[name]]


@EACH_KIND
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_quantizer_joins_the_norm_before_it(quantizer, decided, dtype):
    def function(x, w, scale):
        return shown(quantizer(ops.rms_norm(x, w, 1e-6), scale, **decided))

    text = rewritten(only("rms_norm_quant"), function, X.to(dtype), W.to(dtype), SCALE)
    assert (
        f"= rms_norm_quant(x, w, 1e-06, {'scale' if quantizer.is_static else 'None'}, 'after'"
        in text
    )
    assert f"scheme='{quantizer.scheme}'" in text and "quant_fp8" not in text.replace(
        "rms_norm_quant", ""
    )


@EACH_KIND
def test_every_quantizer_joins_a_norm_behind_an_add_and_the_sum_stays(quantizer, decided):
    def function(x, r, w, scale):
        y, total = ops.add_rms_norm(x, r, w, 1e-6)
        return (*shown(quantizer(y, scale, **decided)), total)

    text = rewritten(only("add_rms_norm_quant"), function, X, R, W, SCALE)
    assert text.count("add_rms_norm_quant(") == 1 and "keep=False" in text
    assert "%0.2" in text.splitlines()[-1]  # the sum


@EACH_KIND
def test_every_quantizer_joins_a_gated_activation(quantizer, decided):
    def function(gate, up, scale):
        return shown(quantizer(ops.silu_and_mul(gate, up), scale, **decided))

    text = rewritten(only("silu_and_mul_quant"), function, X, R, SCALE)
    assert text.count("silu_and_mul_quant(") == 1


@pytest.mark.parametrize("style", RMS_NORM_STYLES)
@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32], ids=str)
def test_every_style_and_weight_of_a_norm_fuses(style, weight):
    def function(x, w):
        return shown(ops.quant_fp8_per_token(ops.rms_norm(x, w, 1e-6, style)))

    assert f"'{style}'" in rewritten(only("rms_norm_quant"), function, X, W.to(weight))


def test_a_norm_that_is_read_elsewhere_is_written_too():
    def function(x, r, w):
        y, total = ops.add_rms_norm(x, r, w, 1e-6)
        return (*shown(ops.quant_fp8_group(y)), y, total)

    text = rewritten(only("add_rms_norm_quant"), function, X, R, W)
    assert "keep=True" in text and "%0.2" in text and "%0.3" in text


def test_of_two_different_quantizers_one_joins_and_the_other_reads_what_is_kept():
    def function(x, w):
        y = ops.rms_norm(x, w, 1e-6)
        return (*shown(ops.quant_fp8_per_token(y)), *shown(ops.quant_int8_per_token(y)))

    traced = after_passes(only("rms_norm_quant"), function, X, W)
    assert traced.error == 0 and traced.report.matches["rms_norm_quant"] == 1
    assert "keep=True" in traced.text and "(%0.2)" in traced.text


def test_a_view_between_changes_whose_rows_share_a_scale_and_is_a_near_miss():
    report = explained(
        lambda x, w: shown(ops.quant_fp8_per_token(ops.rms_norm(x, w, 1e-6).view(10, 32))), X, W
    )
    [miss] = report.misses("rms_norm_quant")
    assert "view" in miss.found


def test_any_number_of_tokens():
    def function(x, r, w):
        y, total = ops.add_rms_norm(x, r, w, 1e-6)
        return (*shown(ops.quant_fp8_per_token(y)), total)

    rewritten(only("add_rms_norm_quant"), function, X, R, W, dynamic=True)


def test_matches_are_counted_by_scheme_as_well():
    def function(x, w):
        return shown(ops.quant_int8_per_token(ops.rms_norm(x, w, 1e-6)))

    matches = explained(function, X, W).matches
    assert matches["rms_norm_quant"] == matches["rms_norm_quant[int8_per_token]"] == 1


def test_the_whole_pipeline_fuses_a_written_out_norm_behind_an_add():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(W.clone(), requires_grad=False)

        def forward(self, x, r):
            total = x + r
            wide = total.float()
            y = self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(
                total.dtype
            )
            return (*shown(ops.quant_fp8_per_token(y)), total)

    report = explained(Block(), X, R)
    assert report.matches["add_rms_norm_quant[fp8_per_token]"] == 1


def test_a_quantizer_of_something_else_is_left_alone_with_what_is_missing():
    report = explained(lambda x, w: shown(ops.quant_fp8_per_token(x * w)), X, W)
    assert not report.matches["rms_norm_quant"]
    why = report.why("rms_norm_quant")
    assert "no anchor: the graph has no rms_norm" in why and "quant_fp8_per_token" in why


def test_without_a_quantizer_it_says_so():
    report = explained(lambda x, w: ops.rms_norm(x, w, 1e-6), X, W)
    assert "no anchor: the graph has no quant_fp8_group and no quant_fp8_per_token" in report.why(
        "rms_norm_quant"
    )


def test_arithmetic_between_norm_and_quantizer_is_a_near_miss_with_its_name():
    report = explained(
        lambda x, w: shown(ops.quant_fp8_per_token(ops.rms_norm(x, w, 1e-6) * 2)), X, W
    )
    [miss] = report.misses("rms_norm_quant")
    assert "mul" in miss.found and miss.kind == "extra op"


def test_groups_of_another_size_are_left_alone():
    report = explained(lambda x, w: shown(ops.quant_fp8_group(ops.rms_norm(x, w, 1e-6), 32)), X, W)
    assert not report.matches["rms_norm_quant"]
    assert "it does not support quant_fp8_group like quant_fp8_group(group=32" in report.why(
        "rms_norm_quant"
    )


def test_a_norm_behind_an_add_takes_the_quantizer_first():
    def function(x, r, w):
        y, total = ops.add_rms_norm(x, r, w, 1e-6)
        return (*shown(ops.quant_fp8_per_token(y)), total)

    assert "taken by add_rms_norm_quant" in explained(function, X, R, W).why("rms_norm_quant")


def test_every_scheme_has_a_quantizer_and_the_other_way_round():
    assert {quantizer.scheme for quantizer in QUANTIZERS} == set(SCHEMES)


def test_an_unknown_scheme_is_named_with_those_that_exist():
    with pytest.raises(ValueError, match=r"quantization scheme 'fp6' is not one of \('fp8_static'"):
        ops.rms_norm_quant.reference(X, W, 1e-6, scheme="fp6")


def test_a_weight_in_neither_the_dtype_of_the_model_nor_fp32_is_a_near_miss():
    report = explained(
        lambda x, w: shown(ops.quant_fp8_per_token(ops.rms_norm(x, w, 1e-6))), X, W.half()
    )
    [miss] = report.misses("rms_norm_quant")
    assert (miss.kind, miss.expected, miss.found) == (
        "dtype",
        "`weight` in bfloat16 (the dtype of `x`) or float32",
        "float16",
    )


@EACH_KIND
def test_a_norm_quantizes_for_what_reads_it_through_a_view(quantizer, decided):
    """As experts do, whose router reads the view itself."""
    column_major = decided.get("column_major", False)

    def function(x, w, scale):
        y = ops.rms_norm(x, w, 1e-6).view(-1, 64)
        return *shown(quantizer(y, scale, **decided)), y

    names = ("tidy", "quantizers_before_views", "rms_norm_quant")
    chosen, inputs = [NAMED[name] for name in names], (X.view(1, 5, 64), W, SCALE)
    # A view of scales by column would have other strides.
    text = rewritten(chosen, function, *inputs, matches=0 if column_major else 1)
    assert ("= quant_" in text) == column_major
