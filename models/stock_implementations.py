"""Which functions a model of transformers runs for its attention and its experts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Implementations:
    """The names of the functions, by the name of the part's config; "" is the model's own."""

    attention: dict[str, str]
    experts: dict[str, str]

    @classmethod
    def of(cls, hf_model: "PreTrainedModel") -> "Implementations":
        return cls(
            attention_of(hf_model.config), _by_part(hf_model.config, "_experts_implementation")
        )

    def set_in(self, hf_model: "PreTrainedModel") -> None:
        hf_model.set_attn_implementation(self.attention)
        hf_model.set_experts_implementation(self.experts)


def attention_of(config: Any) -> dict[str, str]:
    """As in Implementations."""
    return _by_part(config, "_attn_implementation")


def _by_part(config: Any, attribute: str) -> dict[str, str]:
    parts = {name: getattr(config, name) for name in config.sub_configs}
    names = {name: getattr(part, attribute) for name, part in parts.items() if part is not None}
    return names | {"": getattr(config, attribute)}
