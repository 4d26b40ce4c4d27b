"""A rank that loads its part of a checkpoint holds little more than that part at any time."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from test_quant_experts_checkpoints import FORMATS, LLM_NAMES, Packed, per_expert
from tiny_experts import random_model, stored, write
from torch import nn
from tracked_bytes import TrackedBytes

from atomc.loading import execute_plan
from atomc.loading.loader import load
from atomc.parallel.division import Division
from atomc.parallel.process_group import Place, TensorParallel

HALF = TensorParallel(1, 2, "ranks")
DIVIDED: dict[str, dict[str, Any]] = {
    "tensor parallel": {"division": Division(Place(HALF))},
    "experts by expert": {"division": Division(Place(HALF), ep=True)},
    "only experts": {"division": Division(Place(experts=HALF))},
}
# No tensor is as large as a tenth of a rank's part.
SIZES = {"num_hidden_layers": 8, "vocab_size": 256, "num_experts": 8}
KINDS: dict[str, dict[str, Any]] = {
    "Qwen3-MoE": SIZES,
    "DeepSeek-V3": SIZES
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}
# Halves of experts are blocks of 128.
BLOCKS = {"intermediate_size": 256, "moe_intermediate_size": 256}
WAYS = [
    pytest.param(how, id=name, marks=() if name == "tensor parallel" else pytest.mark.slow)
    for name, how in DIVIDED.items()
]


class SameThread:
    """A ThreadPoolExecutor that runs jobs in the thread whose operations are tracked."""

    def __init__(self, threads: int) -> None:
        pass

    def __enter__(self) -> "SameThread":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, job: Callable[..., Any], *given: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(job(*given))
        return done

    def shutdown(self, **_: object) -> None:
        pass


def peak_and_share(folder: Path, monkeypatch: pytest.MonkeyPatch, **how: Any) -> tuple[int, int]:
    """Bytes: the most that a rank holds while it loads its part, and its part."""
    monkeypatch.setattr(execute_plan, "ThreadPoolExecutor", SameThread)
    tracked = TrackedBytes()
    with tracked:
        part = load(folder, progress=False, **how)
    share = num_bytes(part)
    assert share <= tracked.peak - tracked.before
    return tracked.peak - tracked.before, share


def num_bytes(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


def write_one_by_one(
    folder: Path, packed: Packed, quantization: dict[str, Any] | None = None, **differs: Any
) -> nn.Module:
    """Stores a tensor of each projection of each expert. The unquantized model."""
    sizes = BLOCKS | differs
    model = random_model("qwen3_moe", **sizes)
    weights = {name: weight.data for name, weight in model.named_parameters()}
    write(folder, "qwen3_moe", per_expert(weights, packed, LLM_NAMES), quantization, **sizes)
    return model


@pytest.mark.covering
@pytest.mark.parametrize("how", DIVIDED.values(), ids=DIVIDED)
@pytest.mark.parametrize(
    ("kind", "largest"),
    [("Qwen3-MoE", 0.6), pytest.param("DeepSeek-V3", 0.7, marks=pytest.mark.slow)],
)
def test_the_peak_of_a_rank_is_at_most_its_part_and_a_tenth(
    kind: str,
    largest: float,
    how: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`largest`: of the whole, a part that is divided. Latents are whole on each rank."""
    differs = KINDS[kind]
    model = random_model("qwen3_moe", **differs)
    write(tmp_path, "qwen3_moe", stored(model), **differs)
    peak, share = peak_and_share(tmp_path, monkeypatch, **how)
    assert share < largest * num_bytes(model)
    assert peak <= 1.1 * share


@pytest.mark.rotating
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", ["fp8 blocks", "int4"])
def test_experts_that_are_stored_quantized_are_stacked_a_layer_at_a_time(
    name: str, how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantization, packed, _ = FORMATS[name]
    write_one_by_one(tmp_path, packed, quantization, num_hidden_layers=12)
    peak, share = peak_and_share(tmp_path, monkeypatch, **how)
    assert share < 0.7 * num_bytes(load(tmp_path, progress=False))
    assert peak <= 1.1 * share


@pytest.mark.rotating
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("scheme", ["fp8_block", "int4"])
def test_a_rank_that_quantizes_also_holds_its_part_of_the_experts_of_one_layer(
    scheme: str, how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = {"num_hidden_layers": 3, "num_experts": 16}
    model = write_one_by_one(tmp_path, lambda weight: {"weight": weight}, **layers)
    online = {"scheme": scheme, "ignore": ["re:.*self_attn.*"]}
    peak, share = peak_and_share(tmp_path, monkeypatch, quantization=online, **how)
    experts = num_bytes(model.get_submodule("model.layers.0.mlp.experts")) // 2
    # And the intermediate results of one expert.
    assert peak <= share + 1.5 * experts
