"""Audits: a wrong kernel is ranked first and found by search; the result stays; what is at fault
can be left out.
"""

import json
import logging
import math
import sys
from dataclasses import replace

import pytest
import torch
from test_report import Model, X

import atomc
from atomc import ops
from atomc.audit import recorder
from atomc.audit.bisect import bisect_rewrites
from atomc.audit.compare_kernels import KernelComparison
from atomc.audit.error import Error, error
from atomc.audit.sites import AuditSite
from atomc.cli import main
from atomc.compiler.explain import explain
from atomc.loading.create_model import create_model
from atomc.ops.state import GroupStep, Step
from atomc.options import Options, read_options, written_options
from atomc.program import compile_model
from atomc.report.render.audit import audit_text, headline, ranked_by
from atomc.report.report import reports

EAGER = {"strict": True, "glue": "eager"}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
T = 7
IDS, POSITIONS = torch.arange(T) * 5 % 256, torch.arange(T)
FAULTY = 1


def own():
    torch.manual_seed(0)
    model = create_model(CONFIG, torch.float32).eval().requires_grad_(False)
    for (
        layer
    ) in model.model.layers:  # all ones otherwise, so that no kernel could tell layers apart
        layer.post_attention_layernorm.weight += torch.randn(64) * 0.1
    return model


def small():
    torch.manual_seed(0)
    return Model(3).requires_grad_(False)


@pytest.fixture
def wrong_in():
    """Registers an add_rms_norm that is 1% too large where the weight is one of the given, and
    takes it out again.
    """
    before = list(ops.add_rms_norm.kernels)

    def register(*weights):
        wrong = {weight.data_ptr() for weight in weights}

        @ops.add_rms_norm.kernel("faulty")
        def add_rms_norm(x, residual, weight, eps, style="after"):
            normed, total = ops.add_rms_norm.reference(x, residual, weight, eps, style)
            return (normed * 1.01 if weight.data_ptr() in wrong else normed), total

    yield register
    ops.add_rms_norm.kernels[:] = before


@pytest.fixture
def runs(monkeypatch):
    """Counts the runs of a graph with something left out."""
    counted = []
    without = KernelComparison.run_without

    def counting(self, places):
        counted.append(list(places))
        return without(self, counted[-1])

    monkeypatch.setattr(KernelComparison, "run_without", counting)
    return counted


def audited(model, *args, **options):
    """What the compiled model returns, and the audit of that call."""
    with torch.no_grad():
        out = torch.compile(model, backend="atom", options={**EAGER, "audit": True, **options})(
            *args
        )
    return out, reports()[-1].audit


def step(count, sequences=1):
    """So many new tokens of each sequence, in caches of one block a sequence."""
    rows = count * sequences
    group = GroupStep(
        torch.cat([torch.arange(count) + 16 * s for s in range(sequences)]),
        torch.arange(sequences, dtype=torch.int32)[:, None],
    )
    lengths = torch.full((sequences,), count, dtype=torch.int32)
    starts = torch.arange(0, rows + 1, count, dtype=torch.int32)
    return Step(
        torch.arange(rows) * 5 % 256,
        torch.arange(count).repeat(sequences),
        starts,
        lengths,
        torch.arange(rows),
        (group,),
        torch.arange(sequences),
    )


def audited_step(model):
    program = compile_model(model, {**EAGER, "audit": True, "layout": "paged"})
    program.bind([spec.allocate(1, 16, "cpu") for spec in program.specs])
    with torch.no_grad():
        program(step(T))
    return program.report.audit


# ---- a wrong kernel


def found_first(audit, runs, path):
    first = audit["sites"][0]
    assert (first["rewrite"], first["module_path"], first["kernel"]) == (
        "add_rms_norm",
        path,
        "faulty",
    )
    assert first["sqnr"] == pytest.approx(40, abs=0.1) and first["relative"] == pytest.approx(
        0.01, rel=1e-3
    )
    assert all(site["sqnr"] is None or site["sqnr"] > 100 for site in audit["sites"][1:])
    found = audit["blame"]
    assert (found["rewrite"], found["module_path"]) == ("add_rms_norm", path)
    assert found["passes"] == {"add_rms_norm": [path]}
    rewrites = {site["rewrite"] for site in audit["sites"]}
    assert found["runs"] == len(runs) <= math.log2(len(rewrites)) + 2


def test_a_wrong_kernel_in_one_layer_is_ranked_first_and_found_by_search(wrong_in, runs):
    model = small()
    wrong_in(model.layers[FAULTY].norm.weight)
    _, audit = audited(model, X)
    found_first(audit, runs, f"layers.{FAULTY}.norm")


