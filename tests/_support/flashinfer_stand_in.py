"""A stand-in for flashinfer.fused_moe with the documented meaning of cutlass_fused_moe (flashinfer
0.7): dtypes, layouts and the order of the halves of fc1 are checked, not guessed.
"""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from atomc.kernels.moe import FlashInfer
from atomc.kernels.moe.combinations import flashinfer


def checked(name: str, given: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert given.is_contiguous(), f"{name} is not contiguous"
    assert (tuple(given.shape), given.dtype) == (shape, dtype), (
        f"{name}: {given.shape} {given.dtype}"
    )


def cutlass_fused_moe(
    input: Tensor,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    fc1_expert_weights: Tensor,
    fc2_expert_weights: Tensor,
    output_dtype: torch.dtype,
    quant_scales: list[Tensor],
    fc1_expert_biases: Tensor | None = None,
    fc2_expert_biases: Tensor | None = None,
    input_sf: Tensor | None = None,
    swiglu_alpha: Tensor | None = None,
    swiglu_beta: Tensor | None = None,
    swiglu_limit: Tensor | None = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    output: Tensor | None = None,
    use_fused_finalize: bool = True,
) -> Tensor:
    """Rank ep_rank of ep_size has experts ep_rank * L to (ep_rank + 1) * L, and skips those of
    others. fc1 has the rows of up, then those of gate. With alpha, beta or limit of an expert:
    gate * sigmoid(alpha * gate) * (up + beta) of clamped numbers, else silu(gate) * up.
    """
    (experts, hidden, inner), (rows, k) = fc2_expert_weights.shape, token_selected_experts.shape
    assert rows, "no rows"
    dtype = input.dtype
    checked("input", input, (rows, hidden), dtype)
    checked("token_selected_experts", token_selected_experts, (rows, k), torch.int32)
    checked("token_final_scales", token_final_scales, (rows, k), torch.float32)
    checked("fc1_expert_weights", fc1_expert_weights, (experts, 2 * inner, hidden), dtype)
    checked("fc2_expert_weights", fc2_expert_weights, (experts, hidden, inner), dtype)
    assert quant_scales == [] and input_sf is None and (tp_size, tp_rank) == (1, 0)
    for name, bias, width in (
        ("fc1_expert_biases", fc1_expert_biases, 2 * inner),
        ("fc2_expert_biases", fc2_expert_biases, hidden),
    ):
        if bias is not None:
            checked(name, bias, (experts, width), dtype)
    gates = (swiglu_alpha, swiglu_beta, swiglu_limit)
    for given in gates:
        if given is not None:
            checked("a number of a gate", given, (experts,), torch.float32)
    made = torch.zeros(rows, hidden, dtype=torch.float32)
    for row in range(rows):
        for choice in range(k):
            e = int(token_selected_experts[row, choice]) - ep_rank * experts
            assert 0 <= e + ep_rank * experts < ep_size * experts, "an expert that no rank has"
            if not 0 <= e < experts:
                continue
            h = F.linear(
                input[row],
                fc1_expert_weights[e],
                None if fc1_expert_biases is None else fc1_expert_biases[e],
            )
            up, gate = h.chunk(2)
            if all(given is None for given in gates):
                act = F.silu(gate) * up
            else:
                alpha = 1.0 if swiglu_alpha is None else float(swiglu_alpha[e])
                beta = 0.0 if swiglu_beta is None else float(swiglu_beta[e])
                if swiglu_limit is not None:
                    limit = float(swiglu_limit[e])
                    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                act = gate * torch.sigmoid(alpha * gate) * (up + beta)
            product = F.linear(
                act,
                fc2_expert_weights[e],
                None if fc2_expert_biases is None else fc2_expert_biases[e],
            )
            made[row] += token_final_scales[row, choice] * product.float()
    output = torch.empty(rows, hidden, dtype=output_dtype) if output is None else output
    assert (output.dtype, tuple(output.shape)) == (output_dtype, (rows, hidden))
    return output.copy_(made)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have imports find the stand-in, which also runs on a CPU."""
    package, module = ModuleType("flashinfer"), ModuleType("flashinfer.fused_moe")
    module.cutlass_fused_moe = cutlass_fused_moe  # type: ignore[attr-defined]
    package.fused_moe = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", module)
    monkeypatch.setattr(flashinfer, "library", flashinfer.library.__wrapped__)
    monkeypatch.setattr(FlashInfer, "missing", staticmethod(lambda device: None))
