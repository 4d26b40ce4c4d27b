"""Gated activations."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from spellings import Spelling

T, I = 7, 37  # noqa: E741
BF16 = (torch.bfloat16,)


def gated(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """gate and up."""
    return tuple(torch.randn(T, I).to(dtype) for _ in range(2))


def packed(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """gate and up in one tensor."""
    return (torch.randn(T, 2 * I).to(dtype),)


def wide_up(dtype: torch.dtype) -> tuple[Tensor, ...]:
    gate, up = gated(dtype)
    return gate, up.float()


def shared_expert(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What the other experts compute, a gate per row, and the shared expert."""
    routed, shared = gated(dtype)
    return routed, torch.randn(T, 1).to(dtype), shared


def new_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x.pow(3.0))))


def fast_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def megatron_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def erf_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


SPELLINGS = (
    Spelling(
        "silu(gate) * up",
        "Llama, Qwen3, most",
        "silu_and_mul",
        lambda gate, up: F.silu(gate) * up,
        gated,
    ),
    Spelling(
        "gate * sigmoid(gate) * up",
        "research code",
        "silu_and_mul",
        lambda gate, up: gate * torch.sigmoid(gate) * up,
        gated,
    ),
    Spelling(
        "gate / (1 + exp(-gate)) * up",
        "research code",
        "silu_and_mul",
        lambda gate, up: gate / (1 + torch.exp(-gate)) * up,
        gated,
    ),
    Spelling(
        "up * (gate * (1 / (1 + exp(-gate))))",
        "research code",
        "silu_and_mul",
        lambda gate, up: up * (gate * (1 / (1 + torch.exp(-gate)))),
        gated,
    ),
    Spelling(
        "silu(gate.float()).to(gate.dtype) * up",
        "research code",
        "silu_and_mul",
        lambda gate, up: F.silu(gate.float()).to(gate.dtype) * up,
        gated,
        tolerance=0.0,
    ),
    Spelling(
        "0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))) * up",
        "GPT-2's activation",
        "gelu_and_mul",
        lambda gate, up: new_gelu(gate) * up,
        gated,
    ),
    Spelling(
        "0.5 * x * (1 + tanh(0.7978845608 * x * (1 + 0.044715 * x * x))) * up",
        "`gelu_fast` of transformers",
        "gelu_and_mul",
        lambda gate, up: fast_gelu(gate) * up,
        gated,
    ),
    Spelling(
        "x * 0.5 * (1 + tanh(0.79788456 * x * (1 + 0.044715 * x * x))) * up",
        "Bloom's and Megatron's activation",
        "gelu_and_mul",
        lambda gate, up: megatron_gelu(gate) * up,
        gated,
    ),
    Spelling(
        "x * 0.5 * (1 + erf(x / sqrt(2))) * up",
        "BERT's activation",
        "gelu_and_mul",
        lambda gate, up: erf_gelu(gate) * up,
        gated,
    ),
    Spelling(
        "silu(gate) * up, up in fp32",
        "Qwen3.5's norm",
        "silu_and_mul",
        lambda gate, up: F.silu(gate) * up,
        wide_up,
        reason="expected `up` in bfloat16 .the dtype of `gate`.; found float32",
        table="the operands differ in dtype",
        dtypes=BF16,
    ),
    Spelling(
        "up * sigmoid(gate)",
        "Qwen3-Next, Qwen3.5 (attention)",
        "sigmoid_and_mul",
        lambda gate, up: up * torch.sigmoid(gate),
        gated,
    ),
    Spelling(
        "routed + sigmoid(gate) * shared",
        "Qwen2-MoE, Qwen3-Next, Qwen3.5 (shared expert)",
        "sigmoid_and_mul",
        lambda routed, gate, shared: routed + torch.sigmoid(gate) * shared,
        shared_expert,
    ),
    Spelling(
        "x * sigmoid(1.702 * x)",
        "CLIP's QuickGELU",
        "sigmoid_and_mul",
        lambda x, _: x * torch.sigmoid(1.702 * x),
        gated,
        reason="expected gate and up by themselves; found mul.*, which reads input",
        table="Inductor fuses what both are computed from",
    ),
    Spelling(
        "sigmoid(gate) * up, up in fp32",
        "research code",
        "sigmoid_and_mul",
        lambda gate, up: torch.sigmoid(gate) * up,
        wide_up,
        reason="expected `up` in bfloat16 .the dtype of `gate`.; found float32",
        table="the operands differ in dtype",
        dtypes=BF16,
    ),
    Spelling(
        "F.glu(x)",
        "convolutional models",
        "silu_and_mul",
        F.glu,
        packed,
        reason="found glu, for which no op exists",
        table="there is no op of both halves",
    ),
    Spelling(
        "relu(gate) * up",
        "ReGLU",
        "silu_and_mul",
        lambda gate, up: F.relu(gate) * up,
        gated,
        reason="found relu, for which no op exists",
        table="there is no op with a relu",
    ),
    Spelling(
        "relu(gate) ** 2 * up",
        "BitNet",
        "silu_and_mul",
        lambda gate, up: F.relu(gate).square() * up,
        gated,
        reason="found a squared relu, for which no op exists",
        table="there is no op with a relu",
    ),
    Spelling(
        "gate * sigmoid(1.702 * gate) * up",
        "QuickGELU",
        "silu_and_mul",
        lambda gate, up: gate * torch.sigmoid(1.702 * gate) * up,
        gated,
        reason=r"found gate \* sigmoid\(alpha \* gate\), for which no op exists",
        table="there is no op with a factor in the sigmoid",
    ),
    Spelling(
        "(up.clamp() + 1) * gate.clamp() * sigmoid(1.702 * gate), of x[..., ::2] and x[..., 1::2]",
        "GPT-OSS",
        "silu_and_mul",
        lambda x: clamped(x[..., ::2], x[..., 1::2]),
        packed,
        reason=r"found clamped operands and up \+ 1, for which no op exists",
        table="there is no op that clamps",
    ),
    Spelling(
        "(up.clamp() + 1) * gate.clamp() * sigmoid(1.702 * gate), of x.chunk(2, -1)",
        "GPT-OSS, weights split",
        "silu_and_mul",
        lambda x: clamped(*x.chunk(2, -1)),
        packed,
        reason=r"found clamped operands and up \+ 1, for which no op exists",
        table="there is no op that clamps",
    ),
)