def test_in_a_language_model_too(wrong_in, runs):
    model = own()
    wrong_in(model.model.layers[FAULTY].post_attention_layernorm.weight)
    _, audit = audited(model, IDS, POSITIONS)
    found_first(audit, runs, f"model.layers.{FAULTY}.post_attention_layernorm")


@pytest.mark.rotating
def test_in_the_program_of_the_runtime_too(wrong_in, runs):
    model = own()
    wrong_in(model.model.layers[FAULTY].post_attention_layernorm.weight)
    audit = audited_step(model)
    found_first(audit, runs, f"model.layers.{FAULTY}.post_attention_layernorm")


@pytest.mark.rotating
def test_in_a_stock_model_and_with_regions_too(wrong_in, runs):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = atomc.prepare(transformers.LlamaForCausalLM(config).eval().requires_grad_(False))
    weight = model.model.layers[FAULTY].post_attention_layernorm.weight
    weight += torch.randn(32) * 0.1
    wrong_in(weight)
    with torch.no_grad():
        torch.compile(model, backend="atom", options={**EAGER, "audit": True})(
            IDS[None] % 96, use_cache=False
        )
    found_first(reports()[-1].audit, runs, f"model.layers.{FAULTY}.post_attention_layernorm")


def test_a_kernel_that_is_wrong_everywhere_is_left_out_everywhere(wrong_in):
    model = small()
    wrong_in(*(layer.norm.weight for layer in model.layers))
    _, audit = audited(model, X)
    found = audit["blame"]
    assert (found["rewrite"], found["module_path"], found["places"]) == ("add_rms_norm", None, 3)
    assert found["passes"] == {"add_rms_norm": False}


def test_what_is_written_to_a_cache_is_compared_too(monkeypatch):
    monkeypatch.setitem(
        vars(ops.qk_norm_rope_kv_write), "kernels", list(ops.qk_norm_rope_kv_write.kernels)
    )

    @ops.qk_norm_rope_kv_write.kernel("faulty", layout="paged")
    def qk_norm_rope_kv_write(q, k, v, *rest, **more):
        return ops.qk_norm_rope_kv_write.reference(q, k, v * 1.01, *rest, **more)

    audit = audited_step(own())
    first = audit["sites"][0]
    assert (first["rewrite"], first["against"]) == ("qk_norm_rope_kv_write", "meaning")
    assert first["sqnr"] == pytest.approx(40, abs=0.1)
    assert audit["blame"]["rewrite"] == "qk_norm_rope_kv_write"


# ---- the search


def place(rewrite, number):
    return AuditSite(
        None,
        "op",
        "kernel",
        rewrite,
        (rewrite,),
        f"layers.{number}",
        number,
        "",
        (),
        True,
        False,
        (),
    )


@pytest.mark.parametrize("rewrites", [1, 2, 3, 6, 8, 13, 16])
def test_the_search_takes_no_more_runs_than_promised_whoever_it_is(rewrites):
    order = [f"rewrite_{i}" for i in range(rewrites)]
    for culprit in order:
        places = sorted(
            (place(name, i) for name in order for i in range(3)), key=lambda p: p.rewrite != culprit
        )
        count = 0

        def run(left_out, culprit=culprit):
            nonlocal count
            count += 1
            return 0.0 if (culprit, 0) in {(p.rewrite, p.layer) for p in left_out} else 1.0

        found = bisect_rewrites(run, places, order, 0.5)
        assert found["rewrite"] == culprit
        assert (found["module_path"], found["runs"]) == ("layers.0", count)
        assert count <= math.log2(rewrites) + 2


def test_a_difference_that_no_rewrite_makes_is_said_to_be_such():
    found = bisect_rewrites(lambda left_out: 1.0, [place("a", 0), place("b", 0)], ["a", "b"], 0.5)
    assert (found["rewrite"], found["passes"]) == ("", {}) and found["runs"] <= 3


# ---- in a running program


def test_the_result_is_the_programs_and_only_the_first_call_is_looked_at(monkeypatch, caplog):
    model = small()
    plain = torch.compile(model, backend="atom", options=EAGER)(X)
    compiled = torch.compile(model, backend="atom", options={**EAGER, "audit": True})
    with caplog.at_level(logging.INFO, "atomc"):
        assert torch.equal(compiled(X), plain)
        report = reports()[-1]
        audit = report.audit
        assert torch.equal(compiled(X), plain)
    assert report.audit is audit and caplog.text.count("atomc audit of Model") == 1
    assert "blame" not in audit and audit["outputs"]["compiled"] < 1e-5
    assert report.cache == "off" or "audit" in report.cache


