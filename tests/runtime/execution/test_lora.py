"""LoRA adapters in the runtime: several in one batch, against transformers with merged weights."""

import copy

import pytest
import torch
from tiny_lora import merge, shapes_of, write_adapter

from atomc.loading import loader
from atomc.runtime.execution.lora.files import read_config, read_pairs
from atomc.runtime.llm import LLM
from atomc.runtime.requests.sampling_params import SamplingParams

transformers = pytest.importorskip("transformers", reason="it computes what is expected")

EAGER = {"glue": "eager"}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [2, 7, 1, 8], [1, 6, 1, 8, 0, 3]]
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
NAMES = ["all", None, "queries"]


def built(kind):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, float(parameter.dim() == 1), 0.3)
    return model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders of two models, and of the adapters "all" and "queries"."""
    root = tmp_path_factory.mktemp("lora")
    models = {kind: built(kind) for kind in ("Llama", "Qwen3")}
    for kind, model in models.items():
        model.save_pretrained(root / kind)
    llama = models["Llama"]
    write_adapter(root / "all", shapes_of(llama, *ALL))
    write_adapter(
        root / "queries", shapes_of(llama, "q_proj", "v_proj"), rank=2, seed=2, use_rslora=True
    )
    return root, models


def expected(checkpoints, kind, name, prompt, count=8):
    root, models = checkpoints
    model = models[kind] if name is None else merge(copy.deepcopy(models[kind]), root / name)
    ids = torch.tensor([prompt])
    found = model.generate(ids, do_sample=False, max_new_tokens=count, eos_token_id=None)
    return tuple(found[0, len(prompt) :].tolist())


def served(checkpoints, kind, *, stock=False, names=("all", "queries"), **settings):
    root, models = checkpoints
    model = copy.deepcopy(models[kind]) if stock else root / kind
    settings = {"num_blocks": 64, "options": EAGER, **settings}
    lora = {name: str(root / name) for name in names}
    return LLM(model, lora=lora, progress=False, **settings)


@pytest.fixture(scope="module")
def start(checkpoints, tmp_path_factory):
    """Starts our Llama with room for two adapters in all linear layers; compiles once."""
    folder = tmp_path_factory.mktemp("cache")
    cached = {"cache": True, "cache_dir": str(folder), "layout": "paged"}
    return lambda: served(checkpoints, "Llama", options={**EAGER, **cached}, max_loras=2)


@pytest.fixture(scope="module")
def llm(start):
    return start()


@pytest.mark.rotating
def test_a_second_start_loads_the_program_with_adapters_from_the_cache(checkpoints, llm, start):
    second = start()
    cached = second.engine.executor.programs.lora.program.report.cached
    assert (cached.kind, llm.engine.executor.programs.lora.program.report.cached.kind) == (
        "hit",
        "miss",
    )
    check_mixed_batch(checkpoints, "Llama", second)


def test_each_adapter_of_a_mixed_batch_gives_the_tokens_of_merged_weights(checkpoints, llm):
    check_mixed_batch(checkpoints, "Llama", llm)


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("kind", "stock"),
    [
        ("Qwen3", True),
        pytest.param("Qwen3", False, marks=pytest.mark.slow),
        pytest.param("Llama", True, marks=pytest.mark.slow),
    ],
)
def test_other_classes_do_as_well(checkpoints, kind, stock):
    check_mixed_batch(checkpoints, kind, served(checkpoints, kind, stock=stock))


def check_mixed_batch(checkpoints, kind, llm):
    completions = llm.generate(PROMPTS, GREEDY, lora=NAMES)
    wanted = [expected(checkpoints, kind, *each) for each in zip(NAMES, PROMPTS, strict=True)]
    assert [each.token_ids for each in completions] == wanted
    assert wanted[0] != expected(checkpoints, kind, None, PROMPTS[0])  # the adapter matters
    assert wanted[2] != expected(checkpoints, kind, None, PROMPTS[2])


LONG = [(7 * i + 3) % 64 for i in range(40)]


def test_prefixes_are_shared_by_requests_of_one_load_of_one_adapter_only(checkpoints, llm):
    root, _ = checkpoints

    def cached(name):
        (completion,) = llm.generate([LONG], GREEDY, lora=name)
        assert completion.token_ids == expected(checkpoints, "Llama", name, LONG)
        return completion.num_cached

    assert [cached(name) for name in ("all", None, "queries")] == [0, 0, 0]
    assert [cached(name) for name in ("all", None, "queries")] == [32, 32, 32]
    llm.unload_adapter("queries")
    llm.load_adapter("queries", root / "queries")
    assert cached("queries") == 0  # the name is equal, the load is not
    assert llm.generate([LONG], GREEDY, lora="all")[0].num_cached == 32


@pytest.mark.rotating
@pytest.mark.parametrize(
    "how",
    [
        pytest.param("chunks", marks=pytest.mark.slow),
        "preempted",
        pytest.param("drafts", marks=pytest.mark.slow),
    ],
)
def test_adapters_stay_right_with_chunks_preemption_and_drafts(checkpoints, how):
    settings = {
        "chunks": {"max_num_batched_tokens": 8},
        "preempted": {
            "num_blocks": 6,
            "max_model_len": 64,
            "options": {**EAGER, "layout": "paged"},
        },
        "drafts": {"speculative": "ngram"},
    }[how]
    llm = served(checkpoints, "Llama", **settings)
    prompts = [LONG[:20], LONG[5:30], LONG[10:26]]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    completions = llm.generate(prompts, params, lora=NAMES)
    assert [each.token_ids for each in completions] == [
        expected(checkpoints, "Llama", name, prompt, 24)
        for name, prompt in zip(NAMES, prompts, strict=True)
    ]
    llm.engine.check()
    assert how != "preempted" or llm.engine.stats().preemptions


def test_a_request_keeps_its_adapter_after_it_is_unloaded_and_its_place_is_not_reused(checkpoints):
    root, _ = checkpoints
    llm = served(checkpoints, "Llama", names=("all",), max_loras=1, max_lora_rank=4)
    engine = llm.engine
    engine.add(engine.request("a", LONG[:9], GREEDY, lora="all"))
    engine.step()
    llm.unload_adapter("all")
    with pytest.raises(ValueError, match="no LoRA adapter 'all' is loaded"):
        engine.request("b", LONG, lora="all")
    with pytest.raises(ValueError, match="requests still use 1 that were unloaded"):
        llm.load_adapter("queries", root / "queries")
    tokens = []
    while engine.has_work:
        tokens += [token for output in engine.step() for token in output.token_ids]
    assert tuple(tokens) == expected(checkpoints, "Llama", "all", LONG[:9])
    llm.load_adapter("queries", root / "queries")
    (completion,) = llm.generate([LONG[:9]], GREEDY, lora="queries")
    assert completion.token_ids == expected(checkpoints, "Llama", "queries", LONG[:9])


@pytest.mark.rotating
def test_steps_without_an_adapter_run_the_program_without_them(llm):
    before = llm.engine.stats().steps
    llm.generate(PROMPTS, GREEDY)
    after = llm.engine.stats().steps
    assert {kind for kind in after if after[kind] != before.get(kind)} == {"eager: on a CPU"}
    plain, adapted = (
        llm.program.report.matches,
        llm.engine.executor.programs.lora.program.report.matches,
    )
    assert "lora" not in plain and adapted["lora"] == 2 * 4  # q|k|v, o, gate|up, down
    assert {name: adapted[name] for name in plain if name != "lower"} == {
        name: plain[name] for name in plain if name != "lower"
    }


def quantized_tokens(root, name, prompt, count):
    """Those of the quantized model, to whose layers the adapter's products are added."""
    model = loader.load(root / "Llama", quantization="int8")
    pairs = read_pairs(read_config(str(root / name)))
    for path, (a, b, scale) in pairs.items():

        def add(module, args, y, a=a, b=b, scale=scale):
            return y + args[0] @ a.T @ b.T * scale

        model.get_submodule(path).register_forward_hook(add)
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            last = torch.tensor([len(ids) - 1])
            logits = model(torch.tensor(ids), torch.arange(len(ids)), last)
            ids.append(int(logits[0].argmax()))
    return tuple(ids[len(prompt) :])


