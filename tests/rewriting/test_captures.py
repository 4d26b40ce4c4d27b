"""What a pattern captures: numbers, dtypes, flags, styles and operands that may be absent; and near
misses of each.
"""

import pytest
import torch
import torch.nn.functional as F
from rewriting import after_passes, functional_graph

from atomc import ops
from atomc.rewriting.example import OneOf, tensor_example
from atomc.rewriting.graph_pass import rewriting
from atomc.rewriting.matching.pattern import Index, Pattern
from atomc.rewriting.matching.search import matches
from atomc.rewriting.rewrite import Case, Rewrite

X, Y = torch.randn(4, 8), torch.randn(4, 8)
W, B = torch.randn(6, 8), torch.randn(6)
aten = torch.ops.aten
ROWS = {"x": tensor_example(3, 10)}


def bound(pattern, function, *inputs):
    """What the pattern's arguments are at the one site in a function, tensors left out."""
    [(site, wrong)] = matches(pattern, Index(functional_graph(function, *inputs)))
    assert wrong == []
    return {
        name: given
        for name, given in site.arguments().items()
        if not isinstance(given, torch.fx.Node)
    }


def missed(rewrite, function, *inputs):
    """(kind, expected, found) of the one near miss in a function."""
    [miss] = after_passes([rewriting(rewrite)], function, *inputs).report.misses(rewrite.name)
    return miss.kind, miss.expected, miss.found


def summed(x, dtype):
    return torch.exp(x).sum(-1, dtype=dtype)


