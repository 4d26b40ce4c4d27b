"""Experts of the standard format by FlashInfer's fused kernel, which is built with CUTLASS."""

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from atomc.kernels.moe.dispatched import Dispatched
from atomc.kernels.moe.experts import ExpertsKernel, Spaces
from atomc.kernels.moe.layer import ExpertsConfig, ExpertWeights, RankExperts
from atomc.ops.experts import gate_and_up

MODULE, FUNCTION = "flashinfer.fused_moe", "cutlass_fused_moe"
OLDEST_GPU = (9, 0)
# What older versions lack.
TAKES = ("swiglu_alpha", "fc1_expert_biases", "ep_size", "output", "use_fused_finalize")
# Of gate * sigmoid(alpha * gate) * (up + beta).
ALPHA_AND_BETA = {"silu": (1.0, 0.0), "swiglu_oai": (None, 1.0)}


class FlashInfer(ExpertsKernel):
    """flashinfer.fused_moe.cutlass_fused_moe: sorts rows by expert, multiplies, gates, weights and
    sums, in a fixed order. It compiles itself at the first call of a process, for minutes, unless
    flashinfer-jit-cache is installed. Ids of no expert are given to it as those of a second rank.
    """

    name = "flashinfer"
    schemes = ("none",)

    @staticmethod
    def missing(device: torch.device) -> str | None:
        if device.type != "cuda" or torch.version.hip:
            return "flashinfer's kernel runs on NVIDIA GPUs"
        if torch.cuda.get_device_capability(device) < OLDEST_GPU:
            return "flashinfer's kernel is used on NVIDIA GPUs from sm90 on"
        module = library()
        return module if isinstance(module, str) else None

    def refuse_config(self, config: ExpertsConfig) -> str | None:
        if config.activation not in ALPHA_AND_BETA:
            names = " or ".join(ALPHA_AND_BETA)
            return f"{self.name} gates with {names}, not {config.activation}"
        return None

    def prepare_weights(self, weights: ExpertWeights, config: ExpertsConfig) -> ExpertWeights:
        """Rows of up first, then those of gate."""

        def swapped(stored: Tensor) -> Tensor:
            gate, up = gate_and_up(stored, config.interleaved)
            return torch.cat((up, gate), -1)

        w13 = swapped(weights.w13.mT).mT.contiguous()
        b13 = None if weights.b13 is None else swapped(weights.b13)
        return replace(weights, w13=w13, w2=weights.w2.contiguous(), b13=b13)

    def apply(
        self, output: Tensor, spaces: Spaces, dispatched: Dispatched, experts: RankExperts
    ) -> None:
        function = library()
        if isinstance(function, str):
            raise RuntimeError(function)
        weights, num_experts = experts.weights, experts.weights.num_experts
        ids = experts.local_ids(dispatched.ids)
        function(
            input=dispatched.x.contiguous(),
            token_selected_experts=ids.masked_fill(ids < 0, num_experts).int(),
            token_final_scales=dispatched.weights.float().contiguous(),
            fc1_expert_weights=weights.w13,
            fc2_expert_weights=weights.w2,
            output_dtype=output.dtype,
            quant_scales=[],
            fc1_expert_biases=weights.b13,
            fc2_expert_biases=weights.b2,
            **_gate(experts.config, num_experts, output.device),
            ep_size=2,
            ep_rank=0,
            output=output,
            use_fused_finalize=False,  # which adds with atomics, in any order
        )


@functools.cache
def library() -> Callable[..., Tensor] | str:
    """FlashInfer's function, or why there is none, as a sentence."""
    try:
        function: Callable[..., Tensor] = getattr(importlib.import_module(MODULE), FUNCTION)
    except ImportError as error:
        install = "pip install flashinfer-python flashinfer-jit-cache"
        return f"flashinfer cannot be imported ({error}): {install}"
    except AttributeError:
        return f"{MODULE} has no {FUNCTION}: update flashinfer-python"
    if lacks := [name for name in TAKES if name not in inspect.signature(function).parameters]:
        return f"flashinfer's {FUNCTION} does not take {', '.join(lacks)}: update flashinfer-python"
    return function


def _gate(config: ExpertsConfig, num_experts: int, device: torch.device) -> dict[str, Any]:
    """The gate, by expert; none for silu without a limit, which is the default."""
    if config.activation == "silu" and config.limit is None:
        return {}
    alpha, beta = ALPHA_AND_BETA[config.activation]

    def expert_values(value: float | None) -> Tensor | None:
        return None if value is None else torch.full((num_experts,), value, device=device)

    return {
        "swiglu_alpha": expert_values(config.alpha if alpha is None else alpha),
        "swiglu_beta": expert_values(beta),
        "swiglu_limit": expert_values(config.limit),
    }
