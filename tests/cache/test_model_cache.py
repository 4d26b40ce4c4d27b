"""A model of ours that the cache knows is not traced: what it then computes, and what makes it
another model.
"""

import contextlib
import functools
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import users_kernel
from safetensors.torch import load_file, save_file
from tiny_experts import random_model
from torch import nn

import atomc
from atomc import demo, kernels
from atomc.cache import library_code
from atomc.cache.artifact import Uncacheable
from atomc.cache.fingerprint import PACKAGE
from atomc.cache.model_fingerprint import model_parts
from atomc.cache.store import differences
from atomc.errors import RunError
from atomc.loading import loader
from atomc.loading.create_model import create_model
from atomc.models import layers, llama
from atomc.ops.inputs import TEXT, ModelInputs
from atomc.ops.state import GroupStep, Step, groups_of
from atomc.options import Options
from atomc.platform import Platform
from atomc.program import compile_model
from atomc.quantization import experts_spec, quantize
from atomc.quantization.linear import QuantizedLinear
from atomc.quantization.packing import AWQ, GPTQ, GPTQ_V2, MXFP4_PACK_QUANTIZED, PACK_QUANTIZED
from atomc.rewriting.graph_pass import Pass
from atomc.runtime.execution.views.headless_model import headless_model
from atomc.torch_compat.core import compiler_variables

pytestmark = pytest.mark.xdist_group("known")
TINY = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=48,
    hidden_size=128,
    intermediate_size=160,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    hidden_act="silu",
)
# Other sums in another order.
same = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
QWEN3 = {**TINY, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MODELS = {
    "untied": {},
    "two layers": {"num_hidden_layers": 2},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "window": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 3,
    },
    "window of one layer": {
        **QWEN3,
        "num_hidden_layers": 2,
        "use_sliding_window": True,
        "sliding_window": 3,
        "max_window_layers": 1,
    },
    "fp8": {},
    "int4": {},
}
IDS = torch.tensor([3, 1, 4, 1, 5])


def model_of(name="untied", seed=0, **differs):
    torch.manual_seed(seed)
    model = create_model({**TINY, **MODELS[name], **differs}, torch.float32)
    for weight in model.parameters():
        # Larger than usual, so that a wrong weight shows.
        weight.data.normal_(1.0 if weight.dim() == 1 else 0.0, 0.3)
    return quantize(loader.ready(model), name) if name in ("fp8", "int4") else loader.ready(model)


