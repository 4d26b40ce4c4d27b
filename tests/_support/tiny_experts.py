"""Small mixtures of experts, as in config.json, and checkpoints of them."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import SIZES
from torch import Tensor, nn

from atomc.loading.create_model import create_model

# Inner sizes that groups of 32 divide.
SIZED: dict[str, Any] = SIZES | {
    "hidden_size": 128,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_experts_per_tok": 2,
    "dtype": "float32",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": SIZED
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "norm_topk_prob": True,
    },
    "mixtral": SIZED
    | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
    },
    "gpt_oss": SIZED
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
IDS, POSITIONS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]), torch.arange(11)


def sqnr(exact: Tensor, other: Tensor) -> float:
    """Decibels."""
    noise = (exact.double() - other.double()).square().mean()
    return (
        math.inf if noise == 0 else float(10 * torch.log10(exact.double().square().mean() / noise))
    )


def random_model(kind: str, dtype: torch.dtype = torch.float32, **differs: Any) -> nn.Module:
    """Ours, with biases and sinks, and with experts that matter."""
    torch.manual_seed(0)
    model = create_model(CONFIGS[kind] | differs, torch.float32).requires_grad_(False).eval()
    for name, weight in model.named_parameters():
        if weight.dim() == 3:
            weight.normal_(0, 0.1)
        elif "router" in name or "mlp.gate" in name:
            weight.normal_(0, 1.0)
        elif "bias" in name or "sinks" in name:
            weight.normal_(0, 0.1)
    return model.to(dtype)


def write(
    path: Path,
    kind: str,
    tensors: dict[str, Tensor],
    quantization: dict[str, Any] | None = None,
    **differs: Any,
) -> Path:
    config = CONFIGS[kind] | ({"quantization_config": quantization} if quantization else {})
    (path / "config.json").write_text(json.dumps(config | differs))
    save_file({name: x.contiguous() for name, x in tensors.items()}, path / "model.safetensors")
    return path


def stored(model: nn.Module) -> dict[str, Tensor]:
    """The weights as transformers stores them: those of GPT-OSS's experts transposed."""
    found = dict(model.named_parameters())
    transposed = {
        f"{name}.{leaf}"
        for name, module in model.named_modules()
        for leaf in getattr(module, "STORED_TRANSPOSED", ())
    }
    return {
        name: weight.mT if name in transposed else weight.data for name, weight in found.items()
    }
