"""Checkpoints of mixtures of experts: a tensor per expert, or stacked as in the model; whole and
damaged.
"""

import logging
from pathlib import Path

import pytest
import torch
from test_loader import assert_holds, checkpoint, halves, refusal, weights
from torch import Tensor

from atomc.loading.checkpoint_files import load_config, stored_tensors
from atomc.loading.create_model import create_model
from atomc.loading.load_plan import Copy, plan_load
from atomc.loading.loader import load

QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,  # as wide as the model: shapes do not tell that it is transposed
}
OLDER_NAMES = {
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
}
EXPERTS = "model.layers.0.mlp.experts"


def one_tensor_per_expert(tensors: dict[str, Tensor], model_type: str) -> dict[str, Tensor]:
    """The tensors as transformers 4 stored them."""
    block, gate, up, down = OLDER_NAMES[model_type]
    made = {}
    for name, tensor in tensors.items():
        owner, _, leaf = name.replace(".mlp.", f".{block}.").rpartition(".")
        if leaf == "gate_up_proj":
            for i, expert in enumerate(tensor):
                gate_rows, up_rows = expert.chunk(2)
                made[f"{owner}.{i}.{gate}.weight"] = gate_rows.contiguous()
                made[f"{owner}.{i}.{up}.weight"] = up_rows.contiguous()
        elif leaf == "down_proj":
            for i, expert in enumerate(tensor):
                made[f"{owner}.{i}.{down}.weight"] = expert.contiguous()
        else:
            made[f"{owner}.{leaf}"] = tensor
    return made


@pytest.mark.parametrize("config", [QWEN3_MOE, MIXTRAL], ids=["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("mmap", [True, False], ids=["mapped", "read"])
def test_a_tensor_per_expert_is_stacked(
    config: dict[str, object], mmap: bool, tmp_path: Path
) -> None:
    tensors = weights(**config)
    stored = one_tensor_per_expert(tensors, str(config["model_type"]))
    assert len(stored) == len(tensors) + 2 * (3 * 3 - 2)
    path = checkpoint(tmp_path, *halves(stored), **config)
    assert_holds(load(path, mmap=mmap), tensors)
    in_bf16 = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert_holds(load(path, mmap=mmap, dtype=torch.bfloat16), in_bf16)


def test_stacked_experts_are_read_as_they_are(tmp_path: Path) -> None:
    tensors = weights(**QWEN3_MOE)
    assert_holds(load(checkpoint(tmp_path, tensors, **QWEN3_MOE)), tensors)


def test_experts_of_gpt_oss_are_stored_transposed(tmp_path: Path) -> None:
    tensors = weights(**GPT_OSS)
    stored = {
        name: tensor.mT.contiguous() if name.endswith(("gate_up_proj", "down_proj")) else tensor
        for name, tensor in tensors.items()
    }
    assert_holds(load(checkpoint(tmp_path, stored, **GPT_OSS)), tensors)


def test_a_tensor_per_expert_of_gpt_oss_is_refused_for_its_rows_alternate(tmp_path: Path) -> None:
    stored = one_tensor_per_expert(weights(**GPT_OSS), "qwen3_moe")
    text = refusal(checkpoint(tmp_path, stored, **GPT_OSS))
    assert f"missing {EXPERTS}.gate_up_proj, {EXPERTS}.down_proj" in text
    assert f"unexpected {EXPERTS}.0.down_proj.weight, {EXPERTS}.0.gate_proj.weight" in text


def test_every_parameter_owns_just_its_memory(tmp_path: Path) -> None:
    stored = one_tensor_per_expert(weights(**QWEN3_MOE), "qwen3_moe")
    model = load(checkpoint(tmp_path, stored, **QWEN3_MOE), dtype=torch.bfloat16)
    storages = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    assert len(storages) == len(list(model.parameters()))
    for weight in model.parameters():
        assert weight.untyped_storage().nbytes() == weight.nbytes


def test_a_plan_copies_each_expert_into_its_rows_without_reading_one(tmp_path: Path) -> None:
    stored = one_tensor_per_expert(weights(**QWEN3_MOE), "qwen3_moe")
    path = checkpoint(tmp_path, stored, **QWEN3_MOE)
    model = create_model(load_config(path), device="meta")
    headers = stored_tensors(path)
    plan = plan_load(model, headers, path, torch.float32)
    assert len(plan.copies) == 2 * 3 * 3 and len(plan.fills) == len(stored) - len(plan.copies)
    up, down = f"{EXPERTS}.1.up_proj.weight", f"{EXPERTS}.2.down_proj.weight"
    assert Copy((f"{EXPERTS}.gate_up_proj",), headers[up], (1, 16, 32)) in plan.copies
    assert Copy((f"{EXPERTS}.down_proj",), headers[down], (2, 0, 32)) in plan.copies


def test_experts_of_layers_that_the_model_does_not_have_are_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = weights(**QWEN3_MOE)
    stored = one_tensor_per_expert(tensors, "qwen3_moe")
    stored["model.layers.2.mlp.experts.0.up_proj.weight"] = torch.zeros(16, 32)
    with caplog.at_level(logging.INFO, "atomc"):
        assert_holds(load(checkpoint(tmp_path, stored, **QWEN3_MOE)), tensors)
    assert "skipped model.layers.2.mlp.experts.0.up_proj.weight" in caplog.text


def without(stored: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in stored.items() if name not in names}


MISMATCH = "PATH does not match {}: {}. Are config.json and the weights of the same checkpoint?"


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (
            lambda stored: without(
                stored, f"{EXPERTS}.1.up_proj.weight", f"{EXPERTS}.0.down_proj.weight"
            ),
            f"missing {EXPERTS}.1.up_proj.weight, {EXPERTS}.0.down_proj.weight",
        ),
        (
            lambda stored: {
                name: tensor for name, tensor in stored.items() if "layers.0.mlp.exp" not in name
            },
            f"missing {EXPERTS}.gate_up_proj, {EXPERTS}.down_proj",
        ),
        (
            lambda stored: stored | {f"{EXPERTS}.1.up_proj.weight": torch.zeros(15, 32)},
            f"{EXPERTS}.1.up_proj.weight is [15, 32], expected [16, 32]",
        ),
        (
            lambda stored: (
                stored | {f"{EXPERTS}.1.up_proj.weight": torch.zeros(16, 32, dtype=torch.int8)}
            ),
            f"{EXPERTS}.1.up_proj.weight is I8, expected F64 or F32 or F16 or BF16",
        ),
        (
            lambda stored: stored | {f"{EXPERTS}.3.down_proj.weight": torch.zeros(32, 16)},
            f"{EXPERTS}.down_proj has 4 experts, expected 3",
        ),
        (
            lambda stored: stored | {f"{EXPERTS}.0.gate_up_proj.weight": torch.zeros(32, 32)},
            f"unexpected {EXPERTS}.0.gate_up_proj.weight",
        ),
        (
            lambda stored: stored | {f"{EXPERTS}.gate_up_proj": torch.zeros(4, 32, 32)},
            f"unexpected {EXPERTS}.0.gate_proj.weight, {EXPERTS}.0.up_proj.weight, "
            f"{EXPERTS}.1.gate_proj.weight and 3 more; "
            f"{EXPERTS}.gate_up_proj is [4, 32, 32], expected [3, 32, 32]",
        ),
    ],
    ids=["missing", "no experts", "shape", "dtype", "one more", "other name", "both"],
)
def test_experts_that_do_not_fit_are_refused_in_one_sentence(
    damage: object, problem: str, tmp_path: Path
) -> None:
    stored = one_tensor_per_expert(weights(**QWEN3_MOE), "qwen3_moe")
    assert callable(damage)
    path = checkpoint(tmp_path, damage(stored), **QWEN3_MOE)
    assert refusal(path) == MISMATCH.format("Qwen3MoeForCausalLM", problem)


