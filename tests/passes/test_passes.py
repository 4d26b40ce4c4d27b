"""Each pass fires on every spelling of its idea and leaves alone what only looks like it; numbers
agree each time.
"""

import pytest
import torch
import torch.nn.functional as F
from refusals import refusal_text
from rewriting import TIDY, after_passes, explained, rewritten, since
from torch import nn

import atomc
from atomc import kernels, ops, passes
from atomc.compiler import pipeline
from atomc.graph.canonical import call
from atomc.options import Options
from atomc.passes.fuse.add_norm import ADD_LAYER_NORM, ADD_RMS_NORM
from atomc.passes.fuse.qk_norm_rope import QK_NORM_ROPE
from atomc.passes.recognize.gated import GELU_AND_MUL, SILU_AND_MUL
from atomc.passes.recognize.layer_norm import LAYER_NORM
from atomc.passes.recognize.rms_norm import RMS_NORM
from atomc.passes.recognize.rope import ROPE, ROPE_IN_FP32
from atomc.passes.recognize.rope_before_transpose import ROPE_BEFORE_TRANSPOSE
from atomc.platform import Platform
from atomc.rewriting.graph_pass import Context, rewriting

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
T, N, K, D = 5, 4, 2, 16
X, R, W, B = torch.randn(3, D), torch.randn(3, D), torch.randn(D), torch.randn(D)
GATE, UP, PACKED = torch.randn(3, 24), torch.randn(3, 24), torch.randn(3, 48)
Q, KEYS, COS, SIN = (
    torch.randn(T, N, D),
    torch.randn(T, K, D),
    torch.randn(T, 1, D),
    torch.randn(T, 1, D),
)


def cast(dtype, *tensors):
    return [tensor.to(dtype) for tensor in tensors]


# ---- rms_norm


