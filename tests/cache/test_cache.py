"""A second start finds on disk what the first one compiled; and never what something else
compiled.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import operator
import os
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath

import pytest
import torch
import torch.nn.functional as F
import users_kernel
from torch import nn

import atomc
from atomc.cache import fingerprint, store
from atomc.cache.artifact import Uncacheable
from atomc.cache.graph_fingerprint import _target
from atomc.cli import main
from atomc.loading.create_model import create_model
from atomc.ops.op import REGISTRY
from atomc.ops.state import GroupStep, Step
from atomc.options import Options
from atomc.program import compile_model
from atomc.report.records import CacheOutcome

TINY = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    hidden_act="silu",
)


class Block(nn.Module):
    """Queries, keys and values of one input, and a norm: packs, kernels and glue."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.RMSNorm(32)
        self.q, self.k, self.v = (nn.Linear(32, n, bias=False) for n in (32, 16, 16))
        self.eval().requires_grad_(False)

    def forward(self, x):
        x = self.norm(x)
        q, k, v = (
            linear(x).unflatten(-1, (-1, 8)).transpose(-2, -3)
            for linear in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return torch.sin(y.transpose(-2, -3).flatten(-2)) + x


X = torch.linspace(-1, 1, 6 * 32).view(1, 6, 32)


@pytest.fixture
def start(tmp_path):
    """start(model, ...): what the model returns when compiled as by a new process, and the
    report.
    """

    def run(model, *args, folder=tmp_path, dynamic=None, **options):
        torch._dynamo.reset()
        chosen = {"glue": "eager", "cache": True, "cache_dir": str(folder), **options}
        with torch.inference_mode():
            out = torch.compile(model, backend="atom", options=chosen, dynamic=dynamic)(
                *(args or (X,))
            )
        return out, atomc.reports()[-1]

    return run


def entries(folder):
    return sorted(folder.glob("*.atomc"))


def test_a_second_start_returns_the_same_and_runs_no_pass(start):
    first, cold = start(Block())
    second, warm = start(Block())
    assert (cold.cache, warm.cache) == ("miss: the cache is empty", "hit")
    assert torch.equal(first, second)
    assert {"passes", "lower"} <= cold.phases.keys() and warm.phases.keys() == {"cache"}


def test_the_report_of_a_hit_says_what_that_of_the_miss_said(start):
    _, cold = start(Block())
    _, warm = start(Block())
    assert cold.matches["merge_qkv"] == 1
    of_this_start = {"phases": None, "cached": None, "call": 0}
    old, new = ({**vars(report), **of_this_start} for report in (cold, warm))
    assert new == old
    assert "cache: hit" in warm.to_text()


def test_weights_are_read_at_each_call_and_never_from_the_cache(start):
    start(Block(seed=1))
    other = Block(seed=2)
    with torch.inference_mode():
        expected = other(X)
    found, report = start(other)
    assert report.cache == "hit" and report.matches["merge_qkv"] == 1
    torch.testing.assert_close(found, expected)


def test_constants_of_the_program_are_part_of_the_key(start):
    def scaled(by):
        factor = torch.tensor([by, 1.0]).repeat(16)
        return lambda x: F.silu(x * torch.tensor([by, 1.0]).repeat(16)) + factor

    for by in (2.0, 3.0):
        found, report = start(scaled(by))
        assert report.cache.startswith("miss")
        torch.testing.assert_close(found, scaled(by)(X))


def test_floats_that_dynamo_makes_inputs_of_are_part_of_the_key(start):
    class Scaled(nn.Module):
        def __init__(self, by):
            super().__init__()
            self.by = by

        def forward(self, x):
            return F.silu(x * self.by) * self.by

    for by, cached in ((1.5, "miss: the cache is empty"), (1.5, "hit"), (2.5, "miss")):
        found, report = start(Scaled(by), dynamic=True)
        assert report.cache.startswith(cached)
        torch.testing.assert_close(found, Scaled(by)(X))


def test_one_entry_serves_every_number_of_tokens_it_was_compiled_for(start):
    start(Block(), X.expand(2, 6, 32).clone(), dynamic=True)
    fewer = torch.ones(3, 4, 32)
    found, report = start(Block(), fewer, dynamic=True)
    assert report.cache == "hit"
    torch.testing.assert_close(found, Block()(fewer))


def test_a_number_that_only_chooses_a_branch_is_no_part_of_the_entry(start):
    """As the length of a static cache with a window, below which the tokens fit."""

    def step(x, tokens, room):
        y = F.silu(x) + tokens
        return y if tokens < room else y.sin()

    for tokens, room, cached in ((3, 9, "miss"), (5, 8, "hit"), (9, 8, "miss")):
        found, report = start(step, X, tokens, room, dynamic=True, strict=True)
        assert report.cache.startswith(cached)
        torch.testing.assert_close(found, step(X, tokens, room))


def test_an_input_that_is_written_is_written_by_a_hit_too(start):
    def step(store, x):
        store.index_copy_(0, torch.tensor([2]), F.silu(x))
        return store.sum(0)

    for cached in ("miss", "hit"):
        store = torch.zeros(4, 8)
        found, report = start(step, store, torch.ones(1, 8))
        assert report.cache.startswith(cached)
        torch.testing.assert_close(store[2], F.silu(torch.ones(8)))
        torch.testing.assert_close(found, store.sum(0))


def test_a_step_whose_attention_reads_a_cache_that_glue_writes_starts_warm(start):
    def step(keys, values, x, at):
        keys.index_copy_(2, at, torch.sin(x) * 2)
        values.index_copy_(2, at, torch.cos(x) * 2)
        y = F.scaled_dot_product_attention(x, keys, values)
        return torch.sin(y) + x

    def inputs(at):
        generator = torch.Generator().manual_seed(at)
        stores = (torch.zeros(1, 2, 5, 8) for _ in range(2))
        return *stores, torch.randn(1, 2, 1, 8, generator=generator), torch.tensor([at])

    for cached in ("miss", "hit"):
        for at in (1, 3):
            mine, theirs = inputs(at), inputs(at)
            result, report = start(step, *mine, glue="inductor")
            assert report.cache.startswith(cached if at == 1 else "hit"), report.cache
            torch.testing.assert_close(result, step(*theirs))
            torch.testing.assert_close(mine[:2], theirs[:2])


def test_glue_may_read_one_part_of_a_store_and_attention_another(start):
    def step(store, x, at):
        store.index_copy_(2, at, torch.sin(x) * 2)
        keys, values = store.split(2, 1)
        y = F.scaled_dot_product_attention(x[:, :2], keys, torch.cos(values) * 2)
        return torch.sin(y) + 1

    x, at = torch.randn(1, 4, 1, 8), torch.tensor([2])
    mine, theirs = torch.zeros(1, 4, 5, 8), torch.zeros(1, 4, 5, 8)
    result, _ = start(step, mine, x, at, glue="inductor", strict=True)
    torch.testing.assert_close(result, step(theirs, x, at))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.rotating
def test_an_own_model_and_a_stock_one_start_warm(start):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        **{k: v for k, v in TINY.items() if k not in ("architectures", "model_type")}
    )
    ids = torch.arange(5)[None]
    outs = []
    for cached in ("miss", "hit"):
        torch.manual_seed(0)
        model = transformers.Qwen3ForCausalLM(config).eval().requires_grad_(False)
        out, report = start(lambda ids, model=model: model(ids, use_cache=False).logits, ids)
        outs.append(out)
        assert report.cache.startswith(cached) and report.matches["rms_norm"] == 9
    assert torch.equal(*outs)


