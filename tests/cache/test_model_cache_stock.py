"""A transformers model that the cache knows is not traced: what it then computes, and what makes it
another model.
"""

import gc
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_model_cache import described_now, logits, started, traced_since
from torch import nn

from atomc import LLM, SamplingParams, models
from atomc.cache.artifact import Uncacheable
from atomc.cache.store import differences
from atomc.quantization import quantize
from atomc.stock.adapter import wrap_stock

transformers = pytest.importorskip("transformers")
from transformers.models.llama import modeling_llama  # noqa: E402
from transformers.models.mistral import modeling_mistral  # noqa: E402

pytestmark = pytest.mark.xdist_group("known")
SMALL = {
    "num_hidden_layers": 2,
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
ROWS: dict[str, tuple[str, dict[str, Any], str]] = {
    "dense": ("Llama", {}, ""),
    "windows": ("Gemma2", {}, ""),
    "experts": ("Mixtral", {"num_local_experts": 4}, ""),
    "recurrent state": ("Qwen3Next", LINEAR, ""),
    "fp8": ("Qwen2", {}, "fp8"),
}


@pytest.fixture(autouse=True)
def _without_models_of_other_tests() -> None:
    """While a prepared model is there, its classes have another forward."""
    gc.collect()


def model_of(row: str = "dense") -> nn.Module:
    kind, config, scheme = ROWS[row]
    sizes = getattr(transformers, f"{kind}Config")(**SMALL, **config)
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}ForCausalLM")(sizes).eval().requires_grad_(False)
    model = wrap_stock(made)
    return quantize(model, scheme) if scheme else model


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if row == "dense" else pytest.mark.slow) for row in ROWS]
)
def test_a_second_start_traces_nothing_and_computes_the_same(tmp_path: Path, row: str) -> None:
    cold, warm = (started(model_of(row), tmp_path) for _ in range(2))
    assert (cold.report.cache, warm.report.cache) == ("miss: the cache is empty", "hit")
    assert "dynamo" in cold.report.phases and warm.report.phases.keys() == {"cache"}
    assert traced_since(cold) == traced_since(warm) == [] and warm.specs == cold.specs
    assert warm.key == cold.key is not None
    assert torch.equal(logits(warm), logits(cold))


Change = Callable[[Any, pytest.MonkeyPatch], str]


def a_number_of_its_config(model: Any, patch: pytest.MonkeyPatch) -> str:
    model.hf_model.config.pretraining_tp = 3
    return "module (root)"


def an_attribute_of_a_layer(model: Any, patch: pytest.MonkeyPatch) -> str:
    model.hf_model.model.layers[1].self_attn.scaling = 0.5
    return "module hf_model.model.layers.1.self_attn"


