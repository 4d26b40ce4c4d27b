"""Language models in plain PyTorch, one file per model_type; others use their transformers class.

Every model is called as `model(input_ids [T], positions [T], logits_rows=None) -> logits [T or R,
V]`.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from atomc.files.json_types import JSONMapping

if TYPE_CHECKING:
    from torch import nn

__all__ = ["REGISTRY", "architectures_of", "model_class"]

# Name in config.json's `architectures` -> module:class, imported on use.
REGISTRY = {
    "DeepseekV2ForCausalLM": "atomc.models.deepseek_v3:DeepseekV2ForCausalLM",
    "DeepseekV32ForCausalLM": "atomc.models.deepseek_v32:DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLM": "atomc.models.deepseek_v3:DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM": "atomc.models.glm4_moe:Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM": "atomc.models.deepseek_v3:Glm4MoeLiteForCausalLM",
    "GptOssForCausalLM": "atomc.models.gpt_oss:GptOssForCausalLM",
    "LlamaForCausalLM": "atomc.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "atomc.models.llama:LlamaForCausalLM",
    "MixtralForCausalLM": "atomc.models.mixtral:MixtralForCausalLM",
    "Qwen3_5ForCausalLM": "atomc.models.qwen3_5:Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "atomc.models.qwen3_5_vl:Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM": "atomc.models.qwen3_5_moe:Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": (
        "atomc.models.qwen3_5_vl:Qwen3_5MoeForConditionalGeneration"
    ),
    "Qwen3ForCausalLM": "atomc.models.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "atomc.models.qwen3_moe:Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM": "atomc.models.qwen3_next:Qwen3NextForCausalLM",
    "Qwen3VLForConditionalGeneration": "atomc.models.qwen3_vl:Qwen3VLForConditionalGeneration",
}


def architectures_of(config: JSONMapping) -> list[str]:
    """The `architectures` of config.json. Raises ValueError if there are none."""
    architectures = config.get("architectures")
    stored = architectures if isinstance(architectures, list) else []
    names = [name for name in stored if isinstance(name, str)]
    if not names or len(names) < len(stored) or not all(map(_is_class_name, names)):
        raise ValueError(
            f"config.json names no architecture (architectures: {architectures!r:.80}); "
            "expected a list such as ['LlamaForCausalLM']"
        )
    return names


def _is_class_name(name: str) -> bool:
    return name.isidentifier() and len(name) < 100


def model_class(architectures: Sequence[str]) -> "type[nn.Module] | None":
    """The class for the first supported architecture; None: see atomc.stock.adapter.hf_class."""
    for name in architectures:
        if name in REGISTRY:
            module, _, attribute = REGISTRY[name].partition(":")
            cls: type[nn.Module] = getattr(import_module(module), attribute)
            return cls
    return None