SUMMED = Rewrite(
    "summed",
    summed,
    lambda x, dtype: aten.sum.dim_IntList(x, [-1], dtype=dtype),
    lambda: {**ROWS, "dtype": OneOf(torch.float32, torch.float64)},
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_dtype_is_captured_and_the_result_has_it(dtype):
    assert bound(SUMMED.traced(), lambda x: summed(x, dtype), X.bfloat16()) == {"dtype": dtype}


def test_a_dtype_that_is_none_of_the_set_is_a_near_miss():
    assert missed(SUMMED, lambda x: summed(x, torch.float16), X) == (
        "attribute",
        "sum with dtype=float32 or float64",
        "dtype=float16",
    )


def test_two_places_that_disagree_about_what_is_captured_are_a_near_miss():
    def both(x, y, dtype, other=None):
        return torch.exp(x).sum(-1, dtype=dtype) * torch.sin(y).mean(-1, dtype=other or dtype)

    made = Rewrite(
        "both",
        both,
        lambda x, y, dtype, other: x,
        lambda: {
            **ROWS,
            "y": tensor_example(3, 10),
            "dtype": OneOf(torch.float32, torch.float64),
            "other": None,
        },
    )
    assert (
        bound(made.traced(), lambda x, y: both(x, y, torch.float64), X, Y)["dtype"] == torch.float64
    )
    kind, expected, found = missed(
        made, lambda x, y: both(x, y, torch.float64, torch.float32), X, Y
    )
    assert kind == "scalar" and expected.startswith("one `dtype` everywhere (first ")
    assert {expected.split("torch.")[1].rstrip(")"), found.removeprefix("torch.")} == {
        "float32",
        "float64",
    }


@pytest.mark.parametrize("keep", [False, True])
def test_a_flag_is_captured_and_no_other_flag_is_taken_for_it(keep):
    def pattern(x, keep):
        return torch.exp(x).amax(-1, keepdim=keep), torch.exp(x).amin(-1, keepdim=False)

    made = Pattern(pattern, {**ROWS, "keep": OneOf(False, True)})
    assert bound(made, lambda x: pattern(x, keep), X) == {"keep": keep}
    graph = functional_graph(
        lambda x: (torch.exp(x).amax(-1), torch.exp(x).amin(-1, keepdim=True)), X
    )
    assert list(matches(made, Index(graph))) == []


def test_a_number_is_captured_and_no_other_number_is_taken_for_it():
    def pattern(x, n):
        return torch.exp(x).roll(3, -1)[..., :n]

    made = Pattern(pattern, {**ROWS, "n": 3})
    assert bound(made, lambda x: torch.exp(x).roll(3, -1)[..., :5], X) == {"n": 5}
    assert (
        list(matches(made, Index(functional_graph(lambda x: torch.exp(x).roll(5, -1)[..., :5], X))))
        == []
    )


def test_one_decision_about_the_dtype_of_two_tensors_holds_for_both():
    codes = OneOf(torch.int8, torch.uint8)
    made = Rewrite(
        "codes",
        lambda x, y: torch.exp(x.float()) + y.float(),
        lambda x, y: x,
        lambda: {"x": tensor_example(3, 10, dtype=codes), "y": tensor_example(3, 10, dtype=codes)},
    )
    ones = torch.ones(4, 8)
    assert bound(made.traced(), made.pattern, ones.to(torch.uint8), ones.to(torch.uint8)) == {}
    assert missed(made, made.pattern, ones.to(torch.int8), ones.to(torch.uint8)) == (
        "dtype",
        "`y` in int8",
        "uint8",
    )
    kind, expected, _ = missed(made, made.pattern, ones.to(torch.int16), ones.to(torch.int16))
    assert (kind, expected) == ("dtype", "`x` in int8 or uint8")


def test_an_argument_and_the_dtype_of_a_tensor_may_be_one_decision():
    wide = OneOf(torch.float32, torch.float64)
    made = Rewrite(
        "wide",
        lambda x, y, dtype: torch.exp(x).sum(-1, dtype=dtype) + y,
        lambda x, y, dtype: y,
        lambda: {**ROWS, "y": tensor_example(3, dtype=wide), "dtype": wide},
    )
    doubles = torch.randn(4, dtype=torch.float64)
    assert bound(
        made.traced(), lambda x, y: torch.exp(x).sum(-1, dtype=y.dtype) + y, X.bfloat16(), doubles
    ) == {"dtype": torch.float64}
    assert missed(
        made, lambda x, y: torch.exp(x).sum(-1, dtype=torch.float32) + y, X.bfloat16(), doubles
    ) == ("dtype", "`y` in float32", "float64")


# ---- an operand that may be absent


def doubled(x, w, b):
    return ops.linear(x, w, b) * 2.0


def added(x, w, b):
    y = ops.linear(x, w) if b is None else ops.linear(x, w, b)
    return aten.add.Tensor(y, y)


def example(bias):
    return {**ROWS, "w": tensor_example(7, 10), "b": bias}


def waves(y):
    return y.exp().sin().neg().abs()


NO_BIAS, BIAS = Case("", {"bias": None}), Case("bias", {"bias": tensor_example(7)})


def test_an_operand_may_be_there_or_absent_and_the_replacement_gets_it_or_none():
    def function(x, w, b):
        return F.linear(x, w) * 2.0, F.linear(x, w, b) * 2.0

    made = Rewrite(
        "doubled",
        doubled,
        added,
        example,
        cases=[NO_BIAS, BIAS],
        attrs=lambda b, **_: {"bias": b is not None},
    )
    after = after_passes([rewriting(made)], function, X, W, B)
    assert after.error == 0
    assert [site.attrs for site in after.report.sites if site.rewrite == "doubled"] == [
        {"bias": False},
        {"bias": True},
    ]


@pytest.mark.parametrize(
    ("case", "operands", "reason"),
    [
        (NO_BIAS, (X, W, B), ("attribute", "linear without `bias`", "`bias` given")),
        (BIAS, (X, W), ("attribute", "linear with `bias`", "`bias` absent")),
    ],
    ids=["must be absent", "must be there"],
)
def test_an_operand_that_must_be_absent_or_there_is_the_reason(case, operands, reason):
    made = Rewrite(
        "waves",
        lambda x, w, b: waves(ops.linear(x, w, b)),
        lambda x, w, b: x,
        example,
        cases=[case],
    )
    assert missed(made, lambda *given: waves(F.linear(*given)), *operands) == reason


# ---- a style: one of several patterns


def gated(x, y, activation):
    return activation(x) * y


def gate_of(activation):
    return {**ROWS, "y": tensor_example(3, 10), "activation": activation}


GATED = Rewrite(
    "gated",
    gated,
    lambda x, y, activation: aten.add.Tensor(y, getattr(aten, activation.__name__).default(x)),
    gate_of,
    guard=lambda x, y, activation: "no cosine here" if activation is torch.cos else None,
    attrs=lambda activation, **_: {"style": activation.__name__},
    cases=[Case(each.__name__, {"activation": each}) for each in (torch.sin, torch.cos)],
)


def test_a_style_is_one_of_several_patterns_and_handed_to_replacement_guard_and_report():
    report = after_passes(
        [rewriting(GATED)], lambda x, y: (torch.sin(x) * y, torch.cos(x) * y), X, Y
    ).report
    assert [site.attrs for site in report.sites] == [{"style": "sin"}]
    assert [(miss.variant, miss.kind, miss.found) for miss in report.near] == [
        ("cos", "guard", "no cosine here")
    ]


def test_a_style_that_is_none_of_the_set_is_a_near_miss():
    styles = OneOf("before", "one_plus")
    made = Rewrite(
        "normed",
        lambda x, w, style: torch.exp(ops.rms_norm(x, w, 1e-6, style)),
        lambda x, w, style: x,
        lambda: {**ROWS, "w": tensor_example(10), "style": styles},
    )
    found = bound(
        made.traced(), lambda x, w: torch.exp(ops.rms_norm(x, w, 1e-6, "one_plus")), X, W[0]
    )
    assert found == {"style": "one_plus"}
    assert missed(made, lambda x, w: torch.exp(ops.rms_norm(x, w, 1e-6, "after")), X, W[0]) == (
        "attribute",
        "rms_norm with style=before or one_plus",
        "style=after",
    )


def test_only_cases_whose_ops_are_in_the_graph_are_traced():
    traced = []

    def example_of(activation):
        traced.append(activation.__name__)
        return gate_of(activation)

    cases = [
        Case(each.__name__, {"activation": each}, {f"aten::{each.__name__}": {}})
        for each in (torch.sin, torch.cos)
    ]
    made = Rewrite(
        "gated", gated, lambda x, y, activation: aten.neg.default(x), example_of, cases=cases
    )
    after_passes([rewriting(made)], lambda x, y: torch.sin(x) - y, X, Y)
    assert set(traced) == {"sin"}


# ---- what a pattern's author got wrong


@pytest.mark.parametrize(
    ("pattern", "example", "reason"),
    [
        (
            lambda x, a, b: x.amax(-1, keepdim=a) + x.amin(-1, keepdim=b),
            {"a": OneOf(False, True), "b": OneOf(False, True)},
            "`a` and `b` are traced with the same values",
        ),
        (
            lambda x, minus: torch.exp(-x if minus else x),
            {"minus": OneOf(False, True)},
            "minus change more than attributes",
        ),
        (lambda x, n: torch.exp(x), {"n": 3}, "no op has n as an attribute"),
        (lambda x, n: x[..., : n * 2], {"n": 2}, "4 of an op becomes 8, which is not an argument"),
    ],
)
def test_what_cannot_be_captured_is_said_when_the_pattern_is_traced(pattern, example, reason):
    with pytest.raises(ValueError, match=reason):
        Pattern(pattern, {**ROWS, **example})