def a_function_of_another_model(model: Any, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(modeling_llama, "rotate_half", modeling_mistral.rotate_half)
    return "names in transformers.models.llama.modeling_llama"


def a_method_of_another_class(model: Any, patch: pytest.MonkeyPatch) -> str:
    other = modeling_mistral.MistralMLP.forward
    patch.setattr(modeling_llama.LlamaMLP, "forward", other)
    return "names in transformers.models.llama.modeling_llama"


def the_masks_of_an_attention(model: Any, patch: pytest.MonkeyPatch) -> str:
    masks = transformers.masking_utils.AttentionMaskInterface._global_mapping
    patch.setitem(masks, "atom", masks["eager"])
    return "names in transformers.masking_utils"


@pytest.mark.parametrize(
    "change",
    [
        a_number_of_its_config,
        an_attribute_of_a_layer,
        a_function_of_another_model,
        a_method_of_another_class,
        the_masks_of_an_attention,
    ],
    ids=lambda change: change.__name__,
)
def test_a_change_of_a_model_is_seen(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    model = model_of()
    before = described_now(model)
    assert before == described_now(model_of())
    place = change(model, monkeypatch)
    assert place in [
        line.split(" changed")[0] for line in differences(before, described_now(model))
    ]


def a_function_of_mine(model: Any, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(modeling_llama, "rotate_half", lambda x: x)
    return "transformers.models.llama.modeling_llama.rotate_half is a_function_of_mine.<locals>"


def a_method_of_mine(model: Any, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: x)
    return "transformers.models.llama.modeling_llama.LlamaMLP.forward is a_method_of_mine.<locals>"


def a_mask_of_mine(model: Any, patch: pytest.MonkeyPatch) -> str:
    masks = transformers.masking_utils.AttentionMaskInterface._global_mapping
    patch.setitem(masks, "mine", lambda *_, **__: None)
    return "transformers.masking_utils.AttentionMaskInterface._global_mapping is a_mask_of_mine"


def a_hook(model: Any, patch: pytest.MonkeyPatch) -> str:
    model.hf_model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    return "hf_model.model.layers.0.mlp has a hook (forward_hooks)"


class Mine(modeling_llama.LlamaMLP):  # type: ignore[misc]
    pass


def a_layer_of_mine(model: Any, patch: pytest.MonkeyPatch) -> str:
    model.hf_model.model.layers[0].mlp.__class__ = Mine
    return "hf_model.model.layers.0.mlp is a test_model_cache_stock.Mine, a class outside "


def an_object_of_mine_in_its_config(model: Any, patch: pytest.MonkeyPatch) -> str:
    model.config.mine = Object()
    return "config is a test_model_cache_stock.Object, which cannot be compared"


class Object:
    pass


@pytest.mark.parametrize(
    "change",
    [
        a_function_of_mine,
        a_method_of_mine,
        a_mask_of_mine,
        a_hook,
        a_layer_of_mine,
        an_object_of_mine_in_its_config,
    ],
    ids=lambda change: change.__name__,
)
def test_what_cannot_be_described_is_not_known(
    monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    model = model_of()
    why = change(model, monkeypatch)
    with pytest.raises(Uncacheable) as error:
        described_now(model)
    assert str(error.value).startswith(why)


def digests(row: str) -> dict[str, str]:
    return {
        name: hashlib.sha256(text.encode()).hexdigest()
        for name, text in described_now(model_of(row)).items()
    }


@pytest.mark.rotating
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if row == "experts" else pytest.mark.slow) for row in ROWS],
)
def test_two_processes_describe_a_model_in_the_same_words(row: str) -> None:
    program = f"import json, test_model_cache_stock as t; print(json.dumps(t.digests({row!r})))"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            text=True,
            stdout=subprocess.PIPE,
        )
        for seed in ("7", "8")
    ]
    first, second = (json.loads(each.communicate()[0].splitlines()[-1]) for each in running)
    assert differences(first, second) == []


@pytest.mark.slow
def test_a_second_start_of_a_class_with_images_traces_none_of_its_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("tokenizers", "PIL"):
        pytest.importorskip(library)
    import image_files

    monkeypatch.setattr(models, "REGISTRY", {})  # Qwen3-VL has a file of ours
    image_files.write_vision_model(tmp_path / "model")
    cache = {"glue": "eager", "cache": True, "cache_dir": str(tmp_path / "cache")}
    url = image_files.data_url(image_files.encoded(image_files.picture(40, 24)))
    image = {"type": "image_url", "image_url": {"url": url}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "what"}]}]
    found = []
    for _ in range(2):
        with LLM(str(tmp_path / "model"), options=cache, device="cpu", progress=False) as llm:
            of = llm.engine.executor.programs
            programs = [of.main, of.steps["images"], of.encoder.encode]
            (answer,) = llm.chat([messages], SamplingParams(max_tokens=6, temperature=0))
            kinds = [program.report.cached.kind for program in programs]
        found.append((answer.token_ids, kinds))
    assert [kinds for _, kinds in found] == [["miss"] * 3, ["hit"] * 3]
    assert found[0][0] == found[1][0]