@pytest.mark.slow
def test_adapters_of_quantized_layers_read_the_input_before_quantization(checkpoints):
    llm = served(checkpoints, "Llama", quantization="int8")
    adapted, plain = llm.generate([LONG] * 2, GREEDY, lora=["all", None])
    assert adapted.token_ids == quantized_tokens(checkpoints[0], "all", LONG, 8)
    assert adapted.token_ids != plain.token_ids
    matches = llm.engine.executor.programs.lora.program.report.matches
    assert (matches["merge_qkv"], matches["merge_gate_up"], matches["lora"]) == (2, 2, 8)


def test_a_name_that_is_not_loaded_and_another_number_of_names_are_refused(llm):
    with pytest.raises(ValueError, match="no LoRA adapter 'none' is loaded; loaded are"):
        llm.generate(PROMPTS, GREEDY, lora="none")
    with pytest.raises(ValueError, match="2 names in lora for 3 prompts"):
        llm.generate(PROMPTS, GREEDY, lora=["all", None])
    with pytest.raises(ValueError, match="'all' is loaded already"):
        llm.load_adapter("all", "anywhere")
    with pytest.raises(ValueError, match="2 LoRA adapters are loaded, of at most 2"):
        llm.load_adapter("third", "anywhere")
    with pytest.raises(ValueError, match="hidden states with the LoRA adapter"):
        llm.engine.refuse(llm.engine.request("a", [1, 2], pooling="mean", lora="all"))


@pytest.mark.rotating
def test_a_layer_that_adapters_cannot_change_is_named_and_nothing_is_written(
    checkpoints, llm, tmp_path
):
    head = write_adapter(tmp_path / "head", {"lm_head": (64, 32)})
    with pytest.raises(ValueError, match="lm_head of the adapter is not a linear layer"):
        llm.engine.executor.write_adapter(0, str(head))
    (completion,) = llm.generate([LONG], GREEDY, lora="all")
    assert completion.token_ids == expected(checkpoints, "Llama", "all", LONG)
