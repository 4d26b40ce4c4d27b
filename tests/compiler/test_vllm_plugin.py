"""The backend and the plugin in vLLM, without vLLM: its interfaces and the spelling of its models
are stand-ins (vllm_model.py).
"""

import os
import subprocess
import sys
from enum import Enum, IntEnum
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from rewriting import since
from vllm_model import SEEN, VOCAB, Model, Ops

import atomc
from atomc import vllm_plugin

pytestmark = pytest.mark.xdist_group("vllm")
LAYERS = 2
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


class CompilationMode(IntEnum):
    STOCK_TORCH_COMPILE, DYNAMO_TRACE_ONCE = 1, 2


class CUDAGraphMode(Enum):
    FULL, FULL_DECODE_ONLY = 2, (2, 0)


def config(backend="atom", custom_ops=(), mode=1, cudagraph_mode=None, **priority):
    priority = {"rms_norm": [], "fused_add_rms_norm": [], **priority}
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            backend=backend,
            custom_ops=list(custom_ops),
            mode=mode,
            cudagraph_mode=cudagraph_mode,
        ),
        kernel_config=SimpleNamespace(ir_op_priority=SimpleNamespace(**priority)),
    )


@pytest.fixture
def vllm(monkeypatch):
    """vLLM's modules, and the plugin loaded twice, as different parts of vLLM load it."""
    names = ("vllm", "vllm.ir", "vllm.platforms", "vllm.config", "vllm.config.compilation")
    modules = {name: ModuleType(name) for name in names}
    modules["vllm.config.compilation"].CompilationMode = CompilationMode
    modules["vllm.config.compilation"].CUDAGraphMode = CUDAGraphMode
    modules["vllm"].ir, modules["vllm.ir"].ops = modules["vllm.ir"], Ops()
    seen = []
    modules["vllm.platforms"].current_platform = SimpleNamespace(
        apply_config_platform_defaults=seen.append
    )
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    vllm_plugin.register()
    vllm_plugin.register()
    return SimpleNamespace(
        ops=modules["vllm.ir"].ops, platform=modules["vllm.platforms"].current_platform, seen=seen
    )


def built(ops, dtype):
    torch.manual_seed(0)
    model = Model(ops, LAYERS).to(dtype).requires_grad_(False).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.rotating
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
def test_a_model_of_vllm_is_rewritten_around_its_attention(vllm, monkeypatch, dtype):
    monkeypatch.setenv("ATOMC_GLUE", "eager")
    for op in (vllm.ops.rms_norm, vllm.ops.fused_add_rms_norm):
        op.priority = ["atom", "native"]
    plain, model = built(Ops(), dtype), built(vllm.ops, dtype)
    exact = built(Ops(), dtype).double()
    before = atomc.reports()
    # As vLLM's runner does in mode 1.
    model.compile(fullgraph=True, backend="atom")
    with torch.inference_mode():
        for tokens in (7, 12, 33):
            ids, positions = torch.randint(0, VOCAB, (tokens,)), torch.arange(tokens)
            SEEN.clear()
            found = model(ids, positions)
            assert {f"model.layers.{i}.self_attn.attn": 1 for i in range(LAYERS)} == SEEN
            expected = exact(ids, positions)
            error = (plain(ids, positions) - expected).abs().mean()
            assert (found - expected).abs().mean() < 1.2 * error
    reports = since(before)
    assert [report.treated for report in reports] == [True, True]  # 7 tokens, and any number
    for report in reports:
        ops = [each.op for each in report.kernels]
        assert {op: ops.count(op) for op in sorted(set(ops))} == {
            "add_rms_norm": 2 * LAYERS,
            "embedding": 1,
            "linear": 4 * LAYERS,
            "rms_norm": 1,
            "rope": 2 * LAYERS,
            "silu_and_mul": LAYERS,
        }


