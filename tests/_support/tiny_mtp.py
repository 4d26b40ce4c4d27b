"""Small models with a draft layer, as checkpoints with the names of Hugging Face: a GLM-4.5, whose
draft layer is numbered, and Qwens, which have it as `mtp`.

A draft layer mostly repeats the embedding of the next token, as the model does: some of its drafts
are right.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import SIZES
from torch import Tensor, nn

from atomc.loading.create_model import create_model

CONFIG: dict[str, Any] = SIZES | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
    "max_position_embeddings": 512,
    "eos_token_id": 0,
}
DEPTH, WIDTH = CONFIG["num_hidden_layers"], CONFIG["hidden_size"]
DRAFT = f"model.layers.{DEPTH}."
_HYBRID = {
    "num_nextn_predict_layers": None,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention"],
}
_EXPERTS = {"num_experts": 4, "shared_expert_intermediate_size": 24}
# model -> what differs from CONFIG
QWENS: dict[str, dict[str, Any]] = {
    "qwen3_next": _HYBRID
    | _EXPERTS
    | {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"},
    "qwen3_5": _HYBRID
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
    },
    "qwen3_5_moe": _HYBRID
    | _EXPERTS
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "mtp_num_hidden_layers": 1,
    },
}


def tiny_model(draft_layers: int = 1, **differs: Any) -> nn.Module:
    torch.manual_seed(0)
    model = create_model(CONFIG | differs, torch.float64, draft_layers=draft_layers)
    return fill(model)


def fill(model: nn.Module) -> nn.Module:
    """Give the model weights with which it mostly repeats its input."""
    model.requires_grad_(False).eval()
    for name, weight in model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            weight.normal_()
        elif name.endswith(("eh_proj.weight", "mtp.fc.weight")):
            weight.normal_(0, 0.05)
            weight[:, : len(weight)] += torch.eye(len(weight))
        elif name.endswith("A_log"):
            weight.normal_(-3.0, 1.0)  # a state that lasts for some tens of tokens
        elif name.endswith("conv1d.weight"):
            weight.normal_(0, 0.5)
        elif weight.dim() > 1:
            weight.normal_(0, 0.5 if name == "lm_head.weight" else 0.05)
    return model


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Weights by their names in a checkpoint, with the copies of embedding and head that a numbered
    draft layer has.
    """
    found: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            for i, expert in enumerate(weight):
                gate, up = expert.chunk(2)
                stem = name.removesuffix("gate_up_proj") + f"{i}."
                found |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            found |= {f"{stem}{i}.down_proj.weight": expert for i, expert in enumerate(weight)}
        else:
            found[name] = weight.data
    for name in [name for name in found if name.endswith("eh_proj.weight")]:
        layer = name.removesuffix("eh_proj.weight")
        found[f"{layer}embed_tokens.weight"] = found["model.embed_tokens.weight"]
        found[f"{layer}shared_head.head.weight"] = model.get_parameter("lm_head.weight").data
    return found


def write(path: Path, tensors: dict[str, Tensor], **differs: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | differs))
    save_file({name: x.clone() for name, x in tensors.items()}, path / "model.safetensors")
    return path