def test_another_number_of_experts_than_in_the_config_is_refused(tmp_path: Path) -> None:
    stored = one_tensor_per_expert(weights(**MIXTRAL), "mixtral")
    path = checkpoint(tmp_path, stored, **MIXTRAL | {"num_local_experts": 4})
    assert refusal(path) == MISMATCH.format(
        "MixtralForCausalLM",
        f"{EXPERTS}.gate_up_proj has 3 experts, expected 4, {EXPERTS}.down_proj has 3 "
        "experts, expected 4, "
        "model.layers.1.mlp.experts.gate_up_proj has 3 experts, expected 4 and 3 more",
    )


@pytest.mark.parametrize(
    ("model_type", "differs"),
    [
        ("olmoe", {"num_experts": 4}),
        ("minimax_m2", {"num_local_experts": 4, "head_dim": 16, "rotary_dim": 8}),
    ],
)
def test_a_stock_class_that_we_quantize_gets_its_16_bit_experts_and_buffers(
    model_type: str, differs: dict[str, object], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    from test_moe_models import theirs_of

    theirs = theirs_of(model_type, num_experts_per_tok=2, **differs)
    theirs.save_pretrained(tmp_path)
    assert any(".experts.0." in name for name in stored_tensors(tmp_path))
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    how = {"scheme": "fp8", "ignore": ["experts"]}
    ours = load(tmp_path, quantization=how).hf_model.state_dict()
    kept = [name for name in expected if "_proj.weight" not in name]
    assert sum("experts" in name for name in kept) == 2 * 2
    assert any("e_score_correction_bias" in name for name in kept) == (model_type == "minimax_m2")
    for name in kept:
        assert torch.equal(ours[name], expected[name]), name
