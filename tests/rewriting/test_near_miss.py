"""The growth that explains: each kind of difference in words, what is near enough to be shown, and
that nothing else is.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from rewriting import explained, functional_graph
from torch import nn

from atomc import ops
from atomc.graph.canonical import call
from atomc.rewriting.example import tensor_example
from atomc.rewriting.matching.near_miss import anchors, explain, near_misses
from atomc.rewriting.matching.pattern import Index, Pattern

X, Y, W = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)


def idea(x, y, eps):
    """Five ops, of which rsqrt is telling."""
    return torch.rsqrt((x / y).mean(-1, keepdim=True) + eps) * x


def misses(function, *inputs, **options):
    """What is shown about the idea in a function's graph."""
    pattern = Pattern(
        idea, {"x": tensor_example(3, 10), "y": tensor_example(3, 10), "eps": 0.5}, **options
    )
    graph = functional_graph(function, *inputs)
    return near_misses([("idea", "", pattern)], Index(graph))[0]


def said(function, *inputs, **options):
    """(kind, expected, found) of the first reason, without places; None if nothing is shown."""
    found = misses(function, *inputs, **options)
    first = found[0].first if found else None
    return first and tuple(
        re.sub(r" \(test_near_miss.py:\d+\)", "", part)
        for part in (first.kind, first.expected, first.found)
    )


@pytest.mark.parametrize(
    ("function", "first"),
    [
        (
            lambda x, y: torch.rsqrt((x / y).abs().mean(-1, keepdim=True) + 1e-5) * x,
            ("extra op", "mean(dim=(-1,), keepdim=True) reading div directly", "abs in between"),
        ),
        (
            lambda x, y: torch.rsqrt((x / y).T.reshape(3, 8).mean(-1, keepdim=True) + 1e-5) * x,
            (
                "extra op",
                "mean(dim=(-1,), keepdim=True) reading div directly",
                "permute(dims=(-1, -2)) > clone > view(shape=(3, 8)) in between",
            ),
        ),
        (
            lambda x, y: torch.rsqrt((x / y).mean(-1, keepdim=True)) * x,
            ("missing op", "add", "mean(dim=(-1,), keepdim=True) used as it is"),
        ),
        (
            lambda x, y: torch.rsqrt((x * y).mean(-1, keepdim=True) + 1e-5) * x,
            ("other op", "div", "mul"),
        ),
        (
            lambda x, y: torch.rsqrt((x / y).sum(-1, keepdim=True) + 1e-5) * x,
            ("other op", "mean(dim=(-1,), keepdim=True)", "sum(dim=(-1,), keepdim=True)"),
        ),
        (
            lambda x, y: torch.rsqrt((x / y).mean(-1) + 1e-5)[:, None] * x,
            ("attribute", "mean with keepdim=True", "keepdim=False"),
        ),
        (
            lambda x, y: torch.rsqrt((y / x).mean(-1, keepdim=True) + 1e-5) * x,
            ("same value", "`x` to be input y as elsewhere", "input x"),
        ),
        (
            lambda x, y: torch.rsqrt((x / y).mean(-1, keepdim=True) + 1e-5) - x,
            ("no reader", "mul reading rsqrt", "only sub reads it"),
        ),
        (
            lambda x, y: (lambda r: (r * x, r.abs()))(
                torch.rsqrt((x / y).mean(-1, keepdim=True) + 1e-5)
            ),
            ("extra user", "no other reader of rsqrt", "abs also reads it"),
        ),
        (
            lambda x, y: torch.rsqrt((x / y.double()).mean(-1, keepdim=True) + 1e-5) * x,
            ("dtype", "`y` in float32 (the dtype of `x`)", "float64"),
        ),
    ],
)
def test_each_kind_of_difference_is_a_sentence(function, first):
    assert said(function, X, Y) == first


def test_what_matches_or_has_nothing_telling_is_not_shown():
    assert said(lambda x, y: idea(x, y, 1e-5), X, Y) is None
    assert said(lambda x, y: (x / y).mean(-1, keepdim=True) * x, X, Y) is None


def test_what_has_little_of_the_idea_is_not_shown():
    assert said(lambda x, y: torch.rsqrt(x.abs()) * y, X, Y) is None
    assert said(lambda x, y: torch.rsqrt(x.sin().cumsum(-1)).cos(), X, Y) is None


def test_the_same_dim_at_several_places_is_one_difference():
    def over_rows(x, cos, sin):
        a, b = x.chunk(2, 0)
        return x * cos + torch.cat((-b, a), 0) * sin

    report = explained(over_rows, torch.randn(4, 8), torch.randn(4, 8), torch.randn(4, 8))
    assert [(miss.kind, miss.expected, miss.found) for miss in report.misses("rope")] == [
        ("attribute", "slice with dim=-1", "dim=-2")
    ]


