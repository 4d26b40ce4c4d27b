"""Reports: the answers to "why did X not fuse?", each provoked, and a report as plain data."""

import json
import re

import pytest
import torch
import torch.nn.functional as F
from rewriting import explained, since
from torch import nn

import atomc
from atomc import ops
from atomc.report.records import CacheOutcome, GraphBreak, Miss, spans
from atomc.report.report import MAX_REPORTS, Report, forget, keep, reports

STRICT = {"strict": True, "glue": "eager"}
X = torch.randn(5, 32)


class Norm(nn.Module):
    def __init__(self, dim: int = -1):
        super().__init__()
        self.weight, self.dim = nn.Parameter(torch.randn(32)), dim

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(self.dim, keepdim=True) + 1e-6))


class Layer(nn.Module):
    def __init__(self, dim: int = -1):
        super().__init__()
        self.norm, self.gate, self.up = Norm(dim), nn.Linear(32, 48), nn.Linear(32, 48)
        self.down = nn.Linear(48, 32)

    def forward(self, x, residual):
        residual = residual + x
        y = self.norm(residual)
        return self.down(F.silu(self.gate(y)) * self.up(y)), residual


class Model(nn.Module):
    """Layers of an add, a norm and a gated MLP; `odd` layers norm over the wrong dimension."""

    def __init__(self, layers: int = 3, odd: tuple[int, ...] = ()):
        super().__init__()
        self.layers = nn.ModuleList(Layer(dim=-2 if i in odd else -1) for i in range(layers))

    def forward(self, x):
        residual = x * 0.5
        for layer in self.layers:
            x, residual = layer(x, residual)
        return x + residual


def report_of(model, x=X, **options) -> Report:
    """The report of compiling and running the model, whose numbers must be those of eager."""
    if isinstance(model, nn.Module):
        model.requires_grad_(False)
    compiled = torch.compile(model, backend="atom", options=STRICT | options)
    torch.testing.assert_close(compiled(x), model(x))
    return reports()[-1]


# ---- the answers


def test_a_rewrite_that_fired_says_where_and_what_runs_it():
    why = report_of(Model()).why("add_rms_norm")
    assert re.match(r"add_rms_norm: fired at 3 sites in layers 0-2; runs as \w+ x3", why), why


def test_a_pass_that_is_off_says_how_it_was_switched_off():
    report = report_of(Model(), passes={"add_rms_norm": False})
    assert (
        report.why("add_rms_norm")
        == "add_rms_norm: the pass is off (options={'passes': {'add_rms_norm': False}})"
    )
    assert report.matches["rms_norm"] == 3


def test_a_graph_that_was_not_treated_says_why():
    model, x = Model(), X.clone()
    compiled = torch.compile(model, backend="atom", options=STRICT)
    compiled(x).sum().backward()
    assert "add_rms_norm: the graph was not treated: gradients are enabled" in reports()[-1].why(
        "add_rms_norm"
    )

    report_of(Model().eval(), disable=True)
    assert "the graph was not treated: atomc is disabled" in reports()[-1].why("rms_norm")


def test_explain_continues_behind_a_break_with_a_truth_value_of_sizes():
    class Causal(nn.Module):
        def forward(self, x):
            causal = x.shape[0] > 1
            torch._dynamo.graph_break()
            q = x[None, None]
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=causal)

    before = atomc.reports()
    atomc.explain(Causal(), torch.randn(5, 8), dynamic=True)
    graphs = since(before)
    assert graphs and all(report.treated for report in graphs)


def test_a_graph_break_is_named_with_the_users_line():
    layer = Layer().requires_grad_(False)

    def broken(x):
        total = x + x.abs()
        torch._dynamo.graph_break()
        return layer.norm(total)

    line = broken.__code__.co_firstlineno + 2
    before = reports()
    report_of(broken)
    first, second = since(before)
    assert first.why("add_rms_norm").startswith(
        f"add_rms_norm: broken here: Dynamo ended the graph at test_report.py:{line} "
        "(torch._dynamo.graph_break())"
    )
    assert second.matches["rms_norm"] == 1 and second.graph_break is None