def test_every_op_that_was_lowered_has_a_place():
    _, audit = audited(own(), IDS, POSITIONS)
    report = reports()[-1]
    assert len(audit["sites"]) == len(report.kernels)
    assert {site["against"] for site in audit["sites"]} == {"original nodes"}
    sites = {(site.rewrite, site.module_path) for site in report.sites}
    assert {
        (s["rewrite"], s["module_path"]) for s in audit["sites"] if s["rewrite"] != "lift"
    } <= sites
    fused = next(site for site in audit["sites"] if site["rewrite"] == "qk_norm_rope")
    assert (
        set(fused["rewrites"]) == {"rms_norm", "rope", "qk_norm_rope"}
        and fused["rewrites"][-1] == "qk_norm_rope"
    )


def test_padding_is_not_audited_and_a_step_of_several_sequences_op_by_op():
    program = compile_model(own(), {**EAGER, "audit": True, "layout": "paged"})
    program.bind([spec.allocate(2, 16, "cpu") for spec in program.specs])
    nowhere = step(T).groups[0]._replace(slots=torch.full((T,), -1))
    empty = step(T)._replace(
        groups=(nowhere,),
        query_start=torch.zeros(2, dtype=torch.int32),
        seq_lens=torch.zeros(1, dtype=torch.int32),
    )
    with torch.no_grad():
        program(empty)
        assert program.report.audit == {}
        program(step(T, sequences=2))
    audit = program.report.audit
    assert "outputs" not in audit and "several sequences" in audit["notes"][0]
    attention = [site for site in audit["sites"] if site["op"] == "paged_attention"]
    assert {site["against"] for site in attention} == {"meaning"} and len(attention) == 2
    assert all(site["sqnr"] is None or site["sqnr"] > 100 for site in audit["sites"])


def test_an_audit_that_fails_leaves_the_program_alone(monkeypatch, caplog):
    def fails(*of_call):
        raise RuntimeError("no memory for it")

    monkeypatch.setattr(recorder, "Audit", fails)
    model = small()
    torch.testing.assert_close(audited(model, X, strict=False)[0], model(X))
    assert "audit failed: RuntimeError: no memory for it" in reports()[-1].notes
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="no memory for it"):
        audited(model, X)


def test_a_difference_that_the_kernels_do_not_make_is_the_glues(monkeypatch):
    from atomc.compiler import driver

    glue = driver._glue

    def wrong(*args):
        made = glue(*args)
        return replace(made, call=lambda *inputs: [x * 1.01 for x in made.call(*inputs)])

    monkeypatch.setattr(driver, "_glue", wrong)
    _, audit = audited(small(), X)
    assert audit["blame"]["rewrite"] == "glue" and "the code of Inductor" in headline(audit)


def test_an_input_that_the_program_writes_is_written_once():
    counts = torch.zeros(4)

    def counting(x):
        counts.add_(x)
        return ops.rms_norm(counts * 2, torch.ones(4), 1e-6)

    audited(counting, torch.ones(4))
    assert counts.tolist() == [1, 1, 1, 1]


@pytest.mark.rotating
def test_in_16_bits_the_bound_is_what_the_original_itself_is_away_from_fp32():
    model = own().to(torch.bfloat16)
    _, audit = audited(model, IDS, POSITIONS)
    outputs = audit["outputs"]
    assert 1e-3 < outputs["original"] < 0.1 and outputs["bound"] == 2 * outputs["original"]
    assert "blame" not in audit and all(
        site["sqnr"] is None or site["sqnr"] > 35 for site in audit["sites"]
    )
    _, strict = audited(model, IDS, POSITIONS, audit_bound=1e-6)
    assert (
        strict["outputs"]["bound"] == 1e-6 and strict["blame"]["rewrite"] == ""
    )  # bf16 itself is further away


# ---- numbers


def test_errors_are_of_the_largest_value_and_in_decibels():
    assert error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])) == Error(0.0, 0.0, None)
    found = error(torch.tensor([1.01, 2.02]), torch.tensor([1.0, 2.0]))
    assert found.max_abs == pytest.approx(0.02, rel=1e-3) and found.relative == pytest.approx(
        0.01, rel=1e-3
    )
    assert found.sqnr == pytest.approx(40, abs=0.01)