def test_a_site_that_fits_several_anchors_and_variants_is_one_miss():
    def norm_over_rows(x, w):
        return w * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6))

    assert len(explained(norm_over_rows, X, W).misses("rms_norm")) == 1
    assert (
        len(
            explained(lambda x, w: norm_over_rows(norm_over_rows(x, w), w), X, W).misses("rms_norm")
        )
        == 2
    )


def test_anchors_depend_on_the_pattern_alone():
    telling = Pattern(idea, {"x": tensor_example(3, 10), "y": tensor_example(3, 10), "eps": 0.5})
    assert [call(node).op for node in anchors(telling)] == ["rsqrt"]
    inputs = {"x": tensor_example(3, 10), "y": tensor_example(3, 10)}
    common = Pattern(lambda x, y: torch.cat((-x, y), -1) * x.sum(), inputs)
    assert {call(node).op for node in anchors(common)} == {"cat", "neg"}
    generic = Pattern(lambda x, y: x * y + x, inputs)
    assert len(anchors(generic)) == 2


def test_a_site_without_a_difference_is_complete_and_told_apart():
    pattern = Pattern(idea, {"x": tensor_example(3, 10), "y": tensor_example(3, 10), "eps": 0.5})
    graph = functional_graph(lambda x, y: idea(x, y, 1e-5), X, Y)
    shown, complete = near_misses([("idea", "", pattern)], Index(graph))
    assert shown == [] and [miss.anchor.name for miss in complete] == ["rsqrt"]
    [p] = anchors(pattern)
    assert explain(pattern, p, complete[0].anchor).complete


def test_a_fusion_points_to_the_recognition_that_failed_first():
    def function(x, r, w):
        total = (x + r).bfloat16()
        return (
            w.bfloat16()
            * (
                total.float() * torch.rsqrt(total.float().pow(2).sum(-1, keepdim=True) + 1e-6)
            ).bfloat16()
        )

    report = explained(function, X, Y, W)
    [miss] = report.misses("rms_norm")
    assert (miss.kind, miss.expected) == ("other op", "mean(dim=(-1,), keepdim=True)")
    assert miss.text() in report.why("add_rms_norm")


def test_a_pair_with_one_half_unrecognised_shows_the_miss_of_that_half():
    def function(q, k, w, cos, sin):
        q = ops.rope(ops.rms_norm(q, w, 1e-6), cos, sin)
        k = w * (k * torch.rsqrt(k.pow(2).mean(1, keepdim=True) + 1e-6))
        return ops.attention(q, ops.rope(k, cos, sin), k, scale=0.25)

    report = explained(
        function,
        torch.randn(5, 4, 8),
        torch.randn(5, 2, 8),
        W,
        torch.randn(5, 1, 8),
        torch.randn(5, 1, 8),
    )
    assert (report.misses("qk_norm_rope")[0].kind, report.misses("qk_norm_rope")[0].found) == (
        "attribute",
        "dim=(-2,)",
    )


class Convolutions(nn.Module):
    """Nothing that any rewrite looks for, from many of the ops that they are made of."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 8, 3, padding=1), nn.Conv1d(8, 8, 3, padding=1)
        self.out = nn.Linear(16, 6)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        x = self.norm(torch.relu(self.first(x)))
        x = x + self.second(x) * torch.tanh(x) - x.mean(1, keepdim=True)
        gate, rest = x.transpose(1, 2).flatten(1).chunk(2, -1)
        return F.softmax(self.out(torch.cat((-gate[:, :8], rest[:, 8:16]), -1)), -1).pow(2)


def test_a_model_of_another_world_has_no_misses():
    report = explained(
        Convolutions().eval().requires_grad_(False), torch.randn(2, 4, 4), tolerance=1e-5
    )
    assert [miss.text() for miss in report.near] == []
    assert sum(report.matches.values()) == report.matches["linear"] == 1


def test_a_sentence_has_the_module_and_the_line_and_no_name_that_the_user_does_not_know():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Gate() for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x):
            return F.silu(x).clamp(max=7.0) * self.up(x)

    report = explained(Model().requires_grad_(False), X, tolerance=1e-6)
    texts = [miss.text() for miss in report.near]
    assert [re.sub(r":\d+", ":N", text) for text in texts] == [
        f"silu_and_mul in layers.{i} (test_near_miss.py:N), 100% there: expected mul reading "
        f"silu in layers.{i} "
        f"(test_near_miss.py:N) directly; found clamp(max=7.0) in layers.{i} "
        "(test_near_miss.py:N) in between"
        for i in range(3)
    ]
    assert [miss.layer for miss in report.near] == [0, 1, 2]
