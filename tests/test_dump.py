"""Dumps: every file runs on its own, all files of a graph compute the same, and the same compile writes the same bytes."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from atomc import models, ops
from atomc.inspection import explain
from atomc.op import Kernel
from atomc.program import compile_model
from atomc.replay import make

WIDTHS = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              vocab_size=256, head_dim=16, max_position_embeddings=64)  # fmt: skip


def own():
    config = {**WIDTHS, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
              "rms_norm_eps": 1e-6}  # fmt: skip
    return models.build(config, device="meta").eval().requires_grad_(False)


def stock():
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**WIDTHS)).eval().requires_grad_(False)


def dump_stock(folder):
    explain(stock(), options={"dump": str(folder)})


def dump_own(folder):
    explain(own(), options={"dump": str(folder)}, dynamic=True)


def dump_runtime(folder):
    compile_model(own(), options={"dump": str(folder), "glue": "eager"})


def last_graph(folder):
    """The files of the graph dumped last, in order; earlier ones may be attempts that were given up."""
    return sorted(max(folder.glob("graph_*"), key=lambda graph: int(graph.name.removeprefix("graph_"))).iterdir())


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """The files of a graph, in order; each is dumped once."""
    made = {}

    def files(dump):
        if dump not in made:
            made[dump] = tmp_path_factory.mktemp(dump.__name__)
            dump(made[dump])
        return last_graph(made[dump])

    return files


def outputs(file):
    """What a dumped file computes."""
    found = runpy.run_path(str(file))
    with torch.inference_mode():
        return found["forward"](**make(found["INPUTS"]))


@pytest.mark.parametrize("dump", [dump_stock, dump_own, dump_runtime])
def test_every_stage_of_a_graph_computes_the_same(dump, dumped):
    first, *later = dumped(dump)
    expected = outputs(first)
    assert expected[0].std() > 0.1
    for file in later:
        torch.testing.assert_close(outputs(file), expected, msg=lambda text, file=file: f"{file.name}: {text}")


def test_stages_are_numbered_and_named_by_the_pass(dumped):
    numbers, names = zip(*(file.stem.split("_", 1) for file in dumped(dump_runtime)), strict=True)
    assert numbers == tuple(f"{i:02}" for i in range(len(names)))
    assert names[0] == "captured" and names[-1] == "lower"
    rewrites = [name for name in names if name in ("rms_norm", "add_rms_norm", "bind_state", "qk_norm_rope_kv_write")]
    assert rewrites == ["rms_norm", "add_rms_norm", "bind_state", "qk_norm_rope_kv_write"]


RUN_ALL = """
import runpy, sys
for file in sys.argv[1:]:
    runpy.run_path(file, run_name="__main__")
