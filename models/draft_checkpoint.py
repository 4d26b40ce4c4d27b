"""Whether a checkpoint has draft layers for multi-token prediction, and in which format."""

from collections.abc import Collection, Mapping
from pathlib import Path

from torch import nn

from atomc.json_types import JSONLike
from atomc.models.config import count, integer
from atomc.models.limits import Stored
from atomc.models.load_plan import FLOATS
from atomc.quantization.apply import Methods


def check_draft_layers(
    hf: Mapping[str, JSONLike], architecture: str, cls: type[nn.Module] | None
) -> None:
    """Raise ValueError if the model of a config.json has no draft layers, or several, or if its
    class cannot load one.

    cls   the model's class in atomc; None: a transformers class
    """
    layers = count(hf, "num_nextn_predict_layers", 0)
    if not layers:
        raise ValueError(
            f"{architecture} has no draft layers for multi-token prediction: config.json has no "
            "num_nextn_predict_layers above 0"
        )
    if cls is None:
        raise ValueError(
            f"{architecture} runs as its transformers class, which drops the draft layers of a "
            "checkpoint"
        )
    if not hasattr(cls, "draft_model"):
        raise ValueError(f"{architecture}: {cls.__module__} does not implement draft layers")
    if layers > 1:
        raise ValueError(
            f"{architecture} has {layers} draft layers (num_nextn_predict_layers), each for one "
            "more token; only one is supported: set num_nextn_predict_layers to 1 in config.json, "
            "and the first proposes all draft tokens, or set speculative to 'ngram'"
        )


def draft_prefix(hf: Mapping[str, JSONLike]) -> str:
    """What the names of the first draft layer's tensors begin with."""
    return f"model.layers.{integer(hf, 'num_hidden_layers')}."


def check_stored_draft(hf: Mapping[str, JSONLike], stored: Collection[str], path: Path) -> None:
    """Raise ValueError if a checkpoint with tensors of these names has no draft layer."""
    prefix = draft_prefix(hf)
    if not any(name.startswith(prefix) for name in stored):
        raise ValueError(
            f"{path} has no draft layers: config.json promises {prefix}*, but no tensor has such a "
            "name (transformers does not save them)"
        )


def methods_as_stored(methods: Methods, stored: Mapping[str, Stored], prefix: str) -> Methods:
    """Without the parts of the draft layer that are stored in floating point: checkpoints may leave
    it, or its eh_proj, unquantized and not say so.
    """

    def is_float(name: str) -> bool:
        names = (f"{name}.weight", f"{name}.0.gate_proj.weight", f"{name}.gate_up_proj")
        return name.startswith(prefix) and any(
            stored[one].dtype in FLOATS for one in names if one in stored
        )

    return Methods(
        {name: method for name, method in methods.linears.items() if not is_float(name)},
        {name: method for name, method in methods.experts.items() if not is_float(name)},
    )
