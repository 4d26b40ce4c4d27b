"""What a user relies on: counts that must hold, and baselines that must not change."""

import json
import logging
import re
import sys

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import atomc
from atomc.cli import main
from atomc.program import compile_model
from atomc.report import contract
from atomc.report.report import Report
from atomc.stock.adapter import wrap_stock

pytestmark = pytest.mark.xdist_group("contract")
LAYERS = 3
IDS = torch.zeros(1, 9, dtype=torch.int64)
KEPT = {
    "add_rms_norm": "2*layers",
    "rope": ">= layers",
    "silu_and_mul": LAYERS,
    "rms_norm": "2*layers + 1",
}


class Rescaled(nn.Module):
    """A norm with the unbiased variance, which is not RMSNorm."""

    def __init__(self, norm):
        super().__init__()
        self.weight = norm.weight

    def forward(self, x):
        variance = x.pow(2).sum(-1, keepdim=True) / (x.shape[-1] - 1)
        return self.weight * (x * torch.rsqrt(variance + 1e-6))


def llama(edited=None):
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    if edited is not None:
        layer = model.model.layers[edited]
        layer.post_attention_layernorm = Rescaled(layer.post_attention_layernorm)
    return model


def explain(model, glue="eager", **options):
    return atomc.explain(model, options={"strict": True, "glue": glue, **options})


def test_a_contract_that_is_kept_says_nothing():
    report = explain(llama(), expect=KEPT)
    assert not [note for note in report.notes if "contract" in note]


@pytest.mark.rotating
def test_an_edit_that_breaks_a_fusion_in_one_layer_is_named_with_layer_rewrite_and_reason():
    with pytest.raises(atomc.ContractError) as caught:
        explain(llama(edited=1), expect=KEPT)
    text = str(caught.value)
    assert "add_rms_norm fired 5 times in 3 layers, expected 6 (2*layers); not in layers 1" in text
    assert "rms_norm in model.layers.1.post_attention_layernorm (test_contract.py:" in text
    assert "expected mean(" in text and "found div(" in text


@pytest.mark.rotating
def test_the_backend_raises_it_out_of_the_users_call():
    model = torch.compile(
        llama(edited=2), backend="atom", options={"expect": KEPT, "glue": "eager"}
    )
    with torch.inference_mode(), pytest.raises(atomc.ContractError, match="not in layers 2"):
        model(IDS, use_cache=False)


@pytest.mark.rotating
def test_in_mode_warn_the_program_goes_on(caplog):
    options = {"expect": KEPT, "expect_mode": "warn", "glue": "eager"}
    model = llama(edited=0)
    with torch.inference_mode(), caplog.at_level(logging.WARNING, "atomc"):
        got = torch.compile(model, backend="atom", options=options)(IDS, use_cache=False).logits
        torch.testing.assert_close(got, model(IDS, use_cache=False).logits)
    assert "breaks its contract" in caplog.text and "not in layers 0" in caplog.text


@pytest.mark.rotating
def test_the_program_of_the_runtime_is_held_to_it_too():
    model = wrap_stock(llama())
    program = compile_model(
        model, options={"strict": True, "glue": "eager", "expect": {"rope_kv_write": "layers"}}
    )
    assert program.report.matches["rope_kv_write"] == LAYERS
    with pytest.raises(
        atomc.ContractError, match="rope_kv_write fired 3 times in 3 layers, expected 9"
    ):
        compile_model(
            wrap_stock(llama()), options={"glue": "eager", "expect": {"rope_kv_write": "3*layers"}}
        )


@pytest.mark.rotating
def test_more_than_expected_breaks_it_unless_it_says_at_least():
    with pytest.raises(
        atomc.ContractError, match=r"rope fired 6 times in 3 layers, expected 3 \(layers\)"
    ):
        explain(llama(), expect={"rope": "layers"})
    explain(llama(), expect={"rope": ">= layers"})


