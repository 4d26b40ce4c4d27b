"""LoRA adapters in the runtime: several in one batch, against transformers with merged weights."""

import copy

import pytest
import torch
from tiny_lora import merge, shapes_of, write_adapter

from atomc.runtime.llm import LLM
from atomc.runtime.sampling.sampling_params import SamplingParams

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


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_each_adapter_of_a_mixed_batch_gives_the_tokens_of_merged_weights(checkpoints, kind, stock):
    llm = served(checkpoints, kind, stock=stock)
    completions = llm.generate(PROMPTS, GREEDY, lora=NAMES)
    wanted = [expected(checkpoints, kind, *each) for each in zip(NAMES, PROMPTS, strict=True)]
    assert [each.token_ids for each in completions] == wanted
    assert wanted[0] != expected(checkpoints, kind, None, PROMPTS[0])  # the adapter matters
    assert wanted[2] != expected(checkpoints, kind, None, PROMPTS[2])