def test_norms_that_atomc_has_no_op_for_stay_those_of_vllm(vllm):
    x, weight = torch.randn(3, 8), torch.randn(8)
    _, takes = vllm.ops.rms_norm.impls["atom"]
    _, takes_add = vllm.ops.fused_add_rms_norm.impls["atom"]
    assert not takes(x, weight, 1e-6) and not takes_add(x, x, weight, 1e-6)  # not compiled
    answers = []

    def asked(x, weight):
        answers.extend(
            [
                takes(x, weight, 1e-6),
                takes(x, None, 1e-6),
                takes(x, weight.double(), 1e-6),
                takes(x, weight, 1e-6, 4),
                takes_add(x, x, weight, 1e-6),
                takes_add(x, x.double(), weight, 1e-6),
            ]
        )
        return x + 1

    torch.compile(asked, backend="eager", fullgraph=True)(x, weight)
    assert answers == [True, False, False, False, True, False]


def test_defaults_of_a_config_are_those_of_the_backend_only(vllm):
    ours, theirs = config(), config("inductor")
    for each in (ours, theirs):
        vllm.platform.apply_config_platform_defaults(each)
    assert vllm.seen == [ours, theirs]  # the platform's own defaults are applied too
    assert ours == config(custom_ops=["none"], rms_norm=["atom"], fused_add_rms_norm=["atom"])
    assert theirs == config("inductor")
    chosen = config(custom_ops=["all"], rms_norm=["native"])
    vllm.platform.apply_config_platform_defaults(chosen)
    assert chosen == config(custom_ops=["all"], rms_norm=["native"], fused_add_rms_norm=["atom"])


def test_in_mode_2_decode_steps_are_captured_and_nothing_is_compiled_ahead(vllm, monkeypatch):
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "to be undone")
    monkeypatch.delenv("VLLM_USE_AOT_COMPILE")
    others = config(), config("inductor", mode=2)
    for each in others:
        vllm.platform.apply_config_platform_defaults(each)
        assert each.compilation_config.cudagraph_mode is None
    assert "VLLM_USE_AOT_COMPILE" not in os.environ
    ours, chosen = config(mode=2), config(mode=2, cudagraph_mode=CUDAGraphMode.FULL)
    for each in (ours, chosen):
        vllm.platform.apply_config_platform_defaults(each)
    assert ours.compilation_config.cudagraph_mode is CUDAGraphMode.FULL_DECODE_ONLY
    assert chosen.compilation_config.cudagraph_mode is CUDAGraphMode.FULL
    assert os.environ["VLLM_USE_AOT_COMPILE"] == "0"


@pytest.mark.rotating
def test_a_model_traced_once_without_guards_serves_any_number_of_tokens(vllm, monkeypatch):
    monkeypatch.setenv("ATOMC_GLUE", "eager")
    for op in (vllm.ops.rms_norm, vllm.ops.fused_add_rms_norm):
        op.priority = ["atom", "native"]
    dtype = torch.bfloat16
    plain, model = built(Ops(), dtype), built(vllm.ops, dtype)
    before = atomc.reports()
    # As vLLM's wrapper does in mode 2: guards are dropped, so a kernel chosen by the first number of
    # tokens would serve all others.
    compiled = torch.compile(
        model.forward,
        fullgraph=True,
        dynamic=False,
        backend="atom",
        options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe},
    )
    with torch.inference_mode():
        for first, tokens in enumerate((64, 7, 33, 1, 200)):
            ids, positions = torch.randint(0, VOCAB, (tokens,)), torch.arange(tokens)
            if not first:
                torch._dynamo.mark_dynamic(ids, 0)
                torch._dynamo.mark_dynamic(positions, 0)
            found, expected = compiled(ids, positions), plain(ids, positions)
            assert (found - expected).abs().mean() < 0.02 * expected.abs().mean()
    assert [report.treated for report in since(before)] == [True]


def test_another_vllm_is_left_alone_with_a_warning(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    vllm_plugin.register()
    assert "does not take atomc's norms" in caplog.text and '"custom_ops": ["none"]' in caplog.text


def test_the_plugin_is_an_entry_point_that_imports_nothing_heavy():
    (line,) = [line for line in PYPROJECT.read_text().splitlines() if "vllm_plugin" in line]
    name, _, value = line.partition(" = ")
    entry = EntryPoint(name, value.strip('"'), "vllm.general_plugins")
    assert entry.load() is vllm_plugin.register
    program = f"import sys, {entry.module}; print(sorted(m for m in sys.modules if m == 'torch'))"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "[]\n"