@pytest.mark.rotating
def test_a_pass_that_is_off_is_the_reason():
    with pytest.raises(
        atomc.ContractError, match=r"none in layers 0-2\. silu_and_mul: the pass is off"
    ):
        explain(llama(), expect={"silu_and_mul": "layers"}, passes={"silu_and_mul": False})


def test_a_graph_that_goes_to_inductor_keeps_no_contract():
    model = llama().requires_grad_(True)
    with pytest.raises(atomc.ContractError, match="not treated: gradients are enabled"):
        torch.compile(model, backend="atom", options={"expect": KEPT})(IDS, use_cache=False)


def gated(x):
    return torch.nn.functional.silu(x[:, :8]) * x[:, 8:]


def test_a_graph_without_layers_is_held_to_it_too():
    x = torch.randn(4, 16)
    report = explain_call(gated, x, expect={"silu_and_mul": 1, "rope": "2*layers"})
    assert report.treated and report.num_layers == 0
    for count in (2, "layers + 2", "layers"):
        with pytest.raises(atomc.ContractError, match="silu_and_mul fired 1 times in no layers"):
            explain_call(gated, x, expect={"silu_and_mul": count})
    with pytest.raises(atomc.OptionsError, match="no rewrite 'silu_and_mull'"):
        explain_call(gated, x, expect={"silu_and_mull": 0})


def explain_call(function, *inputs, **options):
    return atomc.explain(function, *inputs, options={"strict": True, "glue": "eager", **options})


def test_a_part_between_graph_breaks_promises_nothing_without_layers():
    def broken(x):
        y = gated(x)
        torch._dynamo.graph_break()
        return y + 1

    options = {"strict": True, "glue": "eager", "expect": {"silu_and_mul": 2}}
    x = torch.randn(4, 16)
    with torch.inference_mode():
        got = torch.compile(broken, backend="atom", options=options)(x)
    torch.testing.assert_close(got, gated(x) + 1)


@pytest.mark.parametrize(
    "count", ["2*layer", "layers**2", "1.5", "", "print(1)", True, "layers //0"]
)
def test_what_is_no_count_is_refused_before_anything_compiles(count):
    with pytest.raises(atomc.OptionsError, match="option expect: the count"):
        torch.compile(lambda x: x + 1, backend="atom", options={"expect": {"rope": count}})(
            torch.zeros(3)
        )


@pytest.mark.rotating
def test_an_unknown_rewrite_is_refused_with_those_that_exist():
    with pytest.raises(
        atomc.OptionsError,
        match=r"no rewrite 'add_rmsnorm' \(did you mean 'add_rms_norm'\?\); rewrites are .*, add_rms_norm, ",
    ):
        explain(llama(), expect={"add_rmsnorm": 1})


def test_formulas_are_numbers_and_layers():
    assert contract.expected("x", "2*layers + 1", 28) == (57, False)
    assert contract.expected("x", ">= layers//2", 28) == (14, True)
    assert contract.expected("x", 7, 28) == (7, False)


@pytest.fixture(scope="module")
def report():
    """Of the model as it is, made once."""
    return explain(llama())


@pytest.mark.rotating
def test_a_baseline_survives_the_round_trip_through_json(report):
    saved = Report.of(json.loads(report.to_json()))
    assert contract.differences([saved], [explain(llama())]) == []


@pytest.mark.rotating
def test_a_baseline_tells_what_changed_and_why(report):
    found = contract.differences([report], [explain(llama(edited=1))])
    fired = next(line for line in found if line.startswith("add_rms_norm fired"))
    assert "expected 6; not in layers 1. Near miss: rms_norm in model.layers.1" in fired
    assert any(
        re.fullmatch("add_rms_norm for .* tokens: torch x6 became torch x5", line) for line in found
    )


def test_a_baseline_tells_a_number_of_graphs_that_changed(report):
    assert contract.differences([report, report], [report])[0] == "1 graphs instead of 2"


