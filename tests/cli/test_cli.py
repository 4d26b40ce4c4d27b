"""The command line, called in this process: its output, and one line with exit code 2 for user
errors.
"""

import contextlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from tiny_lora import write_adapter

from atomc import cli
from atomc.cli import explain, generate, main
from atomc.demo import PATH
from atomc.loading import loader
from atomc.platform import Platform

pytestmark = [pytest.mark.xdist_group("cli"), pytest.mark.usefixtures("compiled_once")]


def run(*argv):
    """The output of a successful command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([str(part) for part in argv]) == 0
    return out.getvalue()


@pytest.fixture
def wrong(capsys):
    """The one line that a failing command prints."""

    def line(*argv):
        with contextlib.suppress(SystemExit):
            assert main([str(part) for part in argv]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        return line

    return line


@pytest.fixture(scope="module")
def generated():
    pytest.importorskip("tokenizers")
    return run("generate", "--max-tokens", 8)


@pytest.fixture(scope="module")
def explained():
    return run("explain")


def figures(table):
    """The sites by rewrite, of the first table."""
    return {
        name: int(sites)
        for name, sites in re.findall(r"^(\w+) +(\d+) ", table.partition("\nop ")[0], re.MULTILINE)
    }


def test_generate_writes_the_prompt_and_goes_on(generated):
    assert generated.startswith(generate.DEMO_PROMPT + ', "I have no one to tell')


def test_generate_says_how_fast_it_was_and_what_the_compiler_did(generated):
    assert re.search(r"^\d+\.\d tokens/s$", generated, re.MULTILINE)
    assert re.search(
        r"^seconds to start: load \d.*, compile \d.*, warm up \d", generated, re.MULTILINE
    )
    rewrites, runs, rest = generated.splitlines()[-3:]
    assert rewrites.startswith("3 layers: ") and rewrites.endswith(" fired")
    expected = {"13 rms_norm", "3 silu_and_mul", "6 add_rms_norm", "3 qk_norm_rope_kv_write"}
    assert expected <= set(re.split(", |: | fired", rewrites))
    assert "3 paged_attention" in runs and "glue: eager" in rest


def test_the_demo_writes_the_same_text_each_time_and_another_with_another_seed(generated):
    quiet = ("generate", "--quiet", "--max-tokens", 8)
    again = run(*quiet)
    assert again == generated.partition("\n")[0] + "\n"
    assert run(*quiet, "--seed", 11) != again


def test_generate_writes_what_the_model_with_an_adapter_writes(generated, tmp_path):
    adapter = write_adapter(tmp_path / "a", {"model.layers.0.mlp.down_proj": (256, 768)})
    text = run("generate", "--quiet", "--max-tokens", 8, "--lora", adapter)
    assert text.startswith(generate.DEMO_PROMPT)
    assert text != generated.partition("\n")[0] + "\n"


def test_several_prompts_are_each_continued():
    pytest.importorskip("tokenizers")
    out = run(
        "generate", "-p", "He said", "-p", "She said", "--max-tokens", 4, "--temperature", 0, "-q"
    )
    first, second = out.strip().split("\n\n")
    assert first.startswith("He said") and second.startswith("She said")
    assert len(first) > 10 and len(second) > 11


def sampling(folder, *flags):
    arguments = cli._parser().parse_args(["generate", str(folder), "-p", "x", *flags])
    params = generate._sampling_params(arguments, folder)
    return params.temperature, params.top_p, params.top_k


def test_sampling_follows_the_model_unless_a_flag_says_otherwise(tmp_path):
    assert sampling(PATH) == (0.8, 0.95, 0)
    assert sampling(PATH, "--temperature", "0.5", "--top-k", "7") == (0.5, 0.95, 7)
    assert sampling(tmp_path) == (0.0, 1.0, 0)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "do_sample": false}')
    assert sampling(tmp_path) == (0.0, 1.0, 0)


def test_explain_counts_the_rewrites_of_the_demo_model(explained):
    found = figures(explained)
    expected = {
        "rms_norm": 13,
        "add_rms_norm": 6,
        "silu_and_mul": 3,
        "qk_norm_rope": 3,
        "rope": 6,
        "linear": 22,
    }
    assert {name: found[name] for name in expected} == expected


def test_explain_says_what_runs_each_op_and_what_did_not_fire(explained):
    assert re.search(r"^op +nodes +tokens +runs as$", explained, re.MULTILINE)
    assert re.search(r"^rope_partial +taken by rope", explained, re.MULTILINE)
    lacking = explained.partition("cannot apply, the graph lacks their ops: ")[2]
    assert "gelu_and_mul" in lacking.partition("\n\n")[0]
    assert re.search(r"^seconds: .*passes \d", explained, re.MULTILINE)


def test_explain_of_the_runtime_shows_the_cache():
    out = run("explain", "--runtime", "--layers", 1)
    assert figures(out)["qk_norm_rope_kv_write"] == 1
    assert re.search(r"^state\n  model\.layers\.\*\.self_attn: kv \[4, 64\]", out, re.MULTILINE)


def test_explain_knows_machines_that_are_not_here():
    assert "not torch for" not in run(
        "explain", "--layers", 1, "--platform", "gfx950", "--why", "rms_norm"
    )


def test_why_answers_for_one_module():
    why = ("explain", "--layers", 1, "--why")
    assert run(*why, "rms_norm", "--module-path", "layers.0.self_attn").startswith(
        "rms_norm below layers.0.self_attn: fired at 2 sites in layers 0"
    )
    assert run(*why, "gelu_and_mul").startswith("gelu_and_mul: no anchor: the graph has no gelu")


@pytest.mark.rotating
def test_why_of_what_only_the_runtime_has_says_so(wrong):
    why = ("explain", "--layers", 1, "--why")
    assert "exists only in the runtime" in run(*why, "qk_norm_rope_kv_write")
    assert "it may be one in the runtime" in wrong(*why, "paged_attention")
    assert "an op that no rewrite makes, 1 nodes; runs as" in run(
        *why, "paged_attention", "--runtime"
    )


@pytest.mark.parametrize(
    ("arguments", "suggested"),
    [
        (("exlpain",), "explain"),
        (("explain", "--dtype", "flaot16"), "float16"),
        (("explain", "--options", "roundng=hf"), "rounding"),
        (("explain", "--options", 'passes={"add_rmsnorm": false}'), "add_rms_norm"),
        (("explain", "--options", 'providers=["tritn"]'), "triton"),
        (("explain", "--options", 'expect={"add_rmsnorm": 1}'), "add_rms_norm"),
        (("explain", "--platform", "gfx905"), "gfx950"),
        (("explain", "--why", "ad_rms_norm"), "add_rms_norm"),
    ],
)
def test_a_misspelled_name_gets_the_most_similar_one(arguments, suggested, wrong):
    layers = ("--layers", 1) if arguments[0] == "explain" else ()
    assert f"(did you mean {suggested!r}?)" in wrong(*arguments, *layers)


def test_explain_takes_a_file_and_refuses_what_only_a_config_has(tmp_path, wrong):
    file = tmp_path / "mygpt.py"
    file.write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(8, 8), (torch.ones(1, 8),)"
    )
    assert run("explain", f"{file}:build", "--why", "linear").startswith("linear: fired at 1 site")
    for flag in (("--layers", 1), ("--dtype", "float32")):
        assert f"{flag[0]} needs a config.json" in wrong("explain", f"{file}:build", *flag)
    assert "there is no file" in wrong("explain", f"{tmp_path}/other.py:build")


def test_a_library_that_is_missing_is_named_with_its_extra():
    for module, extra in (
        ("tokenizers", "hf"),
        ("PIL", "images"),
        ("zmq", "serve"),
        ("starlette", "serve"),
    ):
        error = cli._user_error(ModuleNotFoundError(f"No module named {module!r}", name=module))
        assert str(error) == f"this needs the library {module}: pip install 'atomc[{extra}]'"


def test_a_library_that_is_missing_in_a_checkout_on_the_path_stays_its_own_error(monkeypatch):
    def requires(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    missing = ModuleNotFoundError("No module named 'zmq'", name="zmq")
    assert cli._user_error(missing) is missing


def test_a_completion_script_completes_commands_and_flags():
    pytest.importorskip("shtab")
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit, match="0"):
        main(["--print-completion", "bash"])
    script = out.getvalue()
    assert "place-experts" in script and "--max-model-len" in script


def test_explain_as_json_is_a_list_of_reports():
    (report,) = json.loads(run("explain", "--layers", 1, "--json", "--dtype", "float32"))
    assert report["model"] == "Qwen3ForCausalLM" and report["matches"]["add_rms_norm"] == 2


def test_explain_dumps_runnable_files(tmp_path):
    run("explain", "--layers", 1, "--dump", tmp_path)
    names = sorted(file.name for file in tmp_path.glob("graph_*/*.py"))
    assert names[0] == "00_captured.py" and names[-1].endswith("_lower.py")


MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(8)

    def forward(self, x, scale=1.0):
        x = self.norm(x)
        print("in the model")
        return self.norm(x * scale)

def with_inputs():
    return Net(), (torch.ones(2, 8),), {"scale": 2.0}

def alone():
    return Net()

def number():
    return 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Changes to a directory with a module of the user."""
    (tmp_path / "users_net.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("users_net", None)


def test_explain_a_model_of_the_users_shows_each_graph_and_the_break(here):
    out = run("explain", "users_net:with_inputs")
    assert "graph 0: Net: compiled" in out
    assert "graph 1: RMSNorm, behind users_net.py:12: compiled" in out
    assert re.search(r"graph break at users_net\.py:12 .*print", out)
    assert "in the model" not in out.splitlines()


@pytest.mark.parametrize(
    "argv, part",
    [
        (["generate", "/nowhere", "-p", "x"], "/nowhere is neither a directory nor"),
        (["generate", PATH.parent], "this model needs a prompt, such as -p"),
        (
            ["generate", "--temperature", "-1"],
            "temperature is -1.0, it must be 0 (greedy) or at least",
        ),
        (["bench", "latency", "--device", "gpu"], "device is 'gpu', expected cpu, cuda or one GPU"),
        (["bench", "latency", "--device", "cuda:99"], "device is 'cuda:99', but torch finds "),
        (["generate", "--glue", "best"], "argument --glue: invalid choice: 'best'"),
        (["generate", "--max-model-len", "100000"], "2048"),
        (
            ["generate", "--lora", "/nowhere"],
            "LoRA adapter 'nowhere' in /nowhere: its folder has no adapter_config",
        ),
        (["explain", "/nowhere"], "/nowhere is neither a directory nor"),
        (["explain", __file__], "test_cli.py:FUNCTION` takes a function that returns a module"),
        (["serve", __file__], "test_cli.py is a Python file, expected a directory or a name on"),
        (["explain", "--layers", "4"], "--layers 4: the model has 3"),
        (
            ["explain", "--layers", "1", "--why", "nothing"],
            "no rewrite 'nothing'; rewrites are add_layer_norm, add_rms",
        ),
        (
            ["explain", "--why", "nothing"],
            "no rewrite 'nothing'; rewrites are add_layer_norm, add_rms",
        ),
        (["explain", "--html", "/nowhere/a.html"], "--html /nowhere/a.html: /nowhere is not a dir"),
        (["explain", "--beside", "/nowhere"], "/nowhere is neither a directory nor"),
        (["explain", "--json", "--html", "a.html"], "--json prints the report and --html writes"),
        (["explain", "--check", "/nowhere"], "--check /nowhere: No such file or directory"),
        (["audit", "--prompts", "/nowhere"], "--prompts /nowhere: No such file or directory"),
        (["place-experts", "/nowhere", "--ranks", "2"], "LOAD /nowhere: No such file or directory"),
        (["run-batch", "-i", "/nowhere", "-o", "x"], "-i /nowhere: No such file or directory"),
        (["bench", "serve", "--dataset", "/nowhere"], "--dataset /nowhere: No such file or dir"),
        (["bench", "serve", "--extra", "foo"], "--extra: 'foo': expected NAME=VALUE"),
        (["bench", "serve", "--plot", "x.foo"], "--plot: 'x.foo': expected a file with .png, .svg"),
        (["generate", "/nowhere"], "/nowhere is neither a directory nor"),
        (["explain", "--module-path", "layers.0"], "--module-path needs --why: set both"),
        (["explain", "--platform", "abacus"], "unknown platform 'abacus'; known are gfx942"),
        (
            ["explain", "no_such_module:build"],
            "no_such_module:build: module 'no_such_module' is not in",
        ),
        (
            ["explain", "users_net:nothing"],
            "users_net has no function 'nothing'; it has Net, with_inputs, alone, number",
        ),
        (
            ["explain", "users_net:number"],
            "users_net:number returned int, expected a module, (module, args)",
        ),
        (
            ["explain", "users_net:alone", "--quantization", "fp8"],
            "quantize(model, 'fp8') in users_net:alone",
        ),
        (
            ["explain", "--dtype", "fp8", "--quantization", "int8"],
            "--dtype fp8 and --quantization int8 differ",
        ),
        (
            ["generate", "--quantization", "fp3"],
            "argument --quantization: invalid choice: 'fp3' (did you mean 'fp8'?); choose from fp8,",
        ),
        (["explain", "users_net:alone"], "give the inputs of Net(x, scale)"),
        (["--bogus"], "unrecognized arguments: --bogus; see atomc --help"),
        (["run-batch", "-i", "a", "-o", "b", "--port", "3"], "arguments: --port; see atomc run-"),
        (["explain", "--fast"], "unrecognized arguments: --fast"),
        (
            ["fly"],
            "invalid choice: 'fly'; choose from generate, explain, audit, diff, serve, run-batch, "
            "place-experts, bench, doctor; ",
        ),
        ([], "the following arguments are required"),
    ],
)
def test_a_users_mistake_is_one_line(argv, part, here, wrong):
    line = wrong(*argv)
    assert line.startswith("atomc: ") and part in line, line


@pytest.mark.parametrize("command", ["generate", "audit"])
def test_a_gpu_that_is_not_there_is_refused_before_the_model_is_loaded(command, monkeypatch, wrong):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(loader, "load", None)
    line = wrong(command, "--device", "cuda")
    assert line == ("atomc: device is 'cuda', but torch finds no GPU: leave it out, or use 'cpu'")


@pytest.mark.parametrize(
    ("flag", "value", "part"),
    [
        ("--why", "a", "--why: no rewrite 'a'; rewrites are "),
        ("--html", "/nowhere/a", "--html /nowhere/a: /nowhere is not a directory"),
        ("--beside", "/nowhere", "/nowhere is neither a directory nor a name on the hub"),
    ],
)
def test_what_explain_cannot_do_is_said_before_it_compiles(flag, value, part, monkeypatch, wrong):
    monkeypatch.setattr(explain, "_compile", None)
    assert part in wrong("explain", flag, value)


def test_a_folder_without_a_tokenizer_is_refused_before_it_is_loaded(tmp_path, monkeypatch, wrong):
    monkeypatch.setattr(loader, "load", None)
    shutil.copy(PATH / "config.json", tmp_path)
    assert f"{tmp_path} has no tokenizer.json, which" in wrong("generate", tmp_path, "-p", "a")


def test_why_says_that_no_module_has_the_path():
    out = run("explain", "--layers", 1, "--why", "rope", "--module-path", "layers.99")
    assert out == "rope below layers.99: no op of this graph is in a module 'layers.99'\n"


def test_a_missing_extra_says_which(monkeypatch, wrong):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "pip install 'atomc[hf]'" in wrong("generate", "--max-tokens", 2)


def test_a_folder_without_weights_can_be_explained(tmp_path):
    shutil.copy(PATH / "config.json", tmp_path)
    assert figures(run("explain", tmp_path, "--layers", 1))["add_rms_norm"] == 2


def test_doctor_names_machine_libraries_and_kernels():
    out = run("doctor")
    assert Platform.detect().name in out
    assert re.search(r"^torch +\S+ +\d+$", out, re.MULTILINE) and re.search(
        r"^transformers ", out, re.MULTILINE
    )


@pytest.mark.parametrize("command", ["generate", "explain", "serve", "doctor", "place-experts"])
def test_help_shows_an_example(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert f"examples:\n  atomc {command}" in capsys.readouterr().out


def test_help_and_version_need_not_import_torch():
    code = (
        "import sys, atomc.cli\ntry: atomc.cli.main(['--version'])\nexcept SystemExit: "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"atomc \d+\.\d+\.\d+\nFalse\n", done.stdout)


@pytest.mark.rotating
def test_a_reader_that_stops_reading_is_no_error():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "atomc", "doctor"], stdout=write, stderr=subprocess.PIPE, text=True
    )
    assert done.stderr == ""