def test_the_program_of_the_runtime_starts_warm(tmp_path):
    options = {"glue": "eager", "cache": True, "cache_dir": str(tmp_path)}
    outs = []
    for cached in ("miss: the cache is empty", "hit"):
        torch.manual_seed(0)
        model = create_model(TINY, torch.float32, "cpu").eval().requires_grad_(False)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        program = compile_model(model, options)
        assert program.report.cache == cached
        assert program.report.matches["qk_norm_rope_kv_write"] == 2
        ids = torch.arange(5)
        block_size = 64
        program.bind([spec.allocate(2, block_size, "cpu") for spec in program.specs])
        group = GroupStep(ids + block_size, torch.tensor([[1]], dtype=torch.int32))
        step = Step(
            ids,
            ids,
            torch.tensor([0, 5], dtype=torch.int32),
            torch.tensor([5], dtype=torch.int32),
            ids,
            (group,),
            torch.zeros(1, dtype=torch.int64),
        )
        outs.append(program(step))
    assert torch.equal(*outs)


def test_a_changed_option_is_named(start):
    start(Block())
    _, report = start(Block(), rounding="hf")
    assert report.cache == "miss: option rounding changed from 'fp32' to 'hf'"


def test_a_changed_version_is_named(start, monkeypatch):
    start(Block())
    versions = fingerprint._versions()
    monkeypatch.setattr(fingerprint, "_versions", lambda: {**versions, "torch": "2.99"})
    _, report = start(Block())
    assert report.cache == f"miss: version of torch changed from {versions['torch']} to 2.99"