def started(model, folder, **options):
    """The program of the model, as a process starts it that shares the cache in this folder with
    others.
    """
    return compile_model(
        model, {"glue": "eager", "cache": True, "cache_dir": str(folder), **options}
    )


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder in which the cache holds what a start of model_of() has left."""
    folder = tmp_path_factory.mktemp("kept")
    started(model_of(), folder)
    return folder


@pytest.fixture
def start(kept, tmp_path):
    """start(model, ...): the program of a model, where model_of() was started before."""
    shutil.copytree(kept, tmp_path / "cache")

    def run(model, folder=tmp_path / "cache", **options):
        return started(model, folder, **options)

    return run


def step_of(program, ids=IDS):
    """A step of one new sequence, on caches of its own."""
    program.bind([spec.allocate(2, 64, "cpu") for spec in program.specs])
    length = torch.tensor([len(ids)], dtype=torch.int32)
    groups = len(groups_of(program.specs))
    block = torch.tensor([[1]], dtype=torch.int32)
    group = GroupStep(torch.arange(len(ids)) + 64, block)
    first = torch.tensor([0, len(ids)], dtype=torch.int32)
    return Step(
        ids,
        torch.arange(len(ids)),
        first,
        length,
        torch.arange(len(ids)),
        (group,) * groups,
        torch.zeros(1, dtype=torch.int64),
    )


def logits(program):
    return program(step_of(program)).clone()


def plain(model):
    with torch.no_grad():
        return model(IDS, torch.arange(len(IDS)))


def traced_since(program):
    """Why the report says that the model had to be traced."""
    return [note for note in program.report.notes if note.startswith("traced")]


# Two layers and the window of one of them show what one of the same kind does.
IN_OTHERS = ("untied", "window")


@pytest.mark.covering
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in IN_OTHERS else ()) for name in MODELS],
)
def test_a_second_start_traces_nothing_and_computes_the_same(tmp_path, name):
    cold, warm = started(model_of(name), tmp_path), started(model_of(name), tmp_path)
    assert (cold.report.cache, warm.report.cache) == ("miss: the cache is empty", "hit")
    assert "dynamo" in cold.report.phases and warm.report.phases.keys() == {"cache"}
    assert traced_since(cold) == traced_since(warm) == [] and warm.specs == cold.specs
    of_this_start = {"phases": None, "cached": None, "call": 0}
    old, new = ({**vars(program.report), **of_this_start} for program in (cold, warm))
    assert new == old
    assert torch.equal(logits(warm), logits(cold))
    torch.testing.assert_close(logits(warm), plain(model_of(name)), rtol=1e-3, atol=1e-3)


@pytest.mark.rotating
def test_code_of_inductor_is_loaded_again_without_a_trace(tmp_path):
    outs = [logits(started(model_of(), tmp_path, glue="inductor")) for _ in range(2)]
    assert atomc.reports()[-1].cache == "hit" and atomc.reports()[-1].phases.keys() == {"cache"}
    assert any(note.startswith("glue: inductor") for note in atomc.reports()[-1].notes)
    assert torch.equal(*outs)


def test_a_warm_program_reads_the_weights_of_its_own_model(start):
    other = model_of(seed=2)
    expected = plain(other)
    warm = start(other)
    assert warm.report.cache == "hit"
    same(logits(warm), expected)


def test_weights_that_are_loaded_after_a_warm_start_are_used(start):
    model, other = model_of(), model_of(seed=3)
    warm = start(model)
    model.load_state_dict(other.state_dict())
    warm.check()
    same(logits(warm), plain(other))


def test_a_warm_program_notices_weights_that_have_moved(start):
    model = model_of()
    warm = start(model)
    weight = model.get_parameter("model.layers.0.mlp.down_proj.weight")
    weight.data = weight.data.clone()
    with pytest.raises(RunError, match="new storage after compiling"):
        warm.check()


def test_the_model_without_its_head_is_known_too(start):
    outs = [logits(start(headless_model(model_of()))) for _ in range(2)]
    assert atomc.reports()[-1].cache == "hit" and outs[1].shape == (5, 128)
    assert torch.equal(*outs)


def set_eps(model):
    model.model.norm.eps = 1e-2


def add_a_parameter(model):
    model.model.norm.register_parameter("bias", nn.Parameter(torch.zeros(128), requires_grad=False))


def tie(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def share_a_layer(model):
    model.model.layers[1] = model.model.layers[0]


def transpose_a_weight(model):
    linear = model.model.layers[0].mlp.down_proj
    linear.weight = nn.Parameter(linear.weight.t().contiguous().t(), requires_grad=False)


def described_now(model, takes=TEXT, **options):
    return model_parts(
        model,
        Options.of({"glue": "eager", **options}),
        Platform.detect("cpu"),
        takes,
        owned=False,
    )


def test_programs_of_a_model_with_other_inputs_are_other_programs():
    model = model_of()
    keys = [
        described_now(model, takes)
        for takes in (TEXT, ModelInputs(mrope=True), ModelInputs(embeddings=(8, torch.float32)))
    ]
    for i, parts in enumerate(keys):
        assert all(differences(parts, other) for other in keys[:i])


@pytest.mark.parametrize(
    "change, said",
    [
        (set_eps, "module model.norm changed from atomc.models.layers.RMSNorm, eps=1e-05, "),
        (add_a_parameter, "bias: Parameter torch.float32 [128]"),
        (tie, "module lm_head changed from "),
        (share_a_layer, "module model.layers changed from "),
        (transpose_a_weight, "module model.layers.0.mlp.down_proj changed"),
    ],
)
def test_a_change_of_a_model_is_seen(change, said):
    model = model_of("two layers")
    before = described_now(model)
    assert before == described_now(model_of("two layers", seed=1))
    change(model)
    assert said in "; ".join(differences(before, described_now(model)))


def test_atomc_is_described_by_its_own_rules_where_pip_has_installed_it(monkeypatch):
    model = model_of()
    before = described_now(model)
    monkeypatch.setattr(library_code, "_INSTALLED_IN", (str(PACKAGE.parent),))
    assert described_now(model) == before


def test_settings_of_torchs_compilers_and_added_passes_are_part_of_what_it_depends_on(monkeypatch):
    for variable in compiler_variables():
        monkeypatch.delenv(variable.partition("=")[0])
    model = model_of()
    before = described_now(model)
    assert before["setting variables of torch's compilers"] == ""

    def is_changed_by(setting, part):
        """Whether the setting is all that changed, in a part that may have others."""
        after = described_now(model)
        assert setting in after[part].split(", ") and setting not in before[part].split(", ")
        return differences(before, after) == [
            f"{part} changed from {before[part]} to {after[part]}"
        ]

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    with torch._inductor.config.patch(max_fusion_size=7):
        assert is_changed_by("max_fusion_size=7", "setting Inductor's configuration")
    with torch._dynamo.config.patch(specialize_float=True):
        assert is_changed_by("specialize_float=True", "setting of torch._dynamo.config")
    with atomc.register_pass(Pass("mine", run=lambda gm, context: [])):
        assert differences(before, described_now(model)) == ["source of pass mine was added"]
    assert described_now(model) == before
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    said = "setting variables of torch's compilers changed from  to TORCHINDUCTOR_MAX_AUTOTUNE=1"
    assert differences(before, described_now(model)) == [said]


@pytest.mark.parametrize("other", [nn.functional.bilinear, functools.partial(nn.functional.relu)])
def test_a_function_of_torch_in_the_place_of_another_is_seen(monkeypatch, other):
    model = model_of()
    before = described_now(model)
    monkeypatch.setattr(nn.functional, "linear", other)
    (said,) = differences(before, described_now(model))
    assert said.startswith("names in torch.nn.functional changed from ")


@pytest.mark.parametrize(
    "form", [AWQ, GPTQ, GPTQ_V2, MXFP4_PACK_QUANTIZED, PACK_QUANTIZED], ids=lambda form: form.name
)
def test_a_model_of_each_format_of_checkpoints_is_known(form):
    model = model_of("int4")
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            layer.method = replace(layer.method, format=form)
    assert repr(form.name) in described_now(model)["module model.layers.0.self_attn.q_proj"]


@pytest.mark.rotating
@pytest.mark.parametrize("scheme", ["fp8_block", "int4", "mxfp4_a16"])
def test_a_second_start_of_quantized_experts_traces_nothing(tmp_path, scheme):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
    cold, warm = (
        started(quantize(loader.ready(random_model("qwen3_moe", **sizes)), scheme), tmp_path)
        for _ in range(2)
    )
    assert traced_since(cold) == [] and warm.report.phases.keys() == {"cache"}
    assert torch.equal(logits(warm), logits(cold))


def test_a_context_manager_is_known_only_if_it_is_ours(monkeypatch):
    model = quantize(loader.ready(random_model("qwen3_moe", hidden_size=128)), "fp8_block")
    described_now(model)
    users = contextlib.contextmanager(lambda: iter([None]))
    # Found by its name, as only a function of the module itself is.
    users.__module__, users.__qualname__ = experts_spec.__name__, "outside_of_modes"
    monkeypatch.setattr(experts_spec, "outside_of_modes", users)
    with pytest.raises(Uncacheable, match=r"experts_spec\.outside_of_modes is "):
        described_now(model)


def test_the_key_has_the_source_of_every_kernel_of_ours():
    sources = described_now(model_of())
    files = {
        f"source of atomc/{path.relative_to(PACKAGE)}" for path in PACKAGE.glob("kernels/**/*.py")
    }
    assert files and files <= sources.keys()


def test_a_provider_that_can_be_imported_again_is_a_miss(tmp_path, monkeypatch):
    def outcome():
        return started(model_of(), tmp_path).report.cache

    load = kernels.load
    with monkeypatch.context() as broken:
        broken.setattr(kernels, "load", lambda name: "broken" if name == "zentorch" else load(name))
        assert (outcome(), outcome()) == ("miss: the cache is empty", "hit")
    assert outcome() == "miss: provider zentorch can be imported now"
    assert outcome() == "hit"


def test_a_model_that_contains_itself_is_described():
    model = model_of()
    model.model.norm.owner = model
    assert ", child owner is none" in described_now(model)["module model.norm"]


def test_a_changed_model_is_traced_and_the_change_is_named(start):
    changed = model_of()
    set_eps(changed)
    expected = plain(changed)
    program = start(changed)
    assert program.report.cache.startswith(
        "miss: module model.norm changed from atomc.models.layers.RMSNorm, eps=1e-05, "
    )
    assert "dynamo" in program.report.phases
    same(logits(program), expected)


def test_a_changed_option_is_named(start):
    assert (
        start(model_of(), rounding="hf").report.cache
        == "miss: option rounding changed from 'fp32' to 'hf'"
    )


class Doubled(layers.MLP):
    def forward(self, x):
        return 2 * super().forward(x)


def hook(model, patch):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: 2 * out)
    return "model.layers.0.mlp has a hook (forward_hooks)"


def another_class(model, patch):
    model.model.layers[0].mlp.__class__ = Doubled
    return "model.layers.0.mlp is a test_model_cache.Doubled, a class outside atomc, transformers and torch.nn"


def forward_of_the_module(model, patch):
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: 2 * layers.MLP.forward(mlp, x)
    return "model.layers.0.mlp.forward is forward_of_the_module.<locals>.<lambda> of "


def forward_of_the_class(model, patch):
    own = layers.MLP.forward
    patch.setattr(layers.MLP, "forward", lambda self, x: 2 * own(self, x))
    return (
        "atomc.models.layers.MLP.forward was replaced by forward_of_the_class.<locals>.<lambda> of "
    )


def a_function_beside_the_class(model, patch):
    own = llama.apply_rope
    patch.setattr(
        llama,
        "apply_rope",
        lambda q, k, cos, sin: (2 * own(q, k, cos, sin)[0], own(q, k, cos, sin)[1]),
    )
    return "atomc.models.llama.apply_rope is a_function_beside_the_class.<locals>.<lambda> of "


def a_function_of_torch(model, patch):
    own = nn.functional.silu
    patch.setattr(nn.functional, "silu", lambda x, **more: 2 * own(x, **more))
    return "torch.nn.functional.silu is a_function_of_torch.<locals>.<lambda> of "


def a_decorated_function(model, patch):
    # The code of the decorator is torch's; what it calls is somebody's.
    patch.setattr(nn.functional, "silu", torch.no_grad()(lambda x, **more: x))
    return "torch.nn.functional.silu is a_decorated_function.<locals>.<lambda> of "


def a_function_in_another_precision(model, patch):
    patch.setattr(nn.functional, "silu", torch.autocast("cpu")(nn.functional.silu))
    return "torch.nn.functional.silu is silu of "


def a_forward_of_torch_that_calls_another(model, patch):
    own = nn.Linear.forward
    patch.setattr(nn.Linear, "forward", torch.no_grad()(lambda self, x: 2 * own(self, x)))
    return (
        "torch.nn.modules.linear.Linear.forward is "
        "a_forward_of_torch_that_calls_another.<locals>.<lambda> of "
    )


def an_object_for_a_method(model, patch):
    patch.setattr(layers.MLP, "forward", functools.partialmethod(layers.MLP.forward))
    patch.setattr(layers.MLP, "__call__", functools.partial(lambda x: x))
    return "atomc.models.layers.MLP.__call__ is a functools.partial, which is not code of atomc"


class Called:
    def __call__(self, x):
        return x


def an_object_for_a_function(model, patch):
    patch.setattr(nn.functional, "silu", Called())
    return "torch.nn.functional.silu is a test_model_cache.Called, which is not code of atomc"


def an_attribute_without_a_text(model, patch):
    model.model.norm.lock = object()
    return "model.norm.lock is a builtins.object, which cannot be compared between processes"


def an_attribute_that_contains_itself(model, patch):
    model.model.norm.list = []
    model.model.norm.list.append(model.model.norm.list)
    return "model.norm.list contains itself"


def a_sparse_tensor(model, patch):
    weight = model.model.norm.weight
    model.model.norm.weight = nn.Parameter(weight.data.to_sparse(), requires_grad=False)
    return "model.norm.weight is a Parameter with layout torch.sparse_coo"


def prepared(model, patch):
    atomc.prepare(model)
    return "atomc.models.decoder.Layer.forward was replaced by "


REFUSED = [
    hook,
    another_class,
    forward_of_the_module,
    forward_of_the_class,
    a_function_beside_the_class,
    a_function_of_torch,
    a_decorated_function,
    a_function_in_another_precision,
    a_forward_of_torch_that_calls_another,
    an_object_for_a_method,
    an_object_for_a_function,
    an_attribute_without_a_text,
    an_attribute_that_contains_itself,
    a_sparse_tensor,
    prepared,
]


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_what_cannot_be_described_is_not_known(monkeypatch, change):
    model = model_of("two layers")
    why = change(model, monkeypatch)
    with pytest.raises(Uncacheable) as error:
        described_now(model)
    assert str(error.value).startswith(why)
    atomc.unprepare(model)


def test_under_a_mode_of_torch_or_with_a_hook_on_all_modules_no_model_is_known():
    model = model_of()
    with (
        torch.device("cpu"),
        pytest.raises(Uncacheable, match="a torch function or dispatch mode is active"),
    ):
        described_now(model)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    with pytest.raises(Uncacheable, match="a global module hook"):
        described_now(model)
    handle.remove()
    described_now(model)


@pytest.mark.rotating
def test_what_is_not_known_is_traced_at_each_start(start, monkeypatch):
    for _ in range(2):
        model = model_of()
        why = hook(model, monkeypatch)
        expected = plain(model)
        program = start(model)
        assert traced_since(program) == [f"traced at each start: {why}"]
        same(logits(program), expected)


def test_who_wants_to_see_graphs_gets_them(start):
    seen = []
    program = compile_model(
        model_of(),
        {"glue": "eager", "cache": False},
        observers=[lambda name, gm: seen.append(name)],
    )
    assert seen and traced_since(program) == []
    program = start(model_of(), report=os.devnull)
    assert "dynamo" in program.report.phases and traced_since(program) == []


# Entries


def entry_of_the_model(folder):
    (path,) = [
        path
        for path in folder.glob("*.atomc")
        if b'"model": "atomc.models.llama' in path.read_bytes()
    ]
    return path


@pytest.mark.parametrize("damage", ["a byte", "everything"])
def test_a_damaged_entry_is_rebuilt_from_that_of_the_graph(start, tmp_path, damage, caplog):
    entry = entry_of_the_model(tmp_path / "cache")
    whole = entry.read_bytes()
    middle = len(whole) // 2
    entry.write_bytes(
        {
            "a byte": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            "everything": b"",
        }[damage]
    )
    with caplog.at_level(logging.WARNING, "atomc"):
        program = start(model_of())
    assert program.report.cache == "hit" and "passes" not in program.report.phases
    (note,) = traced_since(program)
    assert note.startswith(
        "traced, and then found in the cache: the entry was damaged and is rebuilt: "
    )
    assert "rebuilds a damaged cache entry" in caplog.text
    same(logits(program), plain(model_of()))
    assert start(model_of()).report.phases.keys() == {"cache"}


@pytest.mark.rotating
def test_either_entry_may_have_been_evicted(start, tmp_path):
    folder = tmp_path / "cache"
    model = entry_of_the_model(folder)
    (graph,) = set(folder.glob("*.atomc")) - {model}
    graph.unlink()
    assert start(model_of()).report.phases.keys() == {"cache"}
    model.unlink()
    assert start(model_of()).report.cache == "miss: the cache is empty"
    model.unlink()
    program = start(model_of())
    assert program.report.cache == "hit" and "dynamo" in program.report.phases
    assert traced_since(program) == ["traced, and then found in the cache: no entry for this model"]


def test_a_folder_that_cannot_be_written_breaks_nothing(start, tmp_path):
    (tmp_path / "file").write_text("")
    program = start(model_of(), tmp_path / "file" / "cache")
    assert "not kept: " in program.report.cache
    same(logits(program), plain(model_of()))


def test_nothing_is_loaded_from_where_others_may_write(start, tmp_path):
    folder = tmp_path / "cache"
    folder.chmod(0o777)
    program = start(model_of())
    assert program.report.cache == f"off: {folder} may be written by other users"
    assert "dynamo" in program.report.phases


@pytest.mark.rotating
def test_a_changed_kernel_is_named_and_compiled_anew(start, tmp_path):
    def with_kernel(factor):
        with users_kernel.registered(tmp_path, factor):
            program = start(model_of())
            return program.report.cache, logits(program)

    with_kernel(1)
    assert with_kernel(1)[0] == "hit"
    said, doubled = with_kernel(2.0)
    assert said == "miss: source of kernel mine rms_norm changed"
    assert not torch.allclose(doubled, plain(model_of()))


# Processes

TOKENS = """
import json, sys
from atomc.runtime.llm import LLM
from atomc.runtime.requests.sampling_params import SamplingParams

