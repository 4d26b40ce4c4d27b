"""The adapter of FlashInfer's experts: gates, refusals, versions. tests/kernels/moe/test_moe_modular.py compares
its values by a stand-in, and this file on a GPU by the library.
"""

import sys
from types import ModuleType
from typing import Any

import flashinfer_stand_in
import pytest
import torch
from kernel_cases import experts as cases
from kernel_cases.draw import Draw

from atomc.kernels.moe import ExpertsConfig, ExpertWeights, FlashInfer, ModularExperts, NoEP
from atomc.kernels.moe.combinations import flashinfer
from atomc.kernels.moe.combinations.reference import experts_reference

GATES: dict[str, dict[str, Any]] = {
    "silu": {},
    "silu with a limit": {"limit": 0.4},
    "GPT-OSS": {"bias": True, **cases.OAI},
    "GPT-OSS without a limit": {**cases.OAI, "limit": None},
    "another alpha": {**cases.OAI, "alpha": 0.9, "interleaved": False},
}


def compared(device: str, dtype: torch.dtype, **sizes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """By the adapter and by the reference of the op."""
    made = cases.full(Draw(dtype), **sizes)
    made = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in made.items()}
    x, ids, weights = (made.pop(name) for name in ("x", "ids", "weights"))
    stored = {name: made.pop(name) for name in [*made] if name in ExpertWeights.__annotations__}
    of_experts, config = ExpertWeights(**stored), ExpertsConfig(**made)
    moe = ModularExperts(NoEP(), FlashInfer(), config)
    found = moe(x, ids, weights, moe.prepare_weights(of_experts))
    return found, experts_reference(x, None, ids, weights, of_experts, config, dtype)


@pytest.mark.parametrize("gate", GATES)
def test_a_gate_is_given_by_its_numbers(monkeypatch: pytest.MonkeyPatch, gate: str) -> None:
    flashinfer_stand_in.install(monkeypatch)
    found, expected = compared("cpu", torch.float32, **GATES[gate])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_another_gate_is_refused(activation: str) -> None:
    with pytest.raises(ValueError, match=f"gates with silu or swiglu_oai, not {activation}"):
        ModularExperts(NoEP(), FlashInfer(), ExpertsConfig(activation=activation))


def test_it_is_for_gpus() -> None:
    assert FlashInfer.missing(torch.device("cpu")) == "flashinfer's kernel runs on NVIDIA GPUs"


def test_an_older_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert "from sm90 on" in str(FlashInfer.missing(torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flashinfer, "library", flashinfer.library.__wrapped__)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.delitem(sys.modules, "flashinfer.fused_moe", raising=False)
    said = FlashInfer.missing(torch.device("cuda"))
    assert said is not None and "pip install flashinfer-python flashinfer-jit-cache" in said


def test_a_version_without_the_function_or_an_argument_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flashinfer_stand_in.install(monkeypatch)
    module: Any = ModuleType("flashinfer.fused_moe")
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", module)
    assert (
        flashinfer.library()
        == "flashinfer.fused_moe has no cutlass_fused_moe: update flashinfer-python"
    )
    module.cutlass_fused_moe = lambda input, output, swiglu_alpha, fc1_expert_biases: None
    assert flashinfer.library() == (
        "flashinfer's cutlass_fused_moe does not take ep_size, use_fused_finalize: update "
        "flashinfer-python"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("tokens", [1, 33])
def test_on_a_gpu_the_library_computes_what_the_op_means(gate: str, tokens: int) -> None:
    if reason := FlashInfer.missing(torch.device("cuda")):
        pytest.skip(reason)
    sizes = {"tokens": tokens, "hidden": 128, "inner": 128, "experts": 8}
    found, expected = compared("cuda", torch.bfloat16, **sizes, **GATES[gate])
    error = (found.float() - expected.float()).square().mean().sqrt()
    assert error < 1e-2 * expected.float().square().mean().sqrt()
