"""torch's own tools see us: the structured trace, TORCH_LOGS, profiles, torch._dynamo.explain and
list_backends.
"""

import ast
import logging
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import atomc
from atomc import ops
from atomc.compiler import partition as pieces
from atomc.graph import profiler_ranges, structured_trace

TRACE = logging.getLogger("torch.__trace")


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(16), Gated()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


@pytest.fixture
def model():
    return Block().requires_grad_(False)


def compiled(model, **options):
    return torch.compile(model, backend="atom", options={"glue": "eager", **options})


X = torch.randn(3, 16)


@pytest.fixture
def traced():
    """The structured trace: (metadata, payload) of each record."""
    records = []

    class Keep(logging.Handler):
        def emit(self, record):
            records.append((record.metadata, record.payload))

    handler = Keep()
    TRACE.addHandler(handler)
    yield records
    TRACE.removeHandler(handler)


def ours(records):
    named = [(data["artifact"]["name"], data, text) for data, text in records if "artifact" in data]
    return [entry for entry in named if entry[0].startswith("atomc_")]


def test_the_graph_before_and_after_each_changing_pass_is_in_the_structured_trace(model, traced):
    compiled(model)(X)
    found = [entry for entry in ours(traced) if "lift" not in entry[0]]
    names = [name for name, _, _ in found]
    assert names == sorted(names) and names[0] == "atomc_00_captured" and "_lower" in names[-1]
    changed = [stage.name for stage in atomc.reports()[-1].stages]
    assert [re.sub(r"^atomc_\d\d_|(?<=lower)_.*", "", name) for name in names[1:]] == changed[
        changed[0] == "lift" :
    ]
    texts = [text for _, _, text in found]
    assert len(set(texts)) == len(texts)
    (gated,) = [i for i, name in enumerate(names) if name.endswith("silu_and_mul")]
    assert "atom.silu_and_mul" in texts[gated] and "atom.silu_and_mul" not in texts[gated - 1]
    assert all(
        {"frame_id", "frame_compile_id"} <= data.keys() for _, data, _ in found
    )  # tlparse sorts by these


def test_each_range_of_token_counts_has_a_lowered_graph_of_its_own(traced):
    gm = torch.fx.symbolic_trace(lambda x: x)
    (write,) = structured_trace.observers()
    gm.meta["tokens"] = ops.Tokens(2, 16)
    write("captured", gm)
    write("lower", gm)
    gm.meta["tokens"] = ops.Tokens(17)
    write("lower", gm)
    assert [name for name, _, _ in ours(traced)] == [
        "atomc_00_captured",
        "atomc_01_lower_2_to_16",
        "atomc_02_lower_17_and_more",
    ]


def test_nobody_writes_where_nobody_listens(monkeypatch):
    monkeypatch.setattr(TRACE, "handlers", [])
    assert structured_trace.observers() == []


PROGRAM = """
import torch
@torch.compile(backend="atom", options={"glue": "eager", "cache": False})
def f(x, w):
    return torch.nn.functional.rms_norm(x, (8,), w, 1e-5)
with torch.no_grad():
    f(torch.randn(3, 8), torch.randn(8))
"""


@pytest.mark.rotating
def test_torch_logs_turns_our_logging_on():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env={**os.environ, "TORCH_LOGS": "+atomc"},
    )
    assert done.returncode == 0, done.stderr
    assert "pass lower changed 1 sites" in done.stderr


def test_the_backend_is_in_torchs_list():
    assert "atom" in torch._dynamo.list_backends()


@pytest.mark.parametrize("prepared", [False, True])
def test_dynamos_own_explain_works_on_a_model_that_we_compile(model, prepared):
    if prepared:
        atomc.prepare(model)
    before = compiled(model)(X)
    found = torch._dynamo.explain(model)(X)
    assert found.graph_count == 1 and found.graph_break_count == 0
    torch.testing.assert_close(compiled(model)(X), before)


def profiled(function, *args):
    """The names of the ranges in a profile of a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        out = function(*args)
    return {event.key for event in found.key_averages()}, out


def test_a_profile_names_each_kernel_by_module_and_op(model):
    function = compiled(model)
    out = function(X)
    names, again = profiled(function, X)
    mine = {name for name in names if ": " in name}
    assert "norm: rms_norm [torch]" in mine and "mlp: silu_and_mul [torch]" in mine
    linears = {name for name in mine if ": linear [" in name}  # of a library
    assert {name.partition(":")[0] for name in linears} == {"mlp", "mlp.down"}
    assert torch.equal(out, again)


def test_the_names_are_there_after_a_warm_start_too(model, tmp_path):
    options = {"cache": True, "cache_dir": str(tmp_path)}
    compiled(model, **options)(X)
    torch._dynamo.reset()
    function = compiled(model, **options)
    function(X)
    assert atomc.reports()[-1].cache == "hit"
    names, _ = profiled(function, X)
    assert "mlp: silu_and_mul [torch]" in names


def test_pieces_for_inductor_are_named_by_the_module_that_they_begin_in(model, monkeypatch):
    monkeypatch.setattr(
        pieces, "inductor_code", lambda gm, examples, patches: (gm.forward, "left as it is")
    )
    function = compiled(model, glue="inductor")
    function(X)
    names, _ = profiled(function, X)
    assert "norm: glue" in names and any(name.startswith("mlp.down: linear [") for name in names)


def test_without_a_profiler_nothing_but_the_call_happens():
    calls = []
    function = profiler_ranges.profiled(
        lambda x: calls.append(x), lambda: pytest.fail("no profiler listens")
    )
    function(1)
    assert calls == [1]


def test_ranges_lie_around_what_computes_and_not_around_what_frees():
    source = (
        "def forward(self, x):\n    a = f(x);  x = None\n    b = a[0];  a = None\n    return (b,)"
    )
    text = ast.unparse(profiler_ranges.add_ranges(source, {"a": "mlp: f", "x": "never"}))
    assert text.splitlines()[1:] == [
        "    with record_function('mlp: f'):",
        "        a = f(x)",
        "    x = None",
        "    b = a[0]",
        "    a = None",
        "    return (b,)",
    ]