llm = LLM(sys.argv[1], device="cpu", options={"glue": "eager"})
(answer,) = llm.generate(["once upon a time"], SamplingParams(max_tokens=8, temperature=0))
report = llm.engine.program.report
print(json.dumps({"cache": report.cache, "tokens": list(answer.token_ids), "phases": list(report.phases),
                  "loaded": [name for name in sys.argv[2:] if name in sys.modules]}))
"""
TRACING = (
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch.aot_autograd",
    "torch.fx.experimental.symbolic_shapes",
    "sympy",
    "transformers",
    "atomc.passes",
    "atomc.compiler.driver",
    "atomc.compiler.trace_model",
    "triton",
    "atomc.kernels.aiter",
    "atomc.kernels.torch.ssm",
)


def process(model, folder):
    environment = {**os.environ, "ATOMC_CACHE": "1", "ATOMC_CACHE_DIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", TOKENS, model, *TRACING],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def said(running):
    out, error = running.communicate()
    assert running.returncode == 0, error
    return json.loads(out.splitlines()[-1])


@pytest.fixture
def first_layer_of_the_demo(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(demo.PATH, folder, ignore=shutil.ignore_patterns("__*"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    weights = load_file(folder / "model.safetensors")
    kept = {name: x for name, x in weights.items() if not re.search(r"layers\.[12]\.", name)}
    save_file(kept, folder / "model.safetensors")
    return folder


@pytest.mark.rotating
@pytest.mark.parametrize("at_once", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_new_process_generates_without_importing_what_traces(
    first_layer_of_the_demo, tmp_path, at_once
):
    model, folder = first_layer_of_the_demo, tmp_path / "cache"
    started = [process(model, folder) for _ in range(at_once)]
    cold, *others = map(said, started)
    warm = said(process(model, folder))
    assert cold["loaded"]
    assert all(other["tokens"] == cold["tokens"] for other in (*others, warm))
    assert (warm["cache"], warm["phases"], warm["loaded"]) == ("hit", ["cache"], [])