def test_another_graph_has_no_entry(start):
    start(Block())
    _, report = start(lambda x: F.silu(x) + 1)
    assert report.cache == "miss: no entry for this graph"


def test_another_shape_is_named(start):
    start(Block())
    _, report = start(Block(), torch.ones(2, 6, 32))
    assert "changed from L['x']: torch.float32 [1, 6, 32]" in report.cache


def test_a_changed_kernel_is_named_and_compiled_anew(start, tmp_path):
    def with_kernel(factor):
        with users_kernel.registered(tmp_path, factor):
            return start(nn.RMSNorm(32).eval().requires_grad_(False), folder=tmp_path / "cache")

    first, _ = with_kernel(1)
    again, hit = with_kernel(1)
    doubled, report = with_kernel(2.0)
    assert hit.cache == "hit" and torch.equal(first, again)
    assert report.cache == "miss: source of kernel mine rms_norm changed"
    torch.testing.assert_close(doubled, 2 * first)


def test_a_kernel_that_depends_on_variables_around_it_switches_the_cache_off(start):
    factor = 3.0

    @atomc.register_kernel("rms_norm", "local")
    def rms_norm(x, weight, eps, style="after"):
        return F.rms_norm(x, x.shape[-1:], weight, eps) * factor

    try:
        found, report = start(nn.RMSNorm(32).eval().requires_grad_(False))
    finally:
        REGISTRY["rms_norm"].kernels.pop()
    assert (
        report.cache.startswith("off: ")
        and "it depends on variables of the enclosing function" in report.cache
    )
    torch.testing.assert_close(found, 3 * F.rms_norm(X, (32,), eps=torch.finfo(torch.float32).eps))


@pytest.mark.covering
@pytest.mark.parametrize("damage", ["a byte", "the end", "everything", "what it refers to"])
def test_a_damaged_entry_is_rebuilt_with_one_line(start, tmp_path, damage, caplog):
    expected, _ = start(Block())
    (entry,) = entries(tmp_path)
    whole = entry.read_bytes()
    if damage == "what it refers to":  # a kernel that is gone, under a right checksum
        rest = whole.partition(b"\n")[2].replace(b"attention", b"attentoin")
        entry.write_bytes(
            b"atomc-cache 1 " + hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest
        )
    else:
        middle = len(whole) // 2
        entry.write_bytes(
            {
                "a byte": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
                "the end": whole[:middle],
                "everything": b"",
            }[damage]
        )
    with caplog.at_level(logging.WARNING, "atomc"):
        found, report = start(Block())
    assert report.cache.startswith("miss: the entry was damaged and is rebuilt: ")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "atomc"]
    assert line.startswith("atomc rebuilds a damaged cache entry, ")
    assert torch.equal(found, expected)
    assert start(Block())[1].cache == "hit"


