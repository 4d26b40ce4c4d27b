"""transformers' own generate with a static cache, through the backend."""

from typing import Any

import pytest
import torch
from rewriting import since
from torch import Tensor

import atomc

transformers = pytest.importorskip("transformers", reason="generate is transformers'")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "eos_token_id": None,
    "pad_token_id": 0,
}
NEW_TOKENS = 12


def tiny(name: str, **sizes: Any):
    """A model of this type with random weights."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **TINY, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.to(DEVICE)


def prompts(batch: int) -> Tensor:
    return torch.randint(1, 256, (batch, 9), generator=torch.Generator().manual_seed(1)).to(DEVICE)


@pytest.fixture
def model():
    return tiny("qwen3")


@pytest.fixture
def ids() -> Tensor:
    return prompts(2)


def generated(model, ids, **kwargs):
    return model.generate(
        ids, max_new_tokens=NEW_TOKENS, do_sample=False, cache_implementation="static", **kwargs
    )


@pytest.mark.rotating
def test_generate_with_a_compiled_forward_gives_the_tokens_of_eager(model, ids) -> None:
    expected = generated(model, ids, disable_compile=True)
    before = atomc.reports()
    model.forward = torch.compile(model.forward, backend="atom", options={"glue": "eager"})
    assert torch.equal(generated(model, ids, disable_compile=True), expected)
    reports = since(before)
    assert all(report.treated for report in reports)
    assert len(reports) <= 3, "a graph for the prompt and one for a token, not one per token"


@pytest.mark.rotating
def test_the_cache_is_written_in_place_and_never_copied(model, ids) -> None:
    model.forward = torch.compile(model.forward, backend="atom", options={"glue": "eager"})
    generated(model, ids, disable_compile=True)
    decode = atomc.reports()[-1]
    written = decode.matches["reinplace"]
    assert written >= 2 * TINY["num_hidden_layers"]  # keys and values of each layer
    final = decode.stages[-1].text
    copies = final.count("aten.index_copy_(") + 2 * decode.matches["static_cache"]
    assert copies == 2 * TINY["num_hidden_layers"]
    assert "aten.copy_" not in final


# A window of 12 tokens is full after three new ones.
WINDOWED = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.rotating(each_case=2)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("name", "sizes", "op"),
    [
        ("qwen3", {}, "qk_norm_rope_kv_write"),
        ("gemma3_text", WINDOWED, "qk_norm_rope_kv_write"),
        ("llama", {}, "rope_kv_write"),
        ("olmo2", {}, "rope_kv_write"),
    ],
)
def test_on_a_gpu_a_layer_writes_its_cache_by_one_kernel(
    name: str, sizes: dict[str, Any], op: str, batch: int, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("triton")
    if DEVICE == "cpu":
        request.getfixturevalue("pretended_gpu")
    model, ids = tiny(name, **sizes), prompts(batch)
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, :2] = 0
    calls = [(ids, mask), (ids.flip(1), torch.ones_like(ids))]
    expected = [generated(model, x, attention_mask=m, disable_compile=True) for x, m in calls]
    before = atomc.reports()
    model.forward = torch.compile(model.forward, backend="atom", options={"glue": "eager"})
    for (x, m), tokens in zip(calls, expected, strict=True):
        assert torch.equal(generated(model, x, attention_mask=m, disable_compile=True), tokens)
    written = [report for report in since(before) if report.matches["static_cache"]]
    assert [kernel.op for kernel in written[0].kernels].count(op) == TINY["num_hidden_layers"]
    assert not any("aten.index_copy_" in report.stages[-1].text for report in written)


def test_caches_of_another_length_fuse_as_the_first_did(model, ids) -> None:
    model.forward = torch.compile(model.forward, backend="atom", options={"glue": "eager"})
    generated(model, ids, disable_compile=True)
    longer = torch.cat([ids, ids.flip(1)], 1)
    before = atomc.reports()
    tokens = generated(model, longer, disable_compile=True)
    decode = since(before)[-1]
    assert decode.matches["repeat_kv"] == decode.matches["qk_norm_rope"] == 2
    model.forward = type(model).forward.__get__(model)
    assert torch.equal(tokens, generated(model, longer, disable_compile=True))


@pytest.mark.skipif(
    DEVICE == "cpu", reason="transformers compiles generate by itself on a GPU only"
)
def test_generate_with_a_compile_config_gives_the_tokens_of_eager(model, ids) -> None:
    expected = generated(model, ids, disable_compile=True)
    config = transformers.CompileConfig(backend="atom", mode="reduce-overhead")
    before = atomc.reports()
    assert torch.equal(generated(model, ids, compile_config=config), expected)
    assert any(report.cuda_graphs for report in since(before))
