"""Reports as text: what a person reads in a terminal."""

from collections import Counter
from dataclasses import replace

import pytest

from atomc.report.records import GraphBreak, KernelChoice, Miss, Site
from atomc.report.render.table import WIDTH, collapsed, table
from atomc.report.render.text import report_text, summary
from atomc.report.report import Report


def fired(rewrite, path, layer):
    return Site(rewrite, path, layer, "model.py:12")


def miss(layer, found="mul(other=2.0)", rewrite="add_norm", kind="op"):
    path = f"model.layers.{layer}.mlp"
    return Miss(rewrite, "", path, layer, "model.py:20", 0.75, kind, "add", found)


REPORT = Report(
    "Tiny",
    treated=True,
    matches=Counter({"norm": 3}),
    sites=[
        fired("norm", "layers.0.norm", 0),
        fired("norm", "layers.1.norm", 1),
        fired("norm", "norm", None),
        fired("lower", "norm", None),
    ],
    kernels=[
        KernelChoice("norm", f"layers.{i}", "any", "mine", [("theirs", "rows are too long")])
        for i in range(2)
    ]
    + [KernelChoice("linear", "head", "any", "torch", [])],
    phases={"trace": 0.5, "passes": 1.25},
    notes=["glue: eager (option glue is eager)"],
    state=["layers.0.attn: kv [2, 16]", "layers.1.attn: kv [2, 16]"],
    near=[miss(0), miss(1)],
    known=["norm", "add_norm", "gelu"],
    absent={"gelu": "the graph has no gelu"},
)


def test_a_report_reads_like_this():
    assert (
        report_text(REPORT)
        == """\
Tiny: compiled

rewrite  sites  layers  in
norm         3  0-1     layers.*.norm, norm

did not fire  why
add_norm      near misses, below
cannot apply, the graph lacks their ops: gelu

near misses
  add_norm in model.layers.*.mlp x2, layers 0-1, model.py:20: 75% matched
    expected  add
    found     mul(other=2.0)

op      nodes  tokens  runs as
norm        2  any     mine
linear      1  any     torch
not theirs for norm: rows are too long

state
  layers.*.attn: kv [2, 16] (x2)

notes
  glue: eager (option glue is eager)

seconds: trace 0.50, passes 1.25; together 1.75
"""
    )


def test_to_text_is_the_same_text():
    assert REPORT.to_text() == report_text(REPORT) == str(REPORT)


def test_a_report_is_one_line_in_a_list_and_a_page_in_a_notebook():
    assert repr(REPORT) == "<Report of Tiny, compiled: 4 sites of 2 rewrites, 2 near misses>"
    assert repr(Report("Tiny", why_not="off")).startswith("<Report of Tiny, not treated: off")
    assert REPORT._repr_html_().startswith('<iframe srcdoc="&lt;!')


def test_a_graph_that_was_not_treated_says_why_and_nothing_else():
    assert (
        report_text(Report("Tiny", why_not="gradients are wanted"))
        == "Tiny: not treated: gradients are wanted\n"
    )


def test_a_graph_break_and_a_failed_guard_are_shown():
    report = Report(
        "Tiny",
        treated=True,
        graph_break=GraphBreak("model.py:7", "print(x)", "print is not traced"),
        recompile="L['x'].size()[0] == 3",
    )
    lines = report_text(report).splitlines()
    assert "graph break at model.py:7 (print(x)): print is not traced" in lines
    assert "recompiled, because this guard failed: L['x'].size()[0] == 3" in lines


def test_a_reason_that_holds_for_several_rewrites_is_said_once():
    report = Report(
        "Tiny",
        treated=True,
        known=["norm", "gelu"],
        graph_break=GraphBreak("model.py:7", "", "a reason"),
    )
    lines = report_text(report).splitlines()
    assert "norm          broken here: Dynamo ended the graph at model.py:7 (): a reason" in lines
    assert "gelu          as norm" in lines


