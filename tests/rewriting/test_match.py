"""The search that decides: what it finds, what it refuses and why; no answer about sizes becomes a
guard.
"""

import pytest
import torch
from rewriting import TIDY, after_passes, explained, functional_graph, rewritten
from torch.fx.experimental.proxy_tensor import make_fx

from atomc import ops
from atomc.compiler.pipeline import PassError, check_order, selected
from atomc.errors import OptionsError
from atomc.graph.canonical import call
from atomc.graph.node_record import record_of
from atomc.options import Options
from atomc.platform import Platform
from atomc.rewriting.example import tensor_example
from atomc.rewriting.graph_pass import Context, Pass, rewriting
from atomc.rewriting.matching.pattern import Index, Pattern
from atomc.rewriting.matching.search import matches
from atomc.rewriting.rewrite import Rewrite, apply
from atomc.torch_compat.tracing import mark_unbacked

aten = torch.ops.aten
X, Y, W = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)


def scaled(x, y, w):
    return torch.exp(x) * y + w


def example():
    return {"x": tensor_example(3, 10), "y": tensor_example(3, 10), "w": tensor_example(10)}


def replaced(x, y, w):
    return aten.add.Tensor(aten.mul.Tensor(aten.exp.default(x), y), w)


def rewrite(pattern, replacement, shapes, **more):
    """A rewrite whose example has bf16 tensors of these shapes, and these numbers."""

    def made():
        return {
            name: tensor_example(*given) if isinstance(given, tuple) else given
            for name, given in shapes.items()
        }

    return Rewrite("made", pattern, replacement, made, **more)


def found(pattern, function, *inputs, dynamic=False):
    """The kinds of what forbids the rewrite at each place where the structure fits."""
    graph = functional_graph(function, *inputs, dynamic=dynamic)
    return [
        [difference.kind for difference in wrong] for _, wrong in matches(pattern, Index(graph))
    ]


# ---- structure


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, w: torch.exp(x) * y + w,
        lambda x, y, w: w + y * torch.exp(x),
        lambda x, y, w: w + torch.exp(x) * y,
    ],
)
def test_operands_of_commutative_ops_match_in_both_orders(function):
    assert found(Pattern(scaled, example()), function, X, Y, W) == [[]]


def test_operands_of_other_ops_do_not():
    pattern = Pattern(
        lambda x, y: torch.exp(x) / y, {"x": tensor_example(3, 10), "y": tensor_example(3, 10)}
    )
    assert found(pattern, lambda x, y: torch.exp(x) / y, X, Y) == [[]]
    assert found(pattern, lambda x, y: y / torch.exp(x), X, Y) == []


def test_a_value_used_twice_in_the_pattern_is_one_value_in_the_graph():
    pattern = Pattern(lambda x: torch.exp(x) * torch.sin(x), {"x": tensor_example(3, 10)})
    assert found(pattern, lambda x, y: torch.exp(x) * torch.sin(x), X, Y) == [[]]
    assert found(pattern, lambda x, y: torch.exp(x) * torch.sin(y), X, Y) == []


def test_several_outputs_are_found_in_any_order_of_the_graph():
    def exp_first(x, y):
        total = x + y
        return torch.exp(total), total, torch.sin(total)

    def sin_first(x, y):
        total = y + x
        return torch.sin(total), total, torch.exp(total)

    pattern = Pattern(exp_first, {"x": tensor_example(3, 10), "y": tensor_example(3, 10)})
    assert found(pattern, sin_first, X, Y) == [[]]


def test_outputs_read_together_are_not_mixed_up_with_those_of_another_layer():
    pattern = Pattern(
        lambda x, y, w: (x * w, y * w),
        {"x": tensor_example(3, 10), "y": tensor_example(4, 10), "w": tensor_example(10)},
        read_together=True,
    )

    def function(a, b, c, d, w):
        return torch.cat((a * w, b * w)), torch.cat((c * w, d * w))

    graph = functional_graph(function, X, Y, X + 1, Y + 1, W)
    sites = [site for site, wrong in matches(pattern, Index(graph)) if not wrong]
    # Each product starts a search; the second of a pair finds nothing behind it.
    assert [[node.name for node in site.outputs()] for site in sites] == [
        ["mul", "mul_1"],
        ["mul_2", "mul_3"],
    ]


def test_numbers_of_the_pattern_must_agree_and_captured_ones_are_told():
    def pattern(x, eps, base):
        return torch.exp(x + eps) * base

    made = rewrite(
        pattern,
        lambda x, eps, base: aten.mul.Tensor(x, eps + base),
        {"x": (3, 10), "eps": 0.5, "base": 7},
    )
    graph = functional_graph(lambda x: torch.exp(x + 0.125) * 3, X)
    fired, _ = apply(graph, made, Index(graph))
    assert [f.attrs for f in fired] == [{"eps": 0.125, "base": 3}]