def test_what_depends_on_packs_of_another_graph_is_not_kept(start, tmp_path):
    one, two = Block(seed=1), Block(seed=2)
    two.q.weight = one.q.weight
    _, first = start(one)
    _, second = start(lambda x: two(x) * 2)
    assert (
        first.cached == CacheOutcome("miss", "the cache is empty") and len(entries(tmp_path)) == 1
    )
    (reason,) = {miss.found for miss in second.near if miss.kind == "packed"}
    assert second.cached == CacheOutcome("miss", "no entry for this graph", reason)


def test_a_folder_that_cannot_be_written_breaks_nothing(start, tmp_path):
    (tmp_path / "file").write_text("")
    found, report = start(Block(), folder=tmp_path / "file" / "cache")
    assert "not kept: " in report.cache
    torch.testing.assert_close(found, Block()(X))


def test_nothing_is_loaded_from_where_others_may_write(start, tmp_path):
    folder = tmp_path / "open"
    start(Block(), folder=folder)
    folder.chmod(0o777)
    _, report = start(Block(), folder=folder)
    assert report.cache == f"off: {folder} may be written by other users"


def test_a_dump_and_an_option_switch_the_cache_off(start, tmp_path):
    _, report = start(Block(), dump=str(tmp_path / "dump"))
    assert report.cache == "off: a dump was asked for" and (tmp_path / "dump").is_dir()
    assert start(Block(), cache=False)[1].cache == "off"
    assert entries(tmp_path) == []


def options(folder, size=10**6):
    return Options(cache_dir=str(folder), cache_size=size)