def test_a_pass_that_is_off_is_listed_as_such():
    text = report_text(Report("Tiny", treated=True, known=["norm"], off=["norm"]))
    assert (
        "norm          the pass is off (options={'passes': {'norm': False}})" in text.splitlines()
    )


def test_a_provider_that_serves_no_op_is_named_once():
    refused = [("theirs", "not installed")]
    report = Report(
        "Tiny",
        treated=True,
        kernels=[KernelChoice(op, "", "any", "torch", refused) for op in ("a", "b")],
    )
    assert report_text(report).count("not theirs for all: not installed") == 1


def test_a_provider_that_runs_an_op_has_refused_with_another_of_its_kernels():
    kernels = [KernelChoice("linear", "", "any", "ours", [("ours", "too narrow")])]
    assert "not another ours kernel for all: too narrow" in report_text(
        Report("Tiny", treated=True, kernels=kernels)
    )


def test_misses_that_differ_are_listed_each():
    report = Report(
        "Tiny", treated=True, near=[miss(0), miss(0, rewrite="other")], known=["add_norm", "other"]
    )
    assert report_text(report).count("75% matched") == 2


def test_of_very_many_misses_the_rest_is_counted():
    report = Report("Tiny", treated=True, near=[miss(0, rewrite=f"r{i}") for i in range(25)])
    assert "  and 5 more: Report.near has all" in report_text(report).splitlines()


def test_no_line_is_wider_than_the_terminal():
    long = "because " + "it does not fit " * 20
    report = Report(
        "Tiny",
        treated=True,
        sites=[fired("norm", f"model.part_{i}.norm", None) for i in range(20)],
        kernels=[KernelChoice("norm", "", "any", "torch", [("mine", long)])],
        notes=[long],
        near=[miss(0, found=long)],
    )
    assert max(map(len, report_text(report).splitlines())) <= WIDTH


@pytest.mark.parametrize(
    "path, expected",
    [
        ("model.layers.12.mlp", "model.layers.*.mlp"),
        ("0", "*"),
        ("layers.3.experts.5", "layers.*.experts.*"),
        ("conv2d.weight", "conv2d.weight"),
        ("", ""),
    ],
)
def test_layer_numbers_are_left_out_of_a_path(path, expected):
    assert collapsed(path) == expected


def test_columns_are_aligned_and_numbers_end_in_one_column():
    assert table(("name", "n", "why"), [("a", "10", "x"), ("long", "2", "y")], numbers=[1]) == (
        "name   n  why\na     10  x\nlong   2  y"
    )


def test_a_summary_is_three_lines():
    assert (
        summary(REPORT)
        == """\
2 layers: 3 norm fired
mine runs 2 norm; torch runs 1 linear
2 near misses, such as add_norm in model.layers.0.mlp; glue: eager (option glue is eager)"""
    )


def test_a_summary_of_what_was_not_compiled_says_why():
    assert (
        summary(Report("Tiny", why_not="gradients are wanted"))
        == "not compiled: gradients are wanted"
    )


def test_what_repeated_calls_launch_is_listed():
    call = {"kernels": 149, "ops": 3, "direct": 0, "bytes": 3 * 2**19, "host_ms": 0.616}
    repeated = [call, call | {"direct": 151}]
    text = report_text(replace(REPORT, repeated=repeated))
    assert (
        "calls without their Python\n"
        "  149 kernels and 3 ops of PyTorch, 1.5 MiB of temporaries, 0.62 ms of the host\n"
        "  149 kernels and 3 ops of PyTorch, 151 by CUDA's driver and cuBLASLt directly, 1.5 MiB of\n"
    ) in text
    assert 'mode="reduce-overhead"' in text
    assert 'mode="reduce-overhead"' not in report_text(replace(REPORT, repeated=[call]))
    assert "149 kernels and 3 ops" in replace(REPORT, repeated=repeated).to_html()