@pytest.mark.rotating
def test_the_command_saves_a_baseline_and_exits_with_1_when_it_no_longer_holds(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("ATOMC_GLUE", "eager")
    base = str(tmp_path / "base.json")
    assert main(["explain", "--save", base]) == 0
    assert main(["explain", "--check", base]) == 0
    assert "as saved" in capsys.readouterr().out
    saved = json.loads((tmp_path / "base.json").read_text())
    saved[0]["matches"]["add_rms_norm"] += 1
    (tmp_path / "base.json").write_text(json.dumps(saved))
    assert main(["explain", "--check", base]) == 1
    assert "add_rms_norm fired" in capsys.readouterr().out


def test_a_baseline_that_is_not_there_is_one_line_and_exit_code_2(tmp_path, capsys):
    assert main(["explain", "--check", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


PROGRAM = ["explain", "edited_program:build"]
EDITED = """
import os
import torch
from test_contract import IDS, llama

def build():
    os.environ.setdefault("ATOMC_STRICT", "1")
    edited = int(os.environ["EDITED"]) if "EDITED" in os.environ else None
    model = llama(edited)
    if "BREAK" in os.environ:
        forward = model.model.norm.forward
        def broken(x):
            torch._dynamo.graph_break()
            return forward(x)
        model.model.norm.forward = broken
    return model, (IDS,), {"use_cache": False}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds a program whose model is edited by setting EDITED, and broken in two by setting BREAK;
    and its baseline.
    """
    folder = tmp_path_factory.mktemp("ci")
    (folder / "edited_program.py").write_text(EDITED)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setenv("ATOMC_GLUE", "eager")
        assert main([*PROGRAM, "--save", "base.json"]) == 0
    yield folder
    sys.modules.pop("edited_program")


@pytest.fixture
def program(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ATOMC_GLUE", "eager")
    return monkeypatch


@pytest.mark.rotating
def test_in_ci_an_edit_of_one_layer_fails_the_check_with_rewrite_layer_and_reason(program, capsys):
    program.setenv("EDITED", "1")
    assert main([*PROGRAM, "--check", "base.json"]) == 1
    out = capsys.readouterr().out
    assert "add_rms_norm fired 5 times in 3 layers, expected 6; not in layers 1. " in out
    assert (
        "Near miss: rms_norm in model.layers.1.post_attention_layernorm (test_contract.py:" in out
    )
    assert "expected mean(" in out and "found div(" in out


@pytest.mark.rotating
def test_in_ci_a_graph_break_fails_the_check_with_its_place(program, capsys):
    program.setenv("BREAK", "1")
    assert main([*PROGRAM, "--check", "base.json"]) == 1
    first = next(
        line for line in capsys.readouterr().out.splitlines() if "graphs instead of" in line
    )
    assert re.match(
        r"\d graphs instead of 1 \(breaks at edited_program.py:\d+: .*graph_break", first
    )


@pytest.mark.rotating
def test_a_rewrite_that_is_left_out_in_one_module_breaks_it_with_that_reason():
    off = {"add_rms_norm": ["model.layers.2.input_layernorm"]}
    with pytest.raises(
        atomc.ContractError, match="add_rms_norm fired 5 times in 3 layers, expected 6"
    ) as caught:
        explain(llama(), expect=KEPT, passes=off)
    assert "not in layers 2" in str(caught.value) and "off here (options={'passes': " in str(
        caught.value
    )


@pytest.mark.rotating
def test_other_kernels_break_a_baseline(report):
    found = contract.differences([report], [explain(llama(), glue="inductor")])
    assert any(
        re.fullmatch("silu_and_mul for .* tokens: torch x3 became inline x3", line)
        for line in found
    )


def test_what_is_no_baseline_is_refused(tmp_path, capsys):
    for text in ("{", "[1]", '[{"version": 0}]'):
        (tmp_path / "base.json").write_text(text)
        assert main(["explain", "--check", str(tmp_path / "base.json")]) == 2
        assert f"--check {tmp_path / 'base.json'}: " in capsys.readouterr().err