def test_beyond_the_cap_what_was_not_used_for_longest_goes(tmp_path):
    many = [store.Entry({"graph": str(i)}, options(tmp_path)) for i in range(3)]
    for age, entry in enumerate(many):
        entry.write({"i": age, "bulk": "x" * 1000})
        os.utime(entry.path, (time.time() - 100 + age,) * 2)
    assert many[0].read()["i"] == 0  # now the last used
    size = many[0].path.stat().st_size
    store.Entry({"graph": "new"}, options(tmp_path, 3 * size + size // 2)).write(
        {"i": 3, "bulk": "x" * 1000}
    )
    assert [entry.read() is not None for entry in many] == [True, False, True]
    assert store.usage(options(tmp_path)).entries == 3


def test_an_entry_larger_than_the_cap_is_not_kept(tmp_path):
    with pytest.raises(OSError, match="the limit of the cache is 10"):
        store.Entry({"graph": "a"}, options(tmp_path, 10)).write({})
    assert entries(tmp_path) == []


def test_only_plain_data_can_be_stored():
    store.check_plain({"a": [1, "b", (2.0, None, torch.float32)], "c": torch.ones(1)})
    with pytest.raises(TypeError, match=r"entry\['a'\]\[0\] is a PurePosixPath"):
        store.check_plain({"a": [PurePosixPath("x")]})


def test_doctor_shows_the_cache_and_empties_it_of_nothing_else(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ATOMC_CACHE_DIR", str(tmp_path))
    (tmp_path / "notes.txt").write_text("mine")
    store.Entry({"graph": "a"}, options(tmp_path)).write({"bulk": "x" * 5000})
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert str(tmp_path) in shown and "1 entry" in shown and "of 10.0 GiB" in shown
    assert main(["doctor", "--clear"]) == 0
    assert "1 entry deleted" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("text, size", [("500M", 500 * 2**20), ("10g", 10 * 2**30), ("123", 123)])
def test_the_cap_is_read_from_the_environment(monkeypatch, text, size):
    monkeypatch.setenv("ATOMC_CACHE_SIZE", text)
    assert Options.of().cache_size == size


def test_a_wrong_cap_is_refused(monkeypatch):
    monkeypatch.setenv("ATOMC_CACHE_SIZE", "much")
    with pytest.raises(atomc.OptionsError, match="expected a size such as 500M or 10G"):
        Options.of()


def test_the_folder_follows_the_users_convention(monkeypatch, tmp_path):
    monkeypatch.delenv("ATOMC_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Options.of().cache_folder == tmp_path / "atomc"
    assert dataclasses.replace(Options.of(), cache_dir="~/x").cache_folder == Path.home() / "x"


PROGRAM = """
import hashlib, json, sys
import torch, atomc
from atomc import ops
from torch._dynamo.utils import counters

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16))

    def forward(self, x):
        heads = torch.sin(x * self.weight).view(-1, 2, 8)
        return ops.attention(heads, heads, heads, scale=0.3).view(-1, 16)

model = torch.nn.ModuleList(Layer() for _ in range(3))

def forward(x):
    for layer in model:
        x = layer(x)
    return x

with torch.inference_mode():
    x = torch.arange(80.0).view(5, 16)
    out = torch.compile(forward, backend="atom", options={"glue": sys.argv[1]})(x)
    torch.testing.assert_close(out, forward(x))
report = atomc.reports()[-1]
print(json.dumps({
    "cache": report.cache, "notes": report.notes, "digest": hashlib.sha256(out.numpy().tobytes()).hexdigest(),
    "compiled": counters["inductor"]["fxgraph_cache_miss"], "traced": counters["aot_autograd"]["total"],
}))
"""


def process(folder, seed, glue="inductor"):
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TORCHINDUCTOR_VEC_ISA_OK": "1",  # or it compiles 6 s of tests of the compiler there
        "PYTHONHASHSEED": seed,
        "ATOMC_CACHE": "1",
        "ATOMC_CACHE_DIR": str(folder / "atomc"),
    }
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, glue],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(running):
    out, error = running.communicate()
    assert running.returncode == 0, error
    return json.loads(out.splitlines()[-1])


@pytest.mark.rotating
def test_a_new_process_compiles_nothing(tmp_path):
    cold = said(process(tmp_path, "1"))
    built = set((tmp_path / "inductor").rglob("*.so"))
    warm = said(process(tmp_path, "2"))
    assert "glue: 3 pieces, 2 unique" in cold["notes"]
    assert (cold["compiled"], cold["traced"]) == (2, 2)
    assert (warm["cache"], warm["compiled"], warm["traced"]) == ("hit", 0, 0)
    assert warm["digest"] == cold["digest"]
    assert built and set((tmp_path / "inductor").rglob("*.so")) == built


@pytest.mark.slow
def test_two_processes_at_once_both_work_and_leave_one_entry(tmp_path):
    first, second = process(tmp_path, "1", "eager"), process(tmp_path, "2", "eager")
    found = [said(first), said(second)]
    assert found[0]["digest"] == found[1]["digest"]
    assert len(list((tmp_path / "atomc").glob("*.atomc"))) == 1
    assert said(process(tmp_path, "3", "eager"))["cache"] == "hit"


def test_functions_of_a_graph_have_names_that_are_equal_in_two_processes() -> None:
    names = [_target(target) for target in (torch.Tensor.add, dict.get, torch.add, operator.mul)]
    assert names[1:] == ["builtins.dict.get", "torch._VariableFunctionsClass.add", "_operator.mul"]
    assert names[0].endswith("TensorBase.add") and " at 0x" not in "".join(names)
    with pytest.raises(Uncacheable, match="a partial is called in the graph"):
        _target(functools.partial(torch.add, 1))