def after(x, w, eps=1e-6):
    x_f32 = x.to(torch.float32)
    return w * (x_f32 * torch.rsqrt(x_f32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def after_with_weight_behind(x, w):
    x_f32 = x.float()
    return (x_f32 * torch.rsqrt(x_f32.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def after_with_x_times_x(x, w):
    x_f32 = x.float()
    return w * (torch.rsqrt((x_f32 * x_f32).mean(-1, keepdim=True) + 1e-6) * x_f32).type_as(x)


def after_with_eps_first(x, w):
    x_f32 = x.float()
    return w * (
        x_f32 * torch.rsqrt(1e-6 + torch.mean(torch.square(x_f32), dim=1, keepdim=True))
    ).to(x.dtype)


def before(x, w):
    x_f32 = x.float()
    return (w * (x_f32 * torch.rsqrt(x_f32.pow(2).mean(-1, keepdim=True) + 1e-6))).to(x.dtype)


def one_plus(x, w):
    x_f32 = x.float()
    return (
        x_f32 * torch.rsqrt(x_f32.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + w.float())
    ).type_as(x)


SPELLINGS = {
    after: "after",
    after_with_weight_behind: "after",
    after_with_x_times_x: "after",
    after_with_eps_first: "after",
    before: "before",
    one_plus: "one_plus",
}


@pytest.mark.parametrize("function", SPELLINGS)
def test_every_spelling_of_a_norm_becomes_one_op(function):
    assert (
        rewritten(RMS_NORM, function, *cast(torch.bfloat16, X, W))
        == f"""\
%0 = rms_norm(x, w, 1e-06, '{SPELLINGS[function]}')
return %0"""
    )


@pytest.mark.parametrize("function", SPELLINGS)
def test_in_fp32_the_same_norms_are_recognised_though_no_cast_is_left(function):
    # Without roundings "before" and "after" are the same.
    style = "one_plus" if function is one_plus else "after"
    assert f"rms_norm(x, w, 1e-06, '{style}')" in rewritten(RMS_NORM, function, X, W)


@pytest.mark.parametrize(
    ("function", "style"), [(after, "after"), (before, "before"), (one_plus, "one_plus")]
)
def test_an_fp32_weight_of_a_bf16_row_is_an_attribute(function, style):
    report = explained(function, X.bfloat16(), W)
    assert [site.attrs for site in report.sites] == [
        {"style": style, "weight": "fp32", "eps": 1e-6}
    ]


@DTYPES
@pytest.mark.parametrize("shape", [(3, D), (2, 3, D), (1, 2, 3, D)])
def test_a_norm_of_any_rank_is_recognised(shape, dtype):
    rewritten(RMS_NORM, after, *cast(dtype, torch.randn(shape), W))


@DTYPES
def test_f_rms_norm_and_the_module_are_lifted_whole(dtype):
    module = nn.RMSNorm(D, eps=1e-5).to(dtype)

    def both(x, w):
        return module(F.rms_norm(x, (D,), w, 1e-6))

    report = explained(
        both, *cast(dtype, X, W), tolerance=1e-2 if dtype == torch.bfloat16 else 1e-6
    )
    assert report.matches["rms_norm"] == 2
    assert {site.attrs["style"] for site in report.sites} == {"before"}


def test_f_rms_norm_over_two_dimensions_is_not_recognized():
    assert not explained(lambda x: F.rms_norm(x, (3, D), None, 1e-6), X).matches["rms_norm"]


def test_of_two_norms_of_one_sum_the_first_takes_the_add():
    def function(x, r, w, b):
        total = x + r
        return ops.rms_norm(total, w, 1e-6), ops.rms_norm(total, b, 1e-6)

    report = explained(function, X, R, W, B)
    assert report.matches["add_rms_norm"] == 1 and report.num_ops == {
        "add_rms_norm": 1,
        "rms_norm": 1,
    }
    [miss] = report.misses("add_rms_norm")
    assert (miss.kind, miss.found) == ("taken", "taken by add_rms_norm")


# ---- gated activations


def chunked(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def split(gate_up):
    gate, up = torch.split(gate_up, [24, 24], dim=-1)
    return F.silu(gate) * up


def sliced(gate_up):
    return gate_up[..., 24:] * F.silu(gate_up[..., :24])


def up_comes_first(gate_up):
    up, gate = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@DTYPES
@pytest.mark.parametrize(
    "function", [lambda g, u: F.silu(g) * u, lambda g, u: u * F.silu(g)], ids=["gate*up", "up*gate"]
)
def test_silu_times_up_is_one_op_in_either_order(function, dtype):
    assert "= silu_and_mul(g, u)" in rewritten(SILU_AND_MUL, function, *cast(dtype, GATE, UP))


@pytest.mark.parametrize("function", [chunked, split, sliced, up_comes_first])
def test_a_packed_projection_may_be_taken_apart_in_any_way(function):
    rewritten(SILU_AND_MUL, function, PACKED)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_both_gelus_are_recognised_and_kept_apart(approximate):
    text = rewritten(GELU_AND_MUL, lambda g, u: F.gelu(g, approximate=approximate) * u, GATE, UP)
    assert f"gelu_and_mul(g, u, '{approximate}')" in text


def test_an_activation_that_is_written_after_it_was_read_is_still_fused():
    # The trace is functional: the write makes another value.
    def function(gate, up):
        gate = gate.clone()
        act = F.silu(gate)
        gate.add_(1)
        return act * up, gate

    rewritten(SILU_AND_MUL, function, GATE, UP)


def test_other_activations_and_other_products_are_left_alone():
    rewritten(SILU_AND_MUL, lambda g, u: torch.sigmoid(g) * u, GATE, UP, matches=0)
    rewritten(SILU_AND_MUL, lambda g, u: F.silu(g) / u, GATE, UP, matches=0)
    rewritten(SILU_AND_MUL, lambda g, u: F.silu(g) * u[0], GATE, UP, matches=0)


# ---- rope


def neox(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def half(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def pairs_to_half(x, cos, sin):
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def gptj(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def pairs(x, cos, sin):
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) * sin


@DTYPES
@pytest.mark.parametrize("function", [neox, half, pairs_to_half, gptj, pairs])
def test_every_style_of_rotation_becomes_one_op(function, dtype):
    width = D if function in (neox, pairs) else D // 2
    text = rewritten(ROPE, function, *cast(dtype, Q, COS[..., :width], SIN[..., :width]))
    assert text == f"%0 = rope(x, cos, sin, '{function.__name__}')\nreturn %0"


@pytest.mark.parametrize("function", [neox, half, pairs])
def test_a_partial_rotation_passes_on_what_it_does_not_rotate(function):
    def partial(x, cos, sin):
        return torch.cat((function(x[..., :8], cos, sin), x[..., 8:]), dim=-1)

    width = 8 if function in (neox, pairs) else 4
    text = rewritten(
        [TIDY, *passes_named("rope", "rope_partial")],
        partial,
        Q,
        COS[..., :width],
        SIN[..., :width],
    )
    assert text == f"%0 = rope(x, cos, sin, '{function.__name__}', False)\nreturn %0"


def test_a_rotation_in_fp32_between_casts_is_one_op_that_reads_the_columns_of_a_product():
    def rotated(qkv, cos, sin):  # as in ModernBERT
        q, _, _ = qkv.view(2, T, 3, N, D).unbind(-3)
        return neox(q.transpose(1, 2).float(), cos, sin).to(q.dtype).transpose(1, 2)

    names = ("rope", "rope_in_fp32", "rope_before_transpose", "tidy_transposes")
    qkv, cos, sin = cast(torch.float16, torch.randn(2, T, 3 * N * D), COS[:, 0], SIN[:, 0])
    text = rewritten(
        passes_named("tidy", *names), rotated, qkv, cos[None, None], sin[None, None], matches=1
    )
    assert "rope(%1.0, %2, %3, 'neox', True)" in text and "_to_copy" not in text


@pytest.mark.parametrize(
    ("dtype", "result"),
    [(torch.float32, torch.float32), (torch.float16, torch.bfloat16), (torch.bfloat16, None)],
    ids=["of fp32", "cast to another dtype", "not cast back"],
)
def test_another_rotation_in_fp32_stays_as_it_is(dtype, result):
    def rotated(x, cos, sin):
        y = neox(x.float(), cos, sin)
        return y if result is None else y.to(result)

    names = ("tidy", "rope", "rope_in_fp32")
    text = rewritten(passes_named(*names), rotated, *cast(dtype, Q, COS, SIN), matches=0)
    assert "'neox')" in text


def test_a_rotation_of_everything_written_as_partial_is_whole():
    def partial(x, cos, sin):
        return torch.cat((neox(x[..., :D], cos, sin), x[..., D:]), dim=-1)

    assert (
        rewritten([TIDY, *passes_named("rope")], partial, Q, COS, SIN)
        == "%0 = rope(x, cos, sin, 'neox')\nreturn %0"
    )


def test_halves_of_unequal_width_are_no_rotation():
    def uneven(x, cos, sin):
        return x * cos + torch.cat((-x[..., 6:], x[..., :6]), dim=-1) * sin

    rewritten(ROPE, uneven, Q, COS, SIN, matches=0)


def test_tables_that_do_not_broadcast_to_the_rows_are_refused_with_their_shapes():
    def wider(x, cos, sin):
        return neox(x, cos, sin)

    report = explained(wider, Q[:, :1], COS.expand(T, N, D), SIN.expand(T, N, D))
    assert not report.matches["rope"]
    assert (report.misses("rope")[0].kind, report.misses("rope")[0].found) == (
        "guard",
        "cos [5, 4, 16] does not broadcast to x [5, 1, 16]",
    )


@pytest.mark.parametrize("style", ["halves", "pairs", "complex", "conjugate"])
def test_tables_that_are_no_angle_of_each_pair_are_refused(style):
    def halves(x, cos, sin):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def pairs(x, cos, sin):
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)

    def turned(x, turn):
        return torch.view_as_real(torch.view_as_complex(x.view(T, N, D // 2, 2)) * turn).flatten(-2)

    angles = torch.randn(T, 1, D // 2)
    turn = torch.polar(torch.ones_like(angles), angles)
    column = angles[..., :1]
    function, *inputs = {
        "halves": (halves, Q, column.cos(), column.sin()),
        "pairs": (pairs, Q, column.cos(), column.sin()),
        "complex": (turned, Q, turn[..., :1]),
        "conjugate": (lambda x, turn: turned(x, turn.conj()), Q, turn),
    }[style]
    report = explained(function, *inputs, tolerance=1e-6)
    assert not report.matches["rope"]
    found = (
        "turn is a conjugate" if style == "conjugate" else "a table of 1 columns for x [5, 4, 16]"
    )
    assert report.misses("rope")[0].found.startswith(found)


def test_an_odd_number_of_columns_is_no_rotation():
    report = explained(neox, Q[..., :9], COS[..., :9], SIN[..., :9])
    assert not report.matches["rope"]
    assert (report.misses("rope")[0].kind, report.misses("rope")[0].found) == (
        "guard",
        "9 columns do not form pairs",
    )
    kernels.load("triton")
    [kernel] = [kernel for kernel in ops.rope.kernels if kernel.provider == "triton"]
    given = {"x": Q[..., :9], "cos": COS[..., :9], "sin": SIN[..., :9]}
    assert (
        refusal_text(kernel, Platform.named("h200"), given)
        == "9 columns cannot be rotated in pairs"
    )


def test_a_rotation_by_fp32_tables_that_is_cast_back_is_rounded_once():
    def function(x, cos, sin):
        return neox(x, cos, sin).to(x.dtype)

    text = rewritten([rewriting(ROPE), rewriting(ROPE_IN_FP32)], function, Q.bfloat16(), COS, SIN)
    assert text == "%0 = rope(x, cos, sin, 'neox', True)\nreturn %0"


def test_a_rotation_that_is_cast_to_another_dtype_stays_before_the_cast():
    def function(x, cos, sin):
        return neox(x, cos, sin).half()

    rewritten(
        [rewriting(ROPE), rewriting(ROPE_IN_FP32)], function, Q.bfloat16(), COS, SIN, matches=0
    )


def test_what_stands_behind_a_transpose_moves_before_it():
    def function(x, w, cos, sin):
        return ops.rope(ops.rms_norm(x.transpose(1, 2), w, 1e-6), cos, sin)

    text = rewritten(
        ROPE_BEFORE_TRANSPOSE,
        function,
        Q[None],
        W,
        COS[None, :, 0][:, None],
        SIN[None, :, 0][:, None],
        matches=2,
    )
    assert (
        text
        == """\
%0 = rms_norm(x, w, 1e-06, 'after')
%1 = transpose(cos, 1, 2)
%2 = transpose(sin, 1, 2)
%3 = rope(%0, %1, %2, 'neox', False)
%4 = transpose(%3, 1, 2)
return %4"""
    )


# ---- attention


def repeat(x, group):
    batch, heads, tokens, width = x.shape
    return (
        x[:, :, None]
        .expand(batch, heads, group, tokens, width)
        .reshape(batch, heads * group, tokens, width)
    )


MASKS = {
    "none": None,
    "bool": torch.ones(T, T, dtype=torch.bool).tril(),
    "float": torch.zeros(T, T).masked_fill(
        torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf")
    ),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("grouped", ["repeated", "enable_gqa"])
@pytest.mark.parametrize("heads", [K, 1])
@DTYPES
def test_grouped_attention_reads_keys_and_values_by_group(grouped, heads, mask, dtype):
    given = MASKS[mask]

    def function(q, k, v):
        if grouped == "repeated":
            k, v = repeat(k, N // heads), repeat(v, N // heads)
        return F.scaled_dot_product_attention(
            q, k, v, given, is_causal=given is None, enable_gqa=grouped != "repeated"
        )

    given = given.to(dtype) if mask == "float" else given
    keys, values = (torch.randn(2, heads, T, D) for _ in range(2))
    inputs = cast(dtype, torch.randn(2, N, T, D), keys, values)
    report = explained(function, *inputs, tolerance=1e-6 if dtype == torch.float32 else 2e-2)
    assert report.matches["attention"] == 1
    assert report.matches["repeat_kv"] == (grouped == "repeated")
    assert report.num_ops == {"attention": 1} and not report.near


def test_sdpa_with_dropout_or_a_bottom_right_mask_stays_with_torch():
    keys = torch.randn(1, N, T + 2, D)
    report = explained(
        lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True),
        torch.randn(1, N, T, D),
        keys,
        tolerance=1e-6,
    )
    assert not report.matches["attention"]


# ---- fusions


@DTYPES
@pytest.mark.parametrize(
    "function",
    [lambda x, r, w: (after(x + r, w), x + r), lambda x, r, w: (after(r + x, w), r + x)],
    ids=["x+r", "r+x"],
)
def test_add_then_norm_becomes_one_op(function, dtype):
    text = rewritten(
        passes_named("tidy", "rms_norm", "add_rms_norm"), function, *cast(dtype, X, R, W)
    )
    assert text.endswith("return %0.0, %0.1") and text.startswith("%0 = add_rms_norm(")


def test_a_reshape_between_add_and_norm_changes_nothing_but_shapes():
    def function(x, r, w):
        total = x + r
        return ops.rms_norm(total.view(2, 6, D), w, 1e-6), total

    assert (
        rewritten(ADD_RMS_NORM, function, torch.randn(12, D), torch.randn(12, D), W)
        == """\
%0 = add_rms_norm(x, r, w, 1e-06, 'after')
%1 = view(%0.0, [2, 6, 16])
return %1, %0.1"""
    )


def test_a_sum_that_nobody_else_reads_is_fused_as_well():
    text = rewritten(ADD_RMS_NORM, lambda x, r, w: ops.rms_norm(x + r, w, 1e-6), X, R, W)
    assert text == "%0 = add_rms_norm(x, r, w, 1e-06, 'after')\nreturn %0.0"


@pytest.mark.parametrize("style", ["after", "before", "one_plus"])
def test_an_fp32_weight_does_not_keep_a_bf16_sum_from_its_norm(style):
    text = rewritten(
        ADD_RMS_NORM,
        lambda x, r, w: ops.rms_norm(x + r, w, 1e-6, style),
        X.bfloat16(),
        R.bfloat16(),
        W,
    )
    assert f"add_rms_norm(x, r, w, 1e-06, '{style}')" in text


def test_a_broadcast_residual_is_left_alone():
    rewritten(ADD_RMS_NORM, lambda x, r, w: ops.rms_norm(x + r, w, 1e-6), X, R[0], W, matches=0)
    rewritten(ADD_RMS_NORM, lambda x, r, w: ops.rms_norm(x + 1.0, w, 1e-6), X, R, W, matches=0)


def test_a_scaled_residual_is_left_alone():
    rewritten(
        ADD_RMS_NORM,
        lambda x, r, w: ops.rms_norm(torch.add(x, r, alpha=2), w, 1e-6),
        X,
        R,
        W,
        matches=0,
    )


@DTYPES
def test_layer_norm_is_lifted_and_folds_the_add_before_it(dtype):
    def function(x, r, w, b):
        total = x + r
        return F.layer_norm(total, (D,), w, b, 1e-5), total

    assert (
        rewritten(ADD_LAYER_NORM, function, *cast(dtype, X, R, W, B))
        == """\
%0 = add_layer_norm(x, r, w, b, 1e-05)
return %0.0, %0.1"""
    )


@pytest.mark.parametrize("weight", [W, None], ids=["no bias", "no weight"])
def test_a_layer_norm_without_bias_or_weight_folds_the_add_before_it(weight):
    def function(x, r):
        total = x + r
        return F.layer_norm(total, (D,), weight, None, 1e-5), total

    text = rewritten(ADD_LAYER_NORM, function, X, R)
    assert "add_layer_norm" in text and "None" in text


def test_a_norm_after_an_add_leaves_out_a_sum_that_is_not_read():
    def function(x, r, w, b):
        total = x + F.layer_norm(x + r, (D,), w, b, 1e-5)
        return total * ops.rms_norm(total, w, 1e-6)

    names = ("canonicalize", "layer_norm", "add_rms_norm", "add_layer_norm", "unread_sums")
    assert (
        rewritten(passes_named("tidy", *names), function, X, R, W, B)
        == """\
%0 = add_layer_norm(x, r, w, b, 1e-05, keep_sum=False)
%1 = add_rms_norm(x, %0.0, w, 1e-06, 'after')
%2 = mul(%1.1, %1.0)
return %2"""
    )


def test_a_sum_whose_view_is_read_twice_is_folded_into_its_norm():
    def function(x, r, w, b):  # as in OPT
        total = (x + r).view(-1, 4, D)
        return F.layer_norm(total, (D,), w, b, 1e-5) + total

    x, r = torch.randn(3, 4, D), torch.randn(3, 4, D)
    report = explained(function, x.view(12, D), r.view(12, D), W, B, tolerance=1e-6)
    assert report.matches["add_layer_norm"] == 1


@pytest.mark.parametrize(
    "total",
    [
        lambda x, r: (x + r[:, :1]).view(-1, 1, D),
        lambda x, r: (x + r).view(-1, D // 2),
        lambda x, r: (x + r.t().contiguous().t()).view(-1, 1, D),
        lambda x, r: (y := x + r) * y.view(-1, 1, D)[:, 0],
    ],
    ids=["broadcast", "other last dimension", "other strides", "another reader"],
)
def test_a_view_stays_after_a_sum_of_other_operands(total):
    def function(x, r):
        y = total(x, r)
        return y.exp() + y.sin()

    text = after_passes(passes_named("tidy", "canonicalize"), function, X, R).text
    assert text.index("add(") < (text.index("view(") if "view(" in text else len(text))


@DTYPES
def test_a_layer_norm_that_is_written_out_folds_the_add_before_it(dtype):
    def function(x, r, w):
        total = (x + r).float()
        centered = total - total.mean(-1, keepdim=True)
        root = torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (w.float() * (centered * root)).to(x.dtype), x + r

    assert (
        rewritten(
            [TIDY, rewriting(LAYER_NORM), rewriting(ADD_LAYER_NORM)],
            function,
            *cast(dtype, X, R, W),
            tolerance=2**-8,
        )
        == """\
%0 = add_layer_norm(x, r, w, None, 1e-05)
return %0.0, %0.1"""
    )


def test_layer_norm_of_a_module_and_without_parameters_is_lifted():
    module = nn.LayerNorm(D)
    assert explained(lambda x: module(x), X).matches["layer_norm"] == 1
    assert explained(lambda x: F.layer_norm(x, (D,)), X).matches["layer_norm"] == 1
    assert explained(lambda x: F.layer_norm(x, x.shape[-1:]), X).matches["layer_norm"] == 1


def test_rms_norm_of_a_transposed_tensor_lies_as_torchs_does_and_fuses_where_nobody_sees_it():
    x, w = torch.randn(2, 4, T, D), torch.randn(D)
    compiled = torch.compile(
        lambda x, w: F.rms_norm(x, (D,), w), backend="atom", options={"glue": "eager"}
    )
    expected = F.rms_norm(x.transpose(1, 2), (D,), w)
    found = compiled(x.transpose(1, 2), w)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()

    def heads(q, k, w, cos, sin):
        v = k.transpose(1, 2)
        q, k = (F.rms_norm(x.transpose(1, 2), (D,), w, 1e-6) for x in (q, k))
        return F.scaled_dot_product_attention(neox(q, cos, sin), neox(k, cos, sin), v)

    q, k = torch.randn(2, T, 4, D), torch.randn(2, T, 4, D)
    tables = (COS[None, :, 0][:, None], SIN[None, :, 0][:, None])
    attended = torch.compile(heads, backend="atom", options={"glue": "eager"})(q, k, w, *tables)
    torch.testing.assert_close(attended, heads(q, k, w, *tables))
    assert atomc.reports()[-1].matches["qk_norm_rope"] == 1


def test_layer_norm_over_a_last_dimension_of_any_size_is_lifted():
    def norm(x):
        return F.layer_norm(x, x.shape[-1:])

    compiled = torch.compile(norm, backend="atom", options={"glue": "eager"}, dynamic=True)
    for width in (8, 12):
        x = torch.randn(3, width)
        torch.testing.assert_close(compiled(x), norm(x))
    assert atomc.reports()[-1].matches["layer_norm"] == 1


def normed_and_rotated(x, w, cos, sin, eps=1e-6):
    return ops.rope(ops.rms_norm(x, w, eps), cos, sin)


def test_q_and_k_that_one_attention_reads_are_normed_and_rotated_by_one_op():
    def function(q, k, v, qw, kw, cos, sin):
        return ops.attention(
            normed_and_rotated(q, qw, cos, sin), normed_and_rotated(k, kw, cos, sin), v, scale=0.25
        )

    assert (
        rewritten(QK_NORM_ROPE, function, Q, KEYS, KEYS, W, B, COS, SIN)
        == """\
%0 = qk_norm_rope(q, k, qw, kw, cos, sin, 1e-06, 'after', 'neox')
%1 = attention(%0.0, %0.1, v, scale=0.25)
return %1"""
    )


def test_q_and_k_that_nothing_reads_together_are_not_a_pair():
    def function(q, k, qw, kw, cos, sin):
        return normed_and_rotated(q, qw, cos, sin) * 2, normed_and_rotated(k, kw, cos, sin) * 2

    rewritten(QK_NORM_ROPE, function, Q, KEYS, W, B, COS, SIN, matches=0)


def test_two_layers_that_share_their_tables_are_paired_by_layer():
    def function(q, k, q2, k2, w, cos, sin):
        first = ops.attention(
            normed_and_rotated(q, w, cos, sin), normed_and_rotated(k, w, cos, sin), k, scale=0.25
        )
        q2 = q2 + first
        return ops.attention(
            normed_and_rotated(q2, w, cos, sin), normed_and_rotated(k2, w, cos, sin), k2, scale=0.25
        )

    assert (
        rewritten(QK_NORM_ROPE, function, Q, KEYS, Q + 1, KEYS + 1, W, COS, SIN, matches=2)
        == """\
%0 = qk_norm_rope(q, k, w, w, cos, sin, 1e-06, 'after', 'neox')
%1 = attention(%0.0, %0.1, k, scale=0.25)
%2 = add(q2, %1)
%3 = qk_norm_rope(%2, k2, w, w, cos, sin, 1e-06, 'after', 'neox')
%4 = attention(%3.0, %3.1, k2, scale=0.25)
return %4"""
    )


# ---- the runtime's forms


def test_in_the_runtime_norms_rotation_and_the_write_of_keys_are_one_op():
    def function(q, k, v, qw, kw, cos, sin, kv):
        q, k = neox(after(q, qw), cos, sin), neox(after(k, kw), cos, sin)
        return ops.attention(q, k, v, kv, scale=0.25)

    assert (
        paged(function, Q, KEYS, KEYS + 1, W, B, COS, SIN, ops.kv_state(K, D))
        == """\
%0 = qk_norm_rope_kv_write(q, k, v, qw, kw, cos, sin, 1e-06, k_cache_0, v_cache_0, slots_0, norm_style='after', rope_style='neox')
%1 = paged_attention(%0.0, k_cache_0, v_cache_0, query_start, seq_lens, block_tables_0, %0.1, None, scale=0.25)
return %1"""
    )


def test_in_the_runtime_the_rotation_and_the_write_of_keys_are_one_op():
    def function(q, k, v, cos, sin, kv):
        return ops.attention(half(q, cos, sin), half(k, cos, sin), v, kv, scale=0.25, window=3)

    inputs = Q, KEYS, KEYS + 1, COS[..., : D // 2], SIN[..., : D // 2], ops.kv_state(K, D)
    assert (
        paged(function, *inputs)
        == """\
%0 = rope_kv_write(q, k, v, cos, sin, k_cache_0, v_cache_0, slots_0, rope_style='half', in_fp32=False)
%1 = paged_attention(%0.0, k_cache_0, v_cache_0, query_start, seq_lens, block_tables_0, %0.1, None, scale=0.25, window=3)
return %1"""
    )


def test_in_the_runtime_keys_are_rotated_by_fp32_tables_and_written_by_one_op():
    def function(q, k, v, cos, sin, kv):
        q, k = (neox(x, cos, sin).to(x.dtype) for x in (q, k))
        return ops.attention(q, k, v, kv, scale=0.25)

    rows = cast(torch.bfloat16, Q, KEYS, KEYS + 1)
    text = paged(function, *rows, COS, SIN, ops.kv_state(K, D))
    assert "rope_style='neox', in_fp32=True)" in text.splitlines()[0]


def test_without_a_rotation_keys_are_written_as_they_are():
    text = paged(
        lambda q, k, kv: ops.attention(q, k, k, kv, scale=0.25), Q, KEYS, ops.kv_state(K, D)
    )
    assert text.startswith(
        "%0 = kv_write(k, k, k_cache_0, v_cache_0, slots_0)\n%1 = paged_attention(q, "
    )


def paged(function, *inputs):
    """The graph of a function after all passes of the runtime; attention over a fresh cache gives
    the same numbers.
    """
    context = Context(Options(strict=True), Platform.detect("cpu"), paged=True)
    traced = after_passes(
        pipeline.selected(passes.PIPELINE, context)[0], function, *inputs, context=context
    )
    assert traced.error < 1e-6
    return traced.text


# ---- tidying


def tidied(function, *inputs, **options):
    return after_passes([TIDY], function, *inputs, **options).text


def test_equal_nodes_become_one_but_random_ones_do_not():
    assert tidied(lambda x: x.exp() + x.exp(), X) == "%0 = exp(x)\n%1 = add(%0, %0)\nreturn %1"
    assert (
        tidied(lambda x: (torch.rand_like(x) != torch.rand_like(x)).all(), X).count("rand_like")
        == 2
    )


def test_numbers_that_are_equal_but_of_another_type_keep_their_nodes_apart():
    assert tidied(lambda x: (x.long() + 1) * (x.long() + 1.0), X).count("add") == 2


def test_zeros_of_two_signs_stay_apart():
    assert tidied(lambda x: (1 / (x.abs() * 0.0), 1 / (x.abs() * -0.0)), X).count("mul") == 2
    assert "sub" in tidied(lambda x: 1 / (x * -0.0 - -0.0), X.abs())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.transpose(0, 1).transpose(0, 1).exp(),
        lambda x: x[:, :D].exp(),
        lambda x: x.view(3, D).exp(),
        lambda x: torch.cat((x, x[:, D:]), -1).exp(),
    ],
)
def test_views_that_give_back_what_is_there_go(function):
    assert tidied(function, X) == "%0 = exp(x)\nreturn %0"


def test_views_that_change_something_stay():
    assert "transpose" in tidied(lambda x: x.view(3, 4, 4).transpose(0, 1).transpose(1, 2).exp(), X)
    assert "slice" in tidied(lambda x: x[:, : D - 1].exp(), X)
    assert "cat" in tidied(lambda x: torch.cat((x.bfloat16(), x[:, D:]), -1).exp(), X)
    assert "div" in tidied(
        lambda x: (y := x.amax(0, keepdim=True).expand_as(x), y / 1), X
    )  # which lie differently
    assert "view(x, int32)" in tidied(lambda x: x.view(torch.int32).abs(), X)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 1.0).exp(),
        lambda x: (1 * x).exp(),
        lambda x: (x / 1).exp(),
        lambda x: (x - 0.0).exp(),
        lambda x: (x**1).exp(),
    ],
)
def test_arithmetic_that_changes_nothing_goes(function):
    assert tidied(function, X) == "%0 = exp(x)\nreturn %0"


@pytest.mark.parametrize(
    "function", [torch.clone, lambda x: F.dropout(x, 0.5, training=False), torch.Tensor.contiguous]
)
def test_a_copy_of_a_computed_value_goes(function):
    assert tidied(lambda x: function(x.exp()).sin(), X) == "%0 = exp(x)\n%1 = sin(%0)\nreturn %1"


def test_a_copy_with_other_strides_stays():
    text = tidied(lambda x: x.exp().t().contiguous().view(-1), X)
    assert "clone" in text


def attended_copies(x, rest=lambda copies: 0, heads=lambda x: x.unflatten(-1, (4, -1))):
    """Attention over contiguous copies of three times the heads of x [1, T, 4 * D]."""
    copies = [(heads(x * i)).transpose(1, 2).contiguous() for i in (1, 2, 3)]
    return F.scaled_dot_product_attention(*copies).amax() + rest(copies)


def test_copies_of_heads_that_only_attention_reads_go():
    text = tidied(attended_copies, torch.randn(1, 5, 32))
    assert "attention" in text and "clone" not in text


@pytest.mark.parametrize(
    ("function", "copies"),
    [
        (lambda x: attended_copies(x, lambda copies: copies[1]), 1),
        (lambda x: attended_copies(x, lambda copies: copies[0].transpose(1, 2).sum()), 1),
        # Elements of a head that lie apart are no operand of a kernel.
        (lambda x: attended_copies(x, heads=lambda x: x.unflatten(-1, (-1, 4)).mT), 3),
    ],
    ids=["read elsewhere", "transposed, read elsewhere", "heads with gaps"],
)
def test_copies_of_heads_that_others_read_or_with_gaps_stay(function, copies):
    text = tidied(function, torch.randn(1, 5, 32))
    assert "attention" in text and text.count("clone") == copies


def test_a_copied_mask_stays():
    def function(x, bias):
        q = k = v = x.unflatten(-1, (4, -1)).transpose(1, 2)
        mask = bias.exp().transpose(1, 2).contiguous().transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, mask).amax()

    assert "clone" in tidied(function, torch.randn(1, 5, 32), torch.randn(1, 4, 5, 5))


def test_inputs_that_are_swapped_through_a_copy_keep_their_values():
    def function(x, y):
        before = x.clone()
        x.copy_(y)
        y.copy_(before)
        return before * 2

    assert after_passes([TIDY], function, X.clone(), X.exp()).error == 0


def test_arithmetic_that_changes_a_bit_a_dtype_or_a_shape_stays():
    for function in (
        lambda x: 1 / (x + 0.0),
        lambda x: (x * 2.0).exp(),
        lambda x: torch.add(x, 1, alpha=0).exp(),
        lambda x: torch.div(x, 1, rounding_mode="floor").exp(),
        lambda x: (1 - x).exp(),
        lambda x: (x.int() * 1.0).exp(),
        lambda x: 1 / (0.0 - x),
    ):
        text = tidied(function, torch.tensor([-0.0, 1.5, -2.5]))
        assert any(f"= {op}(" in text for op in ("add", "mul", "div", "sub", "rsub"))
    assert tidied(lambda x: (x + 0).exp(), torch.arange(3)) == "%0 = exp(x)\nreturn %0"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + 1, x + 1),
        lambda x: (x * 1.0, x),
        lambda x: ((x * 1.0).view(-1), x),
        lambda x: (torch.cat((x, x[:0])), x),
        lambda x: ((y := x.exp()) * 1.0, y),
        lambda x: ((y := x.exp()).clone(), y),
        lambda x: (x.clone(), x),
        lambda x: (x.sort()[0], x.sort()[0]),
        lambda x: (x.exp().split(8, 1)[0], x.exp()),
    ],
)
def test_results_that_share_no_memory_in_the_program_share_none_after(function):
    x = X.clone()
    first, second = torch.compile(function, backend="atom", options={"glue": "eager"})(x)
    first.add_(1)
    expected = function(X)
    assert (
        torch.equal(first, expected[0] + 1)
        and torch.equal(second, expected[1])
        and torch.equal(x, X)
    )


def passes_named(*names):
    return [p for p in passes.PIPELINE if p.name in names]


@pytest.mark.parametrize("dynamic", [None, True])
def test_attention_takes_a_flag_that_depends_on_a_size(dynamic):
    def attended(x, by_position):
        q = k = v = x.unflatten(-1, (4, 8)).transpose(-2, -3)
        causal = x.shape[-2] > 1
        if by_position:
            return F.scaled_dot_product_attention(q, k, v, None, 0.0, causal)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    for by_position in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(
            attended, backend="atom", options={"glue": "eager"}, dynamic=dynamic
        )
        before = atomc.reports()
        for tokens in (5, 7, 9, 1, 2):
            x = torch.randn(2, tokens, 32)
            torch.testing.assert_close(compiled(x, by_position), attended(x, by_position))
        graphs = since(before)
        assert len(graphs) == (2 if dynamic else 3)  # and one for one token
        assert all(report.matches["attention"] == 1 for report in graphs)
        assert not any(report.graph_break for report in graphs)
        sites = [s for report in graphs for s in report.sites if s.rewrite == "attention"]
        assert [site.attrs["causal"] for site in sites] == [True] * (len(graphs) - 1) + [False]


def test_a_flag_whose_value_sizes_do_not_decide_gets_a_guard():
    def attended(x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=x.shape[-2] > 6)

    compiled = torch.compile(attended, backend="atom", options={"glue": "eager"}, dynamic=True)
    before = atomc.reports()
    for tokens in (5, 7, 4, 9):
        x = torch.randn(2, 2, tokens, 8)
        torch.testing.assert_close(compiled(x), attended(x))
    assert len(since(before)) == 2


# ---- all patterns


@pytest.mark.rotating
def test_patterns_have_the_same_ops_with_static_and_with_symbolic_sizes():
    cases = [(r, case) for p in passes.PIPELINE for r in p.rewrites for case in r.cases]
    assert len(cases) > 150
    for made, case in cases:
        ops_of_graph = {call(node).op for node in made.traced(case).nodes}
        assert made.ops(case) == ops_of_graph, f"{made.name} {made.variant or case.variant}"
