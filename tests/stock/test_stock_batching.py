"""transformers' continuous batching through the backend: one graph a step, and the tokens that
`generate` gives for each prompt alone.
"""

import gc
import sys

import pytest
import torch
from rewriting import since
from test_stock_programs import built, compile_config, ids

import atomc
from atomc.stock.batching import ATTENTION, _sequences
from atomc.weights import registry

transformers = pytest.importorskip("transformers", reason="its generate_batch is tested")

PAGE = 4  # the first argument of the config, whose name differs between versions
SETTINGS = {"num_blocks": 24, "max_batch_tokens": 64}
PADDED = {"q_padding_interval_size": 16, "kv_padding_interval_size": 32}
PROMPTS = [torch.arange(2, 2 + count).tolist() for count in (9, 5, 17)]
GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 95, "pad_token_id": 0}


def alone(model) -> list[list[int]]:
    config = transformers.GenerationConfig(**GREEDY)
    return [
        model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


def batched(model, **settings) -> list[list[int]]:
    out = model.generate_batch(
        PROMPTS,
        generation_config=transformers.GenerationConfig(**GREEDY),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            PAGE, **SETTINGS | settings
        ),
        progress_bar=False,
    )
    by_number = sorted(out, key=lambda name: int(name.rpartition("_")[2]))
    return [out[name].generated_tokens for name in by_number]


MODELS = ("GptOss", "Qwen3", "Llama", "Gemma2", "Mixtral", "Olmo2")


# Gemma 2 has a layer with a window, which is a ring, one without, and capped scores; GPT-OSS sinks.
@pytest.mark.rotating
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x == "Gemma2" else pytest.mark.slow) for x in MODELS]
)
def test_a_prepared_model_runs_each_step_of_a_batch_as_one_graph(name: str) -> None:
    model = built(name)
    expected, before = alone(model), atomc.reports()
    assert atomc.prepare_batching(model) is model
    assert batched(model) == expected
    compiled = batched(model, varlen_compile_config=compile_config(), **PADDED)
    assert compiled == expected
    reports = since(before)
    assert len(reports) == 2, "one graph for the sizes of the warm-up, one for all others"
    for report in reports:
        assert report.treated and report.graph_break is None
        assert report.matches["paged_attention"] == 2
        assert "functionalized" not in report.stages[-1].text, "the cache is copied"


def without_cache(forward):
    return lambda *args, cache=None, **options: forward(*args, **options)


def test_a_batch_of_an_attention_that_misses_the_cache_is_refused() -> None:
    model = atomc.prepare_batching(built("Llama"))
    for layer in model.model.layers:
        layer.self_attn.forward = without_cache(layer.self_attn.forward)
    for _ in range(2):
        with pytest.raises(ValueError, match="prepared batching computes something else"):
            batched(model)
    atomc.prepare_batching(model, self_check=False)
    assert len(batched(model)) == len(PROMPTS)


@pytest.mark.rotating
def test_a_batch_that_fails_is_refused_with_its_error(monkeypatch) -> None:
    model = atomc.prepare_batching(built("Llama"))
    monkeypatch.delattr("atomc.stock.batching._sequences")
    with pytest.raises(ValueError, match=r"prepared batching fails: .*_sequences"):
        batched(model)


@pytest.mark.rotating
def test_prepared_batching_can_be_undone_before_its_first_batch() -> None:
    model = built("Llama")
    expected = alone(model)
    atomc.prepare_batching(model).set_attn_implementation("sdpa")
    assert batched(model) == expected


def test_a_padded_step_of_prompts_is_not_a_decode_step() -> None:
    # Four rows of four sequences, two of them padding: AITER's kernels would give each one a row.
    query_start, seq_lens, tables = _sequences(
        torch.tensor([0, 3, 4, 4, 4]), torch.tensor([3, 1, 0, 0]), torch.tensor([[0], [1]] * 2), 4
    )
    assert query_start.tolist() == [0, 3, 4, 4, 4, 4] and seq_lens.tolist() == [3, 1, 0, 0, 0]
    assert tables.tolist() == [[0], [1], [0], [1], [0]]


@pytest.mark.slow
def test_a_model_that_is_not_prepared_gives_the_same_tokens_with_a_break_a_layer() -> None:
    model = built("Qwen3")
    expected, before = alone(model), atomc.reports()
    config = compile_config(fullgraph=False)
    assert batched(model, varlen_compile_config=config, **PADDED) == expected
    assert any(report.graph_break for report in since(before))


@pytest.mark.parametrize("name", ["Qwen3", "GptOss"])
def test_other_calls_of_a_prepared_model_are_unchanged(name: str) -> None:
    model, mask = built(name), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :3] = 0
    with torch.no_grad():
        expected = model(ids(), attention_mask=mask).logits
        atomc.prepare_batching(atomc.prepare_batching(model))
        found = model(ids(), attention_mask=mask).logits
    assert ATTENTION in model.config._attn_implementation
    torch.testing.assert_close(found[mask == 1], expected[mask == 1])


def test_a_model_with_an_attention_of_its_own_is_refused() -> None:
    config = transformers.RwkvConfig(hidden_size=32, num_hidden_layers=2, vocab_size=96)
    with pytest.raises(ValueError, match="RwkvForCausalLM does not support a custom attention"):
        atomc.prepare_batching(transformers.RwkvForCausalLM(config))


@pytest.mark.rotating
def test_a_parameter_may_die_after_the_names_of_a_module(monkeypatch) -> None:
    caught: list[object] = []
    parameter = registry.parameter_of(torch.ones(2))
    with monkeypatch.context() as at_exit:
        at_exit.setattr(registry, "_table", None)
        at_exit.setattr(sys, "unraisablehook", caught.append)
        del parameter
        gc.collect()
    assert not caught
