"""Counts of the tokens that each expert of a mixture gets, while a model is served."""

import pytest
import torch
from serving import serving
from test_models import hf_model
from test_moe_models import GLM, theirs_of

pytest.importorskip("msgspec")  # of the server
import httpx

from atomc import ops
from atomc.loading import loader
from atomc.program import compile_model
from atomc.runtime.llm import LLM
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.scheduling.stats import Stats
from atomc.runtime.server.engines.engine_group import Engines
from atomc.runtime.server.metrics import Metrics

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("compiled_once")
EXPERTS, CHOSEN, LAYERS = 4, 2, 2
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7]]
PATHS = [f"model.layers.{layer}.mlp.experts" for layer in range(LAYERS)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
EAGER = {"glue": "eager", "strict": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny Qwen3-MoE of two layers."""
    folder = tmp_path_factory.mktemp("moe")
    hf_model(
        "qwen3_moe",
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=32,
        head_dim=16,
        num_hidden_layers=LAYERS,
    ).save_pretrained(folder)
    return folder


def served(checkpoint, **settings):
    return LLM(checkpoint, progress=False, num_blocks=64, options=EAGER, **settings)


def test_padding_and_experts_of_other_devices_are_not_counted():
    ids = torch.tensor([[0, 2], [2, 3], [-1, 2], [1, 4], [3, 0]], dtype=torch.int32)
    slots = torch.tensor([7, 0, 5, 1, -1])
    counts = torch.tensor([10, 0, 0, 0])
    ops.count_experts(ids, slots, counts)
    assert counts.tolist() == [11, 1, 3, 1]


def test_a_served_mixture_counts_what_its_routers_chose(checkpoint):
    llm = served(checkpoint, expert_load=True)
    assert llm.engine.stats().expert_load == {path: [0] * EXPERTS for path in PATHS}  # warmed up
    outputs = llm.generate(PROMPTS, GREEDY)
    expected = {path: torch.zeros(EXPERTS, dtype=torch.int64) for path in PATHS}
    model = loader.load(checkpoint)

    def count(path):
        def hook(module, args):
            expected[path].add_(args[1].flatten().bincount(minlength=EXPERTS))

        return hook

    for path in PATHS:
        model.get_submodule(path).register_forward_pre_hook(count(path))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = torch.tensor([*prompt, *output.token_ids[:-1]])  # the last one is never computed
        model(tokens, torch.arange(len(tokens)))
    assert llm.engine.stats().expert_load == {
        path: counts.tolist() for path, counts in expected.items()
    }


@pytest.mark.rotating
def test_without_the_option_the_graph_is_the_same_as_without_the_pass(checkpoint):
    model = loader.load(checkpoint)
    graphs = {}
    for name, options in {
        "off": {},
        "no pass": {"passes": {"expert_load": False}},
        "on": {"expert_load": True},
    }.items():
        stages = graphs[name] = []
        program = compile_model(
            model,
            EAGER | {"cache": False} | options,
            observers=[lambda stage, gm, stages=stages: stages.append((stage, gm.code))],
        )
        counted = LAYERS if name == "on" else 0
        assert program.report.matches["expert_load"] == len(program.expert_load()) == counted
        assert ("count_experts" in stages[-1][1]) == (name == "on")
    assert graphs["off"] == graphs["no pass"]
    assert graphs["off"] != graphs["on"]


def test_a_shared_expert_is_not_counted(tmp_path):
    """It is one more of the chosen experts in the op that is counted."""
    theirs_of("glm4_moe", **GLM).save_pretrained(tmp_path)
    options = EAGER | {"cache": False, "expert_load": True, "passes": {"shared_expert": True}}
    program = compile_model(loader.load(tmp_path), options)
    assert program.report.matches["shared_expert"] == 1
    assert [len(counts) for counts in program.expert_load().values()] == [8]


@pytest.mark.rotating
def test_counts_are_kept_by_a_program_from_the_cache(checkpoint, tmp_path):
    options = EAGER | {"expert_load": True, "cache": True, "cache_dir": str(tmp_path)}
    loads = []
    for _ in range(2):
        llm = LLM(checkpoint, progress=False, num_blocks=64, options=options)
        llm.generate(PROMPTS, GREEDY)
        loads.append(llm.engine.stats().expert_load)
    assert llm.program.report.cache == "hit"
    assert loads[0] == loads[1] and all(map(sum, loads[0].values()))


class _Engine:
    """The part of an engine's client that metrics read."""

    unhealthy_reason, restarts = "", 0

    def __init__(self, stats):
        self.stats = stats


def stats_of(**counts):
    """The stats of an engine without requests."""
    gauges = {"running": 0, "waiting": 0, "kv_blocks_used": 0, "kv_blocks_total": 1}
    return Stats(**gauges, kv_tokens=16, max_len=16, **counts)


def metrics_of(stats):
    return Metrics(Engines([_Engine(stats)]), "m").text().decode()


def test_metrics_have_the_total_and_the_imbalance_of_each_layer():
    stats = stats_of(expert_load={"layers.0": [6, 1, 1, 0], "layers.1": [0] * 4})
    text = metrics_of(stats)
    labels = 'engine="0",layer="layers.0",model_name="m"'
    assert f"atomc:expert_tokens_total{{{labels}}} 8.0" in text
    assert f"atomc:expert_load_imbalance{{{labels}}} 3.0" in text
    assert 'atomc:expert_load_imbalance{engine="0",layer="layers.1",model_name="m"} 0.0' in text
    assert "expert" not in metrics_of(stats_of())


def test_metrics_have_the_limit_of_prompt_tokens():
    text = metrics_of(stats_of(prompt_limit=64))
    assert 'atomc:step_prompt_tokens_limit{engine="0",model_name="m"} 64.0' in text


@pytest.mark.rotating
@pytest.mark.parametrize("ranks", [[], pytest.param(["--dp", 2, "--ep"], marks=pytest.mark.slow)])
def test_a_server_returns_the_tokens_of_each_expert(checkpoint, ranks):
    flags = ["--num-blocks", 64, "--options", "glue=eager", "--expert-load", *ranks]
    with serving(checkpoint, *flags) as server:
        body = {"model": checkpoint.name, "prompt": PROMPTS[0], "max_tokens": 4}
        body |= {"ignore_eos": True, "temperature": 0}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
        tokens = httpx.get(f"{server.url}/experts", timeout=60).json()["tokens"]
        computed = len(PROMPTS[0]) + 3
        assert {path: sum(counts) for path, counts in tokens.items()} == dict.fromkeys(
            PATHS, CHOSEN * computed
        )
        assert "atomc:expert_tokens_total{" in httpx.get(f"{server.url}/metrics").text


@pytest.mark.slow
def test_a_server_without_the_flag_says_what_to_set(checkpoint):
    with serving(checkpoint, "--num-blocks", 64, "--options", "glue=eager") as server:
        answer = httpx.get(f"{server.url}/experts", timeout=60)
        assert answer.status_code == 400
        assert "start the server with --expert-load" in answer.json()["error"]["message"]
