"""Whether a checkpoint has draft layers for multi-token prediction, and in which format."""

from collections.abc import Collection
from pathlib import Path

from atomc.files.json_types import JSONMapping
from atomc.loading.checkpoint_files import Checkpoint
from atomc.loading.load_plan import FLOATS
from atomc.models import architectures_of, model_class
from atomc.models.config import count
from atomc.models.mtp import WithDraftLayer
from atomc.quantization.apply import Methods


def check_draft_layers(hf: JSONMapping, stored: Collection[str] | None, path: Path) -> None:
    """Raise ValueError if the checkpoint in `path` has no draft layers, or several, or if the class
    of its model cannot load one.

    hf      its config.json
    stored  the names of its tensors; None: its weights are not read
    """
    architectures = architectures_of(hf)
    architecture, cls = architectures[0], model_class(architectures)
    if cls is not None and issubclass(cls, WithDraftLayer):
        layers, field, prefix = cls.stored_draft(hf)
    else:
        field, prefix = "num_nextn_predict_layers", "mtp."
        layers = max(count(hf, field, 0), any(name.startswith(prefix) for name in stored or ()))
    if not layers:
        raise ValueError(
            f"{architecture} has no draft layers for multi-token prediction: config.json has no "
            f"{field} above 0"
        )
    if cls is None:
        raise ValueError(
            f"{architecture} runs as its transformers class, which drops the draft layers of a "
            "checkpoint"
        )
    if not issubclass(cls, WithDraftLayer):
        raise ValueError(f"{architecture}: {cls.__module__} does not implement draft layers")
    if layers > 1:
        raise ValueError(
            f"{architecture} has {layers} draft layers ({field}), each for one "
            f"more token; only one is supported: set {field} to 1 in config.json, "
            "and the first proposes all draft tokens, or set speculative to 'ngram'"
        )
    if stored is not None and not any(name.startswith(prefix) for name in stored):
        raise ValueError(
            f"{path} has no draft layers: expected tensors {prefix}*, but none has such a name "
            "(transformers does not save them); set speculative to 'ngram', or leave it out"
        )


def methods_as_stored(methods: Methods, checkpoint: Checkpoint) -> Methods:
    """The methods without the parts of the draft layer that a quantized checkpoint stores in
    floating point: it may leave the layer, or its eh_proj, unquantized and not say so.
    """
    stored, quantization = checkpoint.stored or {}, checkpoint.quantization
    if quantization is None or quantization.online:
        return methods
    cls = model_class(architectures_of(checkpoint.config))
    assert cls is not None and issubclass(cls, WithDraftLayer), "check_draft_layers passed"
    prefix = cls.stored_draft(checkpoint.config).prefix

    def is_float(name: str) -> bool:
        names = (f"{name}.weight", f"{name}.0.gate_proj.weight", f"{name}.gate_up_proj")
        return name.startswith(prefix) and any(
            stored[one].dtype in FLOATS for one in names if one in stored
        )

    return Methods(
        {name: method for name, method in methods.linears.items() if not is_float(name)},
        {name: method for name, method in methods.experts.items() if not is_float(name)},
    )