"""


@pytest.mark.parametrize("dump", [dump_stock, dump_own, dump_runtime])
def test_every_file_runs_as_a_program(dump, dumped, tmp_path):
    files = dumped(dump)
    done = subprocess.run([sys.executable, "-c", RUN_ALL, *files], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    checksums = [float(number) for number in re.findall("checksum: (.*)", done.stdout)]
    assert len(checksums) == len(files) and max(checksums) == pytest.approx(min(checksums), rel=1e-5)


def test_a_file_runs_alone(dumped, tmp_path):
    lowered = dumped(dump_own)[-1]
    done = subprocess.run([sys.executable, "-I", lowered], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"output 0: float32\[12, 256\], mean magnitude \S+\nchecksum: \S+\n", done.stdout)


DUMP_AGAIN = """
import sys
sys.path.insert(0, sys.argv[1])
import test_dump
test_dump.dump_runtime(sys.argv[2])
"""


def test_another_process_writes_the_same_bytes(dumped, tmp_path):
    arguments = [str(Path(__file__).parent), str(tmp_path)]
    subprocess.run([sys.executable, "-c", DUMP_AGAIN, *arguments], check=True, env={"PYTHONHASHSEED": "7"})
    written = [[(file.name, file.read_bytes()) for file in files] for files in (dumped(dump_runtime), last_graph(tmp_path))]
    assert written[0] == written[1]


@pytest.mark.parametrize("dump", [dump_stock, dump_own, dump_runtime])
def test_no_path_of_the_machine_is_in_a_dump(dump, dumped):
    for file in dumped(dump):
        assert re.findall(r"""(?:^|[\s"'(])/\w[^\s"']*""", file.read_text()) == []


def test_each_line_says_dtype_shape_and_module(dumped):
    recognised = next(file for file in dumped(dump_own) if file.stem.endswith("rms_norm"))
    lines = recognised.read_text().splitlines()
    first = next(line for line in lines if "torch.ops.atom.rms_norm" in line)
    assert re.search(r"  # float32\[s\d+, 64\]  model\.layers\.0\.input_layernorm$", first), first
    body = [line for line in lines if line.startswith("    ") and " = " in line]
    assert len(body) > 40 and [line for line in body if "  # " not in line] == []


def test_inputs_are_named_as_the_user_knows_them(dumped):
    text = dumped(dump_runtime)[0].read_text()
    assert re.search(r"^    .*  # float32\[64\]  \S*layers\.1\.input_layernorm\.weight$", text, re.MULTILINE)
    assert re.search(r"^    .*  # int64\[u\d+\]  input_ids$", text, re.MULTILINE)


def test_packed_weights_are_made_of_their_parts(dumped):
    text = dumped(dump_runtime)[-1].read_text()
    assert re.search(r'^    "packed_0": Packed\(\(\'\w+\', \'\w+\', \'\w+\'\)\),  # float32\[128, 64\]', text, re.MULTILINE)


def test_a_lowered_file_calls_the_kernels_by_name(dumped):
    text = dumped(dump_own)[-1].read_text()
    assert "import atomc.kernels.torch.attention\n" in text
    assert "atomc.kernels.torch.attention.attention(" in text


def test_token_ids_stay_below_the_rows_of_the_table(dumped):
    text = dumped(dump_own)[0].read_text()
    assert "Input(torch.int64, (12,), below=256)" in text


class Breaking(nn.Module):
    def forward(self, x):
        y = torch.sin(x)
        torch._dynamo.graph_break()
        return torch.cos(y)


def test_the_graphs_of_a_program_have_folders_of_their_own(tmp_path):
    explain(Breaking(), torch.ones(3), options={"dump": str(tmp_path)})
    assert "torch.ops.aten.sin.default" in (tmp_path / "graph_0/00_captured.py").read_text()
    assert "torch.ops.aten.cos.default" in (tmp_path / "graph_1/00_captured.py").read_text()


def test_stages_of_an_earlier_process_are_removed_and_nothing_else(tmp_path):
    (tmp_path / "graph_0").mkdir()
    for name in ("07_stale.py", "notes.py"):
        (tmp_path / "graph_0" / name).touch()
    explain(torch.sin, torch.ones(3), options={"dump": str(tmp_path)})
    assert sorted(file.name for file in (tmp_path / "graph_0").iterdir()) == ["00_captured.py", "notes.py"]


def with_constants(x):
    return x * torch.tensor([1.5, float("inf"), 3.0]) + torch.tensor([[float(i) for i in range(300)]]).view(100, 3)


def test_small_constants_are_written_out_and_large_ones_made_up(tmp_path):
    explain(with_constants, torch.ones(3), options={"dump": str(tmp_path)})
    (file,) = (tmp_path / "graph_0").iterdir()
    assert "torch.tensor([1.5, float('inf'), 3.0], dtype=torch.float32)" in file.read_text()
    assert "Input(torch.float32, (1, 300))" in file.read_text()
    (out,) = outputs(file)
    assert out.shape == (100, 3) and out[:, 1].isinf().all()


def test_an_input_keeps_its_order_in_memory(tmp_path):
    explain(lambda x: x.t().contiguous().view(-1), torch.ones(3, 4).t(), options={"dump": str(tmp_path)})
    (file,) = (tmp_path / "graph_0").iterdir()
    assert "Input(torch.float32, (4, 3), strides=(1, 4))" in file.read_text()
    assert outputs(file)[0].shape == (12,)


def test_a_kernel_that_cannot_be_imported_is_written_as_its_meaning(tmp_path, monkeypatch):
    def mine(x, weight, eps, style="after"):
        return ops.rms_norm.reference(x, weight, eps, style)

    monkeypatch.setattr(ops.rms_norm, "kernels", [Kernel("rms_norm", "mine", mine)])
    report = explain(nn.RMSNorm(8).requires_grad_(False), torch.ones(2, 8), options={"dump": str(tmp_path)})
    assert [choice.chosen for choice in report.kernels] == ["mine"]
    lowered = max((tmp_path / "graph_0").iterdir())
    assert "torch.ops.atom.rms_norm(" in lowered.read_text()
    assert outputs(lowered)[0].shape == (2, 8)