def test_one_number_at_two_places_is_one_number():
    pattern = Pattern(
        lambda x, eps: torch.exp(x + eps) * torch.sin(x * eps),
        {"x": tensor_example(3, 10), "eps": 0.5},
    )
    assert found(pattern, lambda x: torch.exp(x + 0.1) * torch.sin(x * 0.1), X) == [[]]
    assert found(pattern, lambda x: torch.exp(x + 0.1) * torch.sin(x * 0.2), X) == []


def test_views_between_are_seen_through_only_where_that_is_declared():
    def through(x, y):
        return torch.exp((x + y).view(-1, 2, 8))

    inputs = {"x": tensor_example(3, 10), "y": tensor_example(3, 10)}
    assert found(
        Pattern(lambda x, y: torch.exp(x + y), inputs, sees_through=True),
        through,
        torch.randn(4, 8),
        torch.randn(4, 8),
    ) == [[]]
    assert (
        found(
            Pattern(lambda x, y: torch.exp(x + y), inputs),
            through,
            torch.randn(4, 8),
            torch.randn(4, 8),
        )
        == []
    )


def test_a_cast_matches_its_absence_where_the_dtype_is_right():
    pattern = Pattern(lambda x: torch.exp(x.float()).to(x.dtype), {"x": tensor_example(3, 10)})
    assert [] in found(pattern, lambda x: torch.exp(x.float()).to(x.dtype), X.bfloat16())
    assert found(pattern, lambda x: torch.exp(x), X) == [[]]
    assert found(pattern, lambda x: torch.exp(x.float()), X.bfloat16()) == [["missing cast"]]
    assert [] not in found(pattern, lambda x: torch.exp(x), X.bfloat16())


# ---- values


def test_the_example_says_which_sizes_ranks_and_dtypes_are_equal():
    pattern = Pattern(scaled, example())
    assert found(pattern, scaled, X, Y, W) == [[]]
    assert found(pattern, scaled, X[None], Y[None], W) == [[]]  # more leading dimensions
    assert found(pattern, scaled, X, Y[0], W) == [["size", "size"]]  # y is broadcast
    assert found(pattern, scaled, X, Y, torch.randn(1)) == [["size"]]
    assert "dtype" in found(pattern, scaled, X, Y.double(), W)[0]


def test_sizes_that_are_equal_only_today_are_refused():
    pattern = Pattern(
        lambda x, y: torch.exp(x).sum() * y,
        {"x": tensor_example(3, 10), "y": tensor_example(3, 10)},
    )
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    mark_unbacked(x, 0)
    mark_unbacked(y, 0)
    graph = functional_graph(lambda x, y: torch.exp(x).sum() * y, x, y, dynamic=None)
    [(_, reasons)] = matches(pattern, Index(graph))
    assert (
        reasons[0].kind == "size"
        and "which is not known to be equal for all sizes" in reasons[0].found
    )


def test_an_intermediate_that_somebody_reads_stays():
    pattern = Pattern(scaled, example())
    assert found(pattern, lambda x, y, w: (scaled(x, y, w), torch.exp(x) * y), X, Y, W) == [
        []
    ]  # not shared yet
    graph = functional_graph(
        lambda x, y, w: (lambda p: (p + w, p.neg()))(torch.exp(x) * y), X, Y, W
    )
    [(_, [reason])] = matches(pattern, Index(graph))
    assert (
        reason.kind == "extra user"
        and reason.found.startswith("neg ")
        and reason.found.endswith("also reads it")
    )


LIBRARY = torch.library.Library("atomc_test", "FRAGMENT")
LIBRARY.define("bump_(Tensor(a!) x) -> ()")


@torch.library.impl(LIBRARY, "bump_", "CompositeExplicitAutograd")
def bump_(x):
    x.add_(1)


@pytest.mark.parametrize("written", ["x", "a view of x", "the product"])
def test_a_write_between_reads_is_a_reason(written):
    write = torch.ops.atomc_test.bump_.default

    def function(x, y, w):
        exp = torch.exp(x)
        if written != "the product":
            write(x if written == "x" else x[:, :4])
        product = exp * y
        if written == "the product":
            write(product)
        return product + w

    graph = make_fx(function, tracing_mode="fake")(X, Y, W).graph
    [(_, wrong)] = matches(Pattern(scaled, example()), Index(graph))
    assert "mutation" in {difference.kind for difference in wrong}
    assert any("bump_" in difference.found for difference in wrong)


