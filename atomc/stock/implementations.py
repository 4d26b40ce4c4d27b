"""Which functions a transformers model runs for attention and experts, and on which rows."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Gemma 4: the number of the layer from which on rows whose logits are not wanted are dropped. The
# class decides at run time, by the number of rows, whether it does so.
ROWS_DROPPED_FROM = "first_kv_shared_layer_idx"


@dataclass(frozen=True)
class Implementations:
    """The names of the functions, by the name of the part's config; "" is the model's own.

    rows_dropped_from  the values of ROWS_DROPPED_FROM, by the module that has it
    """

    attention: dict[str, str]
    experts: dict[str, str]
    rows_dropped_from: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, hf_model: "PreTrainedModel") -> "Implementations":
        return cls(
            attention_of(hf_model.config),
            _names_of_parts(hf_model.config, "_experts_implementation"),
            {
                name: int(getattr(module, ROWS_DROPPED_FROM))
                for name, module in hf_model.named_modules()
                if hasattr(module, ROWS_DROPPED_FROM)
            },
        )

    def set_in(self, hf_model: "PreTrainedModel") -> None:
        hf_model.set_attn_implementation(self.attention)
        hf_model.set_experts_implementation(self.experts)
        for name, layer in self.rows_dropped_from.items():
            setattr(hf_model.get_submodule(name), ROWS_DROPPED_FROM, layer)


def keep_all_rows(hf_model: "PreTrainedModel") -> None:
    """Have all layers compute all rows, in place."""
    for module in hf_model.modules():
        if hasattr(module, ROWS_DROPPED_FROM):
            setattr(module, ROWS_DROPPED_FROM, -1)


def attention_of(config: Any) -> dict[str, str]:
    """As in Implementations."""
    return _names_of_parts(config, "_attn_implementation")


def _names_of_parts(config: Any, attribute: str) -> dict[str, str]:
    """Without parts that are not there, and parts of which no function is chosen: the latter have
    no module, as the audio encoder in Moshi's decoder.
    """
    parts = {name: getattr(config, name) for name in config.sub_configs}
    names = {name: getattr(part, attribute) for name, part in parts.items() if part is not None}
    functions = {name: value for name, value in names.items() if value is not None}
    return functions | {"": getattr(config, attribute)}