def test_what_is_no_number_is_worse_than_any_number():
    nan = error(torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, 1.0]))
    shape = error(torch.ones(2), torch.ones(3))
    assert nan.rank > 100 and shape.rank > nan.rank and math.isfinite(nan.max_abs)
    assert error(torch.tensor([math.inf]), torch.tensor([math.inf])).sqnr is None
    assert error(3, 3).sqnr is None and error(3, 4).max_abs == 1 and error(None, None).sqnr is None


def test_the_text_ranks_as_asked_and_says_what_is_left():
    _, audit = audited(own(), IDS, POSITIONS)
    text = audit_text(audit, rows=3)
    assert f"and {len(audit['sites']) - 3} sites with smaller errors" in text and "SQNR" in text
    largest = [site["max_abs"] for site in ranked_by(audit["sites"], "max")]
    assert largest == sorted(largest, reverse=True)
    assert json.loads(json.dumps(audit)) == audit
    assert f"audit: {len(audit['sites'])} sites; the worst is " in reports()[-1].to_text()


# ---- leaving out


def test_a_rewrite_can_be_left_out_in_some_modules():
    passes = {"add_rms_norm": ["layers.1", "*.2.norm"]}
    report = explain(Model(3).requires_grad_(False), X, options={**EAGER, "passes": passes})
    assert [site.layer for site in report.sites if site.rewrite == "add_rms_norm"] == [0]
    off = "off here (options={'passes': {'add_rms_norm': ['layers.1']}})"
    assert report.why("add_rms_norm", "layers.1") == f"add_rms_norm below layers.1: {off}"
    assert "fired at 1 site in layers 0" in report.why("add_rms_norm") and off in report.why(
        "add_rms_norm"
    )


def test_merges_and_lifts_can_be_left_out_in_some_modules_also_where_layers_are_traced_once():
    model = atomc.prepare(own())
    passes = {
        "merge_qkv": ["model.layers.0"],
        "merge_gate_up": ["*.layers.1.mlp"],
        "lift": ["model.layers.1.self_attn.o_proj"],
    }
    out, _ = audited(model, IDS, POSITIONS, passes=passes)
    report = reports()[-1]
    assert report.matches["merge_qkv"] == 1 and report.matches["merge_gate_up"] == 1
    assert report.matches["linear"] == 2 * 7 - 1 + 1  # all but one, and the head
    assert "off here" in report.why("merge_qkv", "layers.0")
    torch.testing.assert_close(out, own()(IDS, POSITIONS))


def test_lifting_can_be_left_out_as_a_whole():
    report = explain(
        Model(1).requires_grad_(False), X, options={**EAGER, "passes": {"lift": False}}
    )
    assert report.matches["linear"] == 0 and "the pass is off" in report.why("lift")


def test_a_module_in_which_nothing_would_fire_is_told():
    report = explain(
        Model(1).requires_grad_(False), X, options={**EAGER, "passes": {"rope": ["layers.7"]}}
    )
    assert "option passes: 'rope' is turned off in 'layers.7', where it has no site" in report.notes


@pytest.mark.parametrize(
    ("passes", "sentence"),
    [
        ({"rope": []}, "expected True or False for each pass, or a list of the modules"),
        ({"rope": [3]}, "expected True or False for each pass, or a list of the modules"),
        ({"tidy": ["layers.1"]}, "'tidy' can only be turned off as a whole"),
        ({"ropes": ["layers.1"]}, r"no pass 'ropes' \(did you mean 'rope'\?\); passes are"),
    ],
)
def test_what_cannot_be_left_out_is_refused(passes, sentence):
    with pytest.raises(atomc.OptionsError, match=sentence):
        explain(Model(1).requires_grad_(False), X, options={**EAGER, "passes": passes})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"audit": 1}, "audit=1: expected True or False"),
        ({"audit_bound": 0}, "audit_bound=0: expected a number above 0"),
        ({"record": True}, "record=True stores inputs and outputs with a dump"),
    ],
)
def test_wrong_options_are_refused(options, sentence):
    with pytest.raises(atomc.OptionsError, match=sentence):
        Options.of(options)


# ---- files of options


def test_options_survive_the_round_trip_through_a_file(tmp_path, monkeypatch):
    options = {
        "glue": "eager",
        "providers": ["torch"],
        "strict": True,
        "dump": None,
        "passes": {"add_rms_norm": ["model.layers.3.*"], "rope": False},
    }
    file = tmp_path / "options.toml"
    file.write_text(written_options(options))
    assert read_options(file) == {
        name: value for name, value in options.items() if value is not None
    }
    monkeypatch.setenv("ATOMC_OPTIONS", str(file))
    chosen = Options.of({"rounding": "hf"})
    assert (chosen.glue, chosen.rounding, chosen.passes["rope"]) == ("eager", "hf", False)