def test_a_write_before_or_behind_the_match_is_none():
    write = torch.ops.atomc_test.bump_.default

    def function(x, y, w):
        write(x)
        out = scaled(x, y, w)
        write(y)
        return out

    graph = make_fx(function, tracing_mode="fake")(X, Y, W).graph
    assert [wrong for _, wrong in matches(Pattern(scaled, example()), Index(graph))] == [[]]


def test_an_input_that_needs_an_output_of_the_match_is_a_cycle():
    def sum_and_product(x, y, w):
        total = x + y
        return total, torch.exp(total) * w

    inputs = {"x": tensor_example(3, 10), "y": tensor_example(3, 10), "w": tensor_example(3, 10)}
    pattern = Pattern(sum_and_product, inputs)

    def function(x, y):
        total = x + y
        return torch.exp(total) * total.sin()

    [kinds] = found(pattern, function, X, Y)
    assert kinds == ["cycle"]


def test_everything_is_on_one_device():
    graph = functional_graph(scaled, X, Y, W)
    w = graph.find_nodes(op="placeholder")[2]
    w.meta["val"] = w.meta["val"].to("meta")
    [(_, wrong)] = matches(Pattern(scaled, example()), Index(graph))
    assert ("device", "all tensors on cpu", "input w on meta") in {
        (d.kind, d.expected, d.found) for d in wrong
    }


# ---- rewriting


def test_a_sweep_replaces_sites_that_feed_each_other():
    made = rewrite(lambda x: torch.sin(x) * 2.0, lambda x: aten.cos.default(x), {"x": (3, 10)})

    def chain(x):
        for _ in range(3):
            x = torch.sin(x) * 2.0
        return x

    graph = functional_graph(chain, X)
    fired, refused = apply(graph, made, Index(graph))
    graph.lint()
    assert len(fired) == 3 and not refused
    assert [call(node).op for node in graph.nodes if node.op == "call_function"] == ["cos"] * 3


def test_overlapping_sites_do_not_both_fire():
    made = rewrite(lambda x: torch.sin(torch.sin(x)), lambda x: aten.cos.default(x), {"x": (3, 10)})
    graph = functional_graph(lambda x: torch.sin(torch.sin(torch.sin(x))), X)
    fired, refused = apply(graph, made, Index(graph))
    assert len(fired) == 1
    assert [miss.first.kind for miss in refused] == ["taken"] or refused[
        0
    ].first.kind == "extra user"


def test_new_nodes_know_where_they_come_from():
    def function(x, y, w):
        return scaled(x, y, w).neg()

    graph = functional_graph(function, X, Y, W)
    [fired], _ = apply(graph, Rewrite("again", scaled, replaced, example), Index(graph))
    for node in fired.new_nodes:
        assert record_of(node).made_by == "again" and "test_match.py" in node.meta["stack_trace"]
        assert record_of(node).origins == {"exp", "mul", "add"} and node.meta["val"].shape == (3, 8)


def test_a_guard_gets_the_arguments_by_name_and_its_sentence_is_the_reason():
    def guard(x, y, w):
        return f"{x.shape[-1]} columns" if x.shape[-1] == 8 else None

    made = Rewrite("guarded", scaled, lambda x, y, w: aten.add.Tensor(x, w), example, guard)
    report = after_passes([TIDY, rewriting(made)], scaled, X, Y, W).report
    assert [(miss.kind, miss.found) for miss in report.misses("guarded")] == [
        ("guard", "8 columns")
    ]


def test_a_guard_that_forces_an_answer_about_sizes_is_caught():
    def guard(x, y, w):
        return None if x.shape[0] == 5 else "not five rows"

    made = Rewrite("forcing", scaled, replaced, example, guard)
    with pytest.raises(
        Exception, match="pass 'forcing' added a guard on the sizes of the inputs"
    ) as caught:
        after_passes([rewriting(made)], scaled, X, Y, W, dynamic=True)
    assert isinstance(caught.value.inner_exception, PassError)


def test_a_rewrite_that_makes_what_it_looks_for_is_reported_as_a_bug():
    made = Rewrite("again", scaled, replaced, example)
    with pytest.raises(
        Exception, match=r"pass 'again': .*the matcher refused it, but nothing differs"
    ):
        after_passes([rewriting(made)], scaled, X, Y, W)
    context = Context(Options(), Platform.detect("cpu"))
    report = after_passes([rewriting(made)], scaled, X, Y, W, context=context).report
    assert len(report.bugs) == 1