def test_the_graphs_of_the_last_call_answer_together():
    layer = Layer().requires_grad_(False)

    def earlier(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    def broken(x):
        total = x + x.abs()
        print(end="")
        return layer.norm(total) + layer.norm(x)

    report_of(earlier)
    assert len(reports().breaks) == 1 and reports().last_call == reports()[-2:]
    report_of(broken)
    first, second = reports().last_call
    place = f"test_report.py:{broken.__code__.co_firstlineno + 2}"
    assert (first.continues, second.continues) == ("", place)
    assert str(second).startswith(f"{second.model}, behind {place}: compiled")
    (found,) = reports().breaks
    assert found.source == place and found.summary == "Failed to trace builtin operator"
    assert "Explanation: " in found.reason and "Hint: " in found.reason
    assert all(
        line.strip() in str(first).replace("\n    ", " ") for line in found.reason.splitlines()
    )
    head, one, two = reports().why("rms_norm").splitlines()
    assert head == "rms_norm:" and f"graph 0 ({first.model}): broken here: Dynamo ended" in one
    assert f"graph 1 ({second.model}, behind {place}): fired at 2 sites" in two
    with pytest.raises(ValueError, match="no rewrite 'rms_nrm'"):
        reports().why("rms_nrm")


def test_each_call_has_its_own_graphs():
    compiled = torch.compile(lambda x: x.sin() + 1, backend="atom", options={"glue": "eager"})
    for size in (2, 3):
        compiled(torch.randn(size))
        compiled(torch.randn(size))
    assert len(reports().last_call) == 1 and reports().why("linear") == reports()[-1].why("linear")


def test_without_an_anchor_the_nearest_op_is_named():
    report = report_of(Model(1))
    assert report.why("gelu_and_mul").startswith(
        "gelu_and_mul: no anchor: the graph has no gelu; the nearest op found is mul"
    )
    assert "rope: no anchor: " in report.why("rope")


def test_a_near_miss_says_what_was_expected_what_was_found_and_where():
    report = report_of(Model(2, odd=(0, 1)))
    line = Norm.forward.__code__.co_firstlineno + 1
    assert report.why("rms_norm") == (
        "rms_norm: near miss (and 1 more like it): rms_norm in layers.0.norm "
        f"(test_report.py:{line}), 100% there: "
        "expected mean with dim=(-1,); found dim=(-2,)"
    )
    assert [miss.layer for miss in report.misses("rms_norm")] == [0, 1]


def test_a_fusion_without_its_parts_shows_the_miss_of_the_part():
    report = report_of(Model(2, odd=(0, 1)))
    assert report.why("add_rms_norm").startswith(
        "add_rms_norm: needs rms_norm, which did not fire everywhere. Near miss: "
    )
    assert report.misses("rms_norm")[0].text() in report.why("add_rms_norm")


def test_what_another_rewrite_took_is_said_with_its_name():
    def function(q, w, cos, sin, kv):
        k = q + 1
        q, k = (ops.rope(ops.rms_norm(x, w, 1e-6), cos, sin) for x in (q, k))
        return ops.attention(q, k, k, kv, scale=1.0)

    tables = torch.randn(5, 1, 16), torch.randn(5, 1, 16)
    report = explained(
        function, torch.randn(5, 2, 16), torch.randn(16), *tables, ops.kv_state(2, 16), paged=True
    )
    assert report.matches["qk_norm_rope_kv_write"] == 1
    assert (
        report.why("rope_kv_write")
        == "rope_kv_write: taken by qk_norm_rope_kv_write, which used every kv_write (1)"
    )


def test_two_fusions_that_want_one_node_say_who_got_it():
    def function(x):
        total = x + x.abs()
        return ops.rms_norm(total, x[0], 1e-6), ops.rms_norm(total, x[1], 1e-6)

    report = report_of(function)
    assert report.matches["add_rms_norm"] == 1
    assert [(miss.kind, miss.found) for miss in report.misses("add_rms_norm")] == [
        ("taken", "taken by add_rms_norm")
    ]


def test_a_report_of_a_version_without_codes_is_read():
    new = report_of(Model(1))
    new.cached = CacheOutcome("miss", "the cache is empty", "it has a hook")
    assert Report.of(json.loads(new.to_json())).cached == new.cached
    old = json.loads(new.to_json())
    del old["cached"], old["glue"]
    for choice in old["kernels"]:
        del choice["codes"]
    read = Report.of(old)
    assert read.cache == new.cache == "miss: the cache is empty; not kept: it has a hook"
    assert [choice.refused for choice in read.kernels] == [choice.refused for choice in new.kernels]
    assert "the cache is empty" in read.to_html()


@pytest.fixture
def a_kernel_that_refuses():
    def refuses(platform, gate, up):
        return f"rows of {gate.shape[-1]} are not for it"

    ops.silu_and_mul.kernel("picky", refuses=refuses)(lambda gate, up: None)
    yield
    ops.silu_and_mul.kernels[:] = [
        kernel for kernel in ops.silu_and_mul.kernels if kernel.provider != "picky"
    ]


def test_a_rewrite_that_fired_lists_the_kernels_that_refused(a_kernel_that_refuses):
    report = report_of(Model(2))
    why = report.why("silu_and_mul")
    assert (
        "fired at 2 sites in layers 0-1; runs as " in why
        and "picky: rows of 48 are not for it" in why
    )
    assert all(
        ("picky", "rows of 48 are not for it") in choice.refused
        for choice in report.kernels
        if choice.op == "silu_and_mul"
    )


def test_the_answer_can_be_had_for_one_module():
    report = report_of(Model(3, odd=(1,)))
    assert "fired at 1 site in layers 2" in report.why("add_rms_norm", "layers.2")
    assert "near miss" in report.why("rms_norm", "layers.1") and "fired at 2 sites" in report.why(
        "rms_norm"
    )
    assert "needs rms_norm" in report.why("add_rms_norm", "layers.1")
    assert "no op of this graph is in a module 'layers.7'" in report.why("silu_and_mul", "layers.7")


def test_an_unknown_rewrite_is_an_error_that_lists_what_there_is():
    report = report_of(Model(1))
    for ask in (report.why, report.misses):
        with pytest.raises(
            ValueError,
            match=r"no rewrite 'add_rmsnorm' \(did you mean 'add_rms_norm'\?\); rewrites are add_layer",
        ):
            ask("add_rmsnorm")


# ---- as data


def test_sites_have_module_layer_line_and_attributes():
    report = report_of(Model(2))
    sites = [site for site in report.sites if site.rewrite == "rms_norm"]
    assert [(site.module_path, site.layer) for site in sites] == [
        ("layers.0.norm", 0),
        ("layers.1.norm", 1),
    ]
    line = Norm.forward.__code__.co_firstlineno + 1
    assert {site.source for site in sites} == {f"test_report.py:{line}"}
    assert sites[0].attrs == {"style": "after", "weight": "as x", "eps": 1e-6}
    fused = [site for site in report.sites if site.rewrite == "add_rms_norm"]
    # It spans the layer and the norm in it.
    assert [site.layer for site in fused] == [0, 1]


def test_a_report_goes_through_json_and_has_no_tensors():
    report = report_of(Model(3, odd=(1,)))
    data = json.loads(report.to_json())
    assert data["version"] == 1 and data["matches"]["add_rms_norm"] == 2
    assert [(miss["kind"], miss["found"]) for miss in data["near"]] == [("attribute", "dim=(-2,)")]
    assert data == json.loads(json.dumps(report.to_dict(), default=str))

    def leaves(item):
        if isinstance(item, dict):
            item = list(item.values())
        return (
            [leaf for part in item for leaf in leaves(part)]
            if isinstance(item, list | tuple)
            else [item]
        )

    assert {type(leaf) for leaf in leaves(report.to_dict())} <= {str, int, float, bool, type(None)}


def test_stages_of_explain_hold_the_graph_after_each_pass_that_changed_it():
    report = atomc.explain(Model(1).requires_grad_(False), X, options=STRICT)
    names = [stage.name for stage in report.stages]
    assert names.index("rms_norm") < names.index("add_rms_norm") < names.index("lower")
    texts = {stage.name: stage.text for stage in report.stages}
    assert "rsqrt" not in texts["rms_norm"] and "atom.rms_norm" in texts["rms_norm"]
    assert "atom.add_rms_norm" in texts["add_rms_norm"] and "aten.silu" not in texts["silu_and_mul"]


def test_ops_left_before_lowering_are_counted():
    num_ops = report_of(Model(2)).num_ops
    assert (
        num_ops["add_rms_norm"] == 2 and num_ops["silu_and_mul"] == 2 and "rms_norm" not in num_ops
    )


def test_reports_are_kept_newest_last_and_not_for_ever():
    before = list(reports())
    made = [keep(Report(str(i))) for i in range(MAX_REPORTS + 1)]
    assert len(reports()) == MAX_REPORTS and reports()[-1] is made[-1]
    forget(made[-1])
    assert made[-1] not in reports()
    for report in made:
        forget(report)
        forget(report)  # twice is no error
    assert not set(map(id, reports())) & set(map(id, made)) and atomc.reports is reports
    for report in before:
        keep(report)


def test_breaks_and_recompiles_are_listed_over_reports():
    broken = keep(Report("a", graph_break=GraphBreak("model.py:3", "print(x)", "print")))
    again = keep(Report("b", recompile="x.size()[0] == 5"))
    assert (
        reports().breaks[-1] == broken.graph_break and reports().recompiles[-1] == again.recompile
    )
    forget(broken)
    forget(again)


def test_a_miss_reads_as_a_sentence_with_and_without_a_place():
    miss = Miss("rope", "neox", "layers.1.attn", 1, "m.py:7", 0.75, "other op", "neg", "abs")
    assert miss.text() == "rope in layers.1.attn (m.py:7), 75% there: expected neg; found abs"
    bare = Miss("rope", "", "", None, "", 1.0, "other op", "neg", "abs")
    assert bare.text() == "rope in the graph, 100% there: expected neg; found abs"


@pytest.mark.parametrize(
    ("numbers", "text"), [((), ""), ((3,), "3"), ((0, 1, 2, 5), "0-2, 5"), ((4, 0, 4, 1), "0-1, 4")]
)
def test_numbers_are_written_as_spans(numbers, text):
    assert spans(numbers) == text