@pytest.mark.parametrize(
    ("text", "sentence"), [("[options", "Expected ']'"), ("a = 1", "no table \\[options\\], only")]
)
def test_a_file_without_options_is_told(tmp_path, text, sentence):
    (tmp_path / "options.toml").write_text(text)
    with pytest.raises(atomc.OptionsError, match=f"options.toml: .*{sentence}"):
        read_options(tmp_path / "options.toml")


# ---- the command


@pytest.mark.rotating
def test_the_command_audits_the_demo(capsys):
    assert main(["audit", "--json", "-p", "It was a truth", "--tokens", "8"]) == 0
    found = json.loads(capsys.readouterr().out)
    (graph,) = found["graphs"]
    assert (
        graph["model"] == "Qwen3ForCausalLM"
        and len(graph["sites"]) == 30
        and graph["outputs"]["compiled"] < 0.05
    )
    assert found["eager"] < 0.05


@pytest.mark.rotating
def test_the_command_audits_the_runtime(capsys):
    assert main(["audit", "--runtime", "--rows", "2", "--tokens", "8"]) == 0
    out = capsys.readouterr().out
    assert "kv_write" in out and "the uncompiled model differs from the compiled one by" in out


FAULTY_MODEL = """
import torch
from atomc import ops
from test_audit import X, small

model = small()
wrong = model.layers[1].norm.weight.data_ptr()

@ops.add_rms_norm.kernel("faulty")
def add_rms_norm(x, residual, weight, eps, style="after"):
    normed, total = ops.add_rms_norm.reference(x, residual, weight, eps, style)
    return (normed * 1.01 if weight.data_ptr() == wrong else normed), total

def build():
    return model, (X,)
"""


def test_the_command_writes_options_that_avoid_the_fault(tmp_path, monkeypatch, capsys, wrong_in):
    (tmp_path / "faulty_model.py").write_text(FAULTY_MODEL)
    monkeypatch.chdir(tmp_path)
    assert (
        main(["audit", "faulty_model:build", "--glue", "eager", "--write-options", "without.toml"])
        == 1
    )
    out = capsys.readouterr().out
    assert "The cause is add_rms_norm in layers.1.norm" in out and "see without.toml" in out
    assert read_options(tmp_path / "without.toml")["passes"] == {"add_rms_norm": ["layers.1.norm"]}
    assert (
        main(
            [
                "audit",
                "faulty_model:build",
                "--options",
                "without.toml",
                "--write-options",
                "none.toml",
            ]
        )
        == 0
    )
    assert "no options written: the results are within the bound" in capsys.readouterr().out
    assert not (tmp_path / "none.toml").exists()
    sys.modules.pop("faulty_model")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--record"], "--record needs --dump DIR"),
        (["--tokens", "0"], "--tokens 0: expected at least 1"),
        (["test_report:nothing"], "test_report has no function 'nothing'"),
        (["test_report:Model", "-p", "x"], "need a checkpoint"),
        (["--options", "none.toml"], "--options: options in none.toml: No such file"),
        (["--write-options", "none/x.toml"], "--write-options none/x.toml: none is not a dir"),
    ],
)
def test_what_the_command_cannot_do_is_one_line_and_exit_code_2(arguments, sentence, capsys):
    assert main(["audit", *arguments]) == 2
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1


@pytest.mark.rotating
def test_a_model_without_inputs_gets_token_ids(capsys):
    assert main(["audit", "test_audit:own", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["graphs"][0]["sites"]) > 15


WRONG_ATTENTION = """
from atomc import ops
from test_audit import own

@ops.attention.kernel("faulty")
def attention(q, k, v, *rest, **more):
    return ops.attention.reference(q, k, v, *rest, **more) * 1.01
"""


@pytest.mark.rotating
def test_what_the_model_calls_itself_cannot_be_left_out_and_that_is_said(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(vars(ops.attention), "kernels", list(ops.attention.kernels))
    (tmp_path / "attending.py").write_text(WRONG_ATTENTION)
    monkeypatch.chdir(tmp_path)
    assert main(["audit", "attending:own", "--write-options", "without.toml"]) == 1
    out = capsys.readouterr().out
    assert (
        "The cause is lift" in out
        and "no option disables lift there; providers = [...] selects other kernels" in out
    )
    assert not (tmp_path / "without.toml").exists()
    sys.modules.pop("attending")