def test_an_error_in_the_explanation_of_a_near_miss_costs_the_explanation_alone(monkeypatch):
    def fails(*given):
        raise IndexError("no such dimension")

    made = Rewrite("adding", scaled, replaced, example)
    monkeypatch.setattr("atomc.compiler.pipeline.misses", fails)
    with pytest.raises(
        Exception,
        match=r"pass 'adding': .*near misses are not explained: IndexError: no such dimension",
    ):
        after_passes([rewriting(made)], scaled, X, Y, W)
    context = Context(Options(), Platform.detect("cpu"))
    report = after_passes([rewriting(made)], scaled, X, Y, W, context=context).report
    assert report.matches["adding"] == 1
    assert (
        "bugs of atomc, please report\n  adding: near misses are not explained" in report.to_text()
    )


def test_a_pass_that_breaks_the_graph_is_named_with_what_ran_before():
    def breaks(gm, context):
        raise KeyError("lost")

    with pytest.raises(Exception, match=r"pass 'breaks' failed \(after tidy\): 'lost'"):
        after_passes([TIDY, Pass("breaks", breaks)], scaled, X, Y, W)


def test_only_ops_may_stand_in_a_replacement():
    made = Rewrite("python", scaled, lambda x, y, w: torch.exp(x), example)
    with pytest.raises(
        Exception,
        match=r"replacement of 'python' creates .*may only call atomc.ops and torch.ops.aten",
    ):
        rewritten(made, scaled, X, Y, W)


def test_pattern_and_replacement_take_the_same_arguments():
    with pytest.raises(
        ValueError, match="rewrite 'odd': pattern and replacement take different arguments"
    ):
        Rewrite("odd", scaled, lambda x, y: x, example)


def test_nothing_is_traced_until_it_is_asked_for():
    def pattern(x):
        raise AssertionError("traced")

    made = Rewrite("lazy", pattern, lambda x: x, lambda: {"x": tensor_example(3, 10)})
    with pytest.raises(AssertionError, match="traced"):
        made.traced()


def test_symbolic_sizes_are_traced_only_for_graphs_with_the_ops_of_a_pattern():
    index = Index(functional_graph(lambda x: torch.exp(x) + 1, X))
    other, half, whole = (
        rewrite(pattern, lambda x: x, {"x": (3, 10)})
        for pattern in (
            lambda x: torch.cos(x) * 2,
            lambda x: torch.exp(x).cos(),
            lambda x: torch.exp(x) * 2 + 1 + x,
        )
    )
    for made, near in ((other, False), (half, True), (whole, True)):
        assert apply(index.graph, made, index) == ([], [])
        assert made.can_nearly_match(made.cases[0], index) == near
        assert not made.patterns
    assert half.ops(half.cases[0]) == {"exp", "cos"}


# ---- the pipeline


def test_a_pass_stands_behind_those_it_needs():
    first, second = (
        Pass("first", lambda gm, context: []),
        Pass("second", lambda gm, context: [], after=("first",)),
    )
    check_order([first, second])
    with pytest.raises(ValueError, match=r"pass 'second' must come after \['first'\]"):
        check_order([second, first])
    with pytest.raises(ValueError, match="two passes are named 'first'"):
        check_order([first, first])


@pytest.mark.parametrize(
    ("switches", "paged", "says"),
    [
        (
            {"rms_nrom": False},
            False,
            r"no pass 'rms_nrom' \(did you mean 'rms_norm'\?\); passes are ",
        ),
        (
            {"add_rms_norm": True, "rms_norm": False},
            False,
            "'add_rms_norm' cannot take effect, it needs 'rms_norm', which",
        ),
        ({"rope_kv_write": True}, False, "'rope_kv_write' cannot take effect outside the runtime"),
        ({"bind_state": False}, True, "'bind_state' cannot be turned off, the runtime needs it"),
    ],
)
def test_a_switch_that_cannot_take_effect_is_an_error(switches, paged, says):
    from atomc import passes

    with pytest.raises(OptionsError, match=says):
        selected(
            passes.PIPELINE, Context(Options(passes=switches), Platform.detect("cpu"), paged=paged)
        )


def test_a_fusion_across_the_whole_pipeline_adds_no_guard_to_dynamic_sizes():
    def function(x, r, w, gate, up):
        total = x + r
        return ops.rms_norm(total, w, 1e-6), torch.nn.functional.silu(gate) * up

    report = explained(function, X, Y, W, torch.randn(5, 7), torch.randn(5, 7), dynamic=True)
    assert report.matches["add_rms_norm"] == report.matches["silu_and_mul"] == 1
