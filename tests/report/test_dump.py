"""Dumps: every file runs on its own, all files of a graph compute the same, and the same compile
writes the same bytes.

With a record they run on what really went in, and say whether they give what really came out.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import atomc
from atomc import ops
from atomc.compiler.explain import explain
from atomc.demo import PATH
from atomc.dumps.replay import RECORDED, make
from atomc.loading.create_model import create_model
from atomc.loading.loader import load
from atomc.ops.op import Kernel, Prepared
from atomc.ops.state import GroupStep, Step
from atomc.program import compile_model

pytestmark = pytest.mark.xdist_group("dump")
WIDTHS = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=256,
    head_dim=16,
    max_position_embeddings=64,
)


def own():
    config = {
        **WIDTHS,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
    }
    return create_model(config, device="meta").eval().requires_grad_(False)


def stock():
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        return (
            transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**WIDTHS))
            .eval()
            .requires_grad_(False)
        )


def dump_stock(folder):
    explain(stock(), options={"dump": str(folder), "glue": "eager"})


def dump_own(folder):
    explain(own(), options={"dump": str(folder)}, dynamic=True)


def dump_runtime(folder):
    compile_model(own(), options={"dump": str(folder), "glue": "eager"})


def last_graph(folder):
    """The files of the graph dumped last, in order; earlier ones may be attempts that were given
    up.
    """
    return sorted(
        max(
            folder.glob("graph_*"), key=lambda graph: int(graph.name.removeprefix("graph_"))
        ).iterdir()
    )


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


@pytest.mark.rotating
@pytest.mark.parametrize("dump", [dump_stock, dump_own, dump_runtime])
def test_every_stage_of_a_graph_computes_the_same(dump, dumped):
    first, *later = dumped(dump)
    expected = outputs(first)
    assert expected[0].std() > 0.1
    for file in later:
        torch.testing.assert_close(
            outputs(file), expected, msg=lambda text, file=file: f"{file.name}: {text}"
        )


def test_stages_are_numbered_and_named_by_the_pass(dumped):
    numbers, names = zip(*(file.stem.split("_", 1) for file in dumped(dump_runtime)), strict=True)
    assert numbers == tuple(f"{i:02}" for i in range(len(names)))
    assert names[0] == "captured" and names[-1] == "lower"
    rewrites = [
        name
        for name in names
        if name in ("rms_norm", "add_rms_norm", "bind_state", "qk_norm_rope_kv_write")
    ]
    assert rewrites == ["rms_norm", "add_rms_norm", "bind_state", "qk_norm_rope_kv_write"]


# Runs each file that it is told of, as a program: one process that imports torch once.
RUN_EACH = """
import contextlib, io, json, runpy, sys, traceback
for line in sys.stdin:
    out, code = io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            runpy.run_path(json.loads(line), run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            code = traceback.format_exc()
    print(json.dumps([code, out.getvalue()]), flush=True)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(file): the exit code of a program, or its traceback, and what it prints."""
    with subprocess.Popen(
        [sys.executable, "-c", RUN_EACH],
        cwd=tmp_path_factory.mktemp("elsewhere"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def program(file):
            process.stdin.write(json.dumps(str(file)) + "\n")
            process.stdin.flush()
            return tuple(json.loads(process.stdout.readline()))

        yield program


@pytest.mark.rotating
@pytest.mark.parametrize(
    "dump", [pytest.param(dump_stock, marks=pytest.mark.slow), dump_own, dump_runtime]
)
def test_every_file_runs_as_a_program(dump, dumped, run):
    checksums = []
    for file in dumped(dump):
        code, out = run(file)
        assert code == 0, code
        (number,) = re.findall("checksum: (.*)", out)
        checksums.append(float(number))
    assert max(checksums) == pytest.approx(min(checksums), rel=1e-5)


@pytest.mark.rotating
def test_a_file_runs_alone(dumped, tmp_path):
    lowered = dumped(dump_own)[-1]
    done = subprocess.run(
        [sys.executable, "-P", lowered],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"output 0: float32\[12, 256\], mean magnitude \S+\nchecksum: \S+\n"
        r"reproduces the outputs of 00_captured\.py\n",
        done.stdout,
    )


# ---- recorded


T = 9
IDS, POSITIONS = torch.arange(T) * 7 % 256, torch.arange(T)


def recording(folder, **more):
    return {"dump": str(folder), "record": True, "strict": True, "glue": "eager", **more}


def run_once(model, options, *args, **kwargs):
    with torch.no_grad():
        torch.compile(model, backend="atom", options=options)(*args, **kwargs)


def record_demo(folder):
    run_once(load(PATH, progress=False), recording(folder), IDS, POSITIONS)


def stock_on_cpu():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return (
        transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**WIDTHS | {"num_hidden_layers": 1}))
        .eval()
        .requires_grad_(False)
    )


def record_stock(folder):
    run_once(stock_on_cpu(), recording(folder), IDS[None], use_cache=False)


def record_fp8(folder):
    run_once(atomc.quantize(stock_on_cpu(), "fp8"), recording(folder), IDS[None], use_cache=False)


def record_runtime(folder):
    """The second part of a prompt: what the first left in the cache is recorded, too."""
    program = compile_model(
        load(PATH, progress=False, dtype=torch.float32), recording(folder, layout="paged")
    )
    caches = [spec.allocate(2, 16, "cpu") for spec in program.specs]
    for cache in (cache for layer in caches for cache in layer.values()):
        cache[0, :4].normal_()
    program.bind(caches)
    group = GroupStep(torch.arange(4, 4 + T), torch.tensor([[0]], dtype=torch.int32))
    with torch.no_grad():
        program(
            Step(
                IDS,
                POSITIONS + 4,
                *(torch.tensor(x, dtype=torch.int32) for x in ([0, T], [4 + T])),
                torch.arange(T),
                (group,),
                torch.zeros(1, dtype=torch.int64),
            )
        )


def programs(dumped):
    return [file for file in dumped if file.suffix == ".py"]


def reproduces(ran):
    code, out = ran
    return code == 0 and out.count("\nreproduces the recorded outputs\n") == 1


@pytest.mark.rotating
@pytest.mark.parametrize(
    "record", [record_demo, pytest.param(record_stock, marks=pytest.mark.slow), record_fp8]
)
def test_every_stage_reproduces_what_was_recorded(record, dumped, run):
    files = programs(dumped(record))
    assert len(files) > 8
    for file in files:
        ran = run(file)
        assert reproduces(ran), (file.name, *ran)


@pytest.mark.rotating
def test_stages_of_the_runtime_reproduce_what_was_recorded_once_they_have_a_cache(dumped, run):
    files = programs(dumped(record_runtime))
    bound = next(i for i, file in enumerate(files) if file.stem.endswith("bind_state"))
    assert len(files) - bound > 2
    for file in files[bound:]:
        ran = run(file)
        assert reproduces(ran), (file.name, *ran)
    # What is in the cache already is not in the captured graph.
    code, _ = run(files[0])
    assert code == 1


@pytest.mark.rotating
def test_outputs_that_are_not_reproduced_are_told_with_exit_code_1(dumped, run, tmp_path):
    files = dumped(record_stock)
    for file in files:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    recorded = torch.load(tmp_path / RECORDED)
    recorded["outputs"][0][0, 3, 5] += 1.0
    torch.save(recorded, tmp_path / RECORDED)
    code, out = run(tmp_path / files[0].name)
    assert code == 1
    assert re.search(
        r"output 0: off by 1, the largest value is \S+\ndoes not reproduce the recorded outputs",
        out,
    )


@pytest.mark.rotating
def test_a_record_holds_weights_and_inputs_but_not_what_is_made_of_them(dumped):
    files = dumped(record_stock)
    recorded = torch.load(files[-1], weights_only=True)
    assert files[-1].name == RECORDED and [x.shape for x in recorded["outputs"]] == [(1, T, 256)]
    assert sum(x.numel() for x in recorded["inputs"].values() if x.dtype == torch.float32) > sum(
        parameter.numel() for parameter in stock_on_cpu().parameters()
    )  # the head's weights are the embedding's, twice
    assert not [name for name in recorded["inputs"] if name.startswith(("packed", "prepared"))]


def test_a_weight_that_a_kernel_prepares_is_prepared_again(tmp_path, monkeypatch):
    monkeypatch.setitem(vars(ops.rms_norm), "kernels", [PREPARING])
    run_once(nn.RMSNorm(8).requires_grad_(False), recording(tmp_path), torch.ones(2, 8))
    lowered = max((tmp_path / "graph_0").glob("*.py"))
    assert re.search(
        r'"prepared_\d": Prepared\(\'test_dump\', \'doubled\', \(\'\w+\',\)\),', lowered.read_text()
    )
    (out,) = outputs(lowered)
    assert out.shape == (2, 8)


def doubled(weight):
    return Prepared((weight * 2,))


def norm_of_doubled(x, weight, eps, style="after"):
    return ops.rms_norm.reference(x, weight[0] / 2, eps, style)


PREPARING = Kernel("rms_norm", "preparing", norm_of_doubled, prepare={("weight",): doubled})


def test_another_dump_leaves_no_record_of_an_earlier_one(tmp_path):
    (tmp_path / "graph_0").mkdir()
    (tmp_path / "graph_0" / RECORDED).touch()
    explain(torch.sin, torch.ones(3), options={"dump": str(tmp_path)})
    assert not (tmp_path / "graph_0" / RECORDED).exists()


DUMP_AGAIN = """
import sys
sys.path.insert(0, sys.argv[1])
import test_dump
test_dump.dump_runtime(sys.argv[2])
"""


@pytest.mark.rotating
def test_another_process_writes_the_same_bytes(dumped, tmp_path):
    arguments = [str(Path(__file__).parent), str(tmp_path)]
    subprocess.run(
        [sys.executable, "-c", DUMP_AGAIN, *arguments],
        check=True,
        env={"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"},
    )
    written = [
        [(file.name, file.read_bytes()) for file in files]
        for files in (dumped(dump_runtime), last_graph(tmp_path))
    ]
    assert written[0] == written[1]


@pytest.mark.rotating
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
    assert re.search(
        r"^    .*  # float32\[64\]  \S*layers\.1\.input_layernorm\.weight$", text, re.MULTILINE
    )
    assert re.search(r"^    .*  # int64\[u\d+\]  input_ids$", text, re.MULTILINE)


def test_packed_weights_are_made_of_their_parts(dumped):
    text = dumped(dump_runtime)[-1].read_text()
    assert re.search(
        r'^    "packed_0": Packed\(\(\'\w+\', \'\w+\', \'\w+\'\)\),  # float32\[128, 64\]',
        text,
        re.MULTILINE,
    )


@pytest.mark.rotating
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
    assert sorted(file.name for file in (tmp_path / "graph_0").iterdir()) == [
        "00_captured.py",
        "notes.py",
    ]


def with_constants(x):
    return x * torch.tensor([1.5, float("inf"), 3.0]) + torch.tensor(
        [[float(i) for i in range(300)]]
    ).view(100, 3)


@pytest.mark.rotating
def test_small_constants_are_written_out_and_large_ones_made_up(tmp_path):
    explain(with_constants, torch.ones(3), options={"dump": str(tmp_path)})
    (file,) = (tmp_path / "graph_0").iterdir()
    assert "torch.tensor([1.5, float('inf'), 3.0], dtype=torch.float32)" in file.read_text()
    assert "Input(torch.float32, (1, 300))" in file.read_text()
    (out,) = outputs(file)
    assert out.shape == (100, 3) and out[:, 1].isinf().all()


def test_an_input_keeps_its_order_in_memory(tmp_path):
    explain(
        lambda x: x.t().contiguous().view(-1), torch.ones(3, 4).t(), options={"dump": str(tmp_path)}
    )
    (file,) = (tmp_path / "graph_0").iterdir()
    assert "Input(torch.float32, (4, 3), strides=(1, 4))" in file.read_text()
    assert outputs(file)[0].shape == (12,)


def test_a_kernel_that_cannot_be_imported_is_written_as_its_meaning(tmp_path, monkeypatch):
    def mine(x, weight, eps, style="after"):
        return ops.rms_norm.reference(x, weight, eps, style)

    monkeypatch.setitem(vars(ops.rms_norm), "kernels", [Kernel("rms_norm", "mine", mine)])
    report = explain(
        nn.RMSNorm(8).requires_grad_(False), torch.ones(2, 8), options={"dump": str(tmp_path)}
    )
    assert [choice.chosen for choice in report.kernels] == ["mine"]
    lowered = max((tmp_path / "graph_0").iterdir())
    assert "torch.ops.atom.rms_norm(" in lowered.read_text()
    assert outputs(lowered)[0].shape == (2, 8)
