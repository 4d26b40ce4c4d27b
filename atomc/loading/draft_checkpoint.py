"""How many draft layers for multi-token prediction a checkpoint has, and in which format."""

from collections.abc import Collection
from pathlib import Path

from atomc.files.json_types import JSONMapping
from atomc.loading.checkpoint_files import Checkpoint
from atomc.loading.load_plan import FLOATS
from atomc.models import architectures_of, model_class
from atomc.models.config import count
from atomc.models.mtp import WithDraftLayers
from atomc.quantization.apply import Methods


def num_draft_layers(hf: JSONMapping, stored: Collection[str] | None, path: Path) -> int:
    """How many draft layers the checkpoint in `path` has. Raises ValueError if it has none, or if
    the class of its model cannot load them.

    hf      its config.json
    stored  the names of its tensors; None: its weights are not read
    """
    architectures = architectures_of(hf)
    architecture, cls = architectures[0], model_class(architectures)
    if cls is not None and issubclass(cls, WithDraftLayers):
        layers, field, prefixes = cls.stored_draft(hf)
    else:
        field, prefixes = "num_nextn_predict_layers", ("mtp.",)
        layers = max(count(hf, field, 0), any(name.startswith(prefixes) for name in stored or ()))
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
    if not issubclass(cls, WithDraftLayers):
        raise ValueError(f"{architecture}: {cls.__module__} does not implement draft layers")
    for prefix in prefixes:
        if stored is not None and not any(name.startswith(prefix) for name in stored):
            raise ValueError(
                f"{path} has no draft layers: expected tensors {prefix}*, but none has such a name "
                "(transformers does not save them); set speculative to 'ngram', or leave it out"
            )
    return layers


def methods_as_stored(methods: Methods, checkpoint: Checkpoint) -> Methods:
    """The methods without the parts of the draft layers that a quantized checkpoint stores in
    floating point: it may leave a layer, or its eh_proj, unquantized and not say so.
    """
    stored, quantization = checkpoint.stored or {}, checkpoint.quantization
    if quantization is None or quantization.online:
        return methods
    cls = model_class(architectures_of(checkpoint.config))
    assert cls is not None and issubclass(cls, WithDraftLayers), "num_draft_layers passed"
    prefixes = cls.stored_draft(checkpoint.config).prefixes

    def is_float(name: str) -> bool:
        names = (f"{name}.weight", f"{name}.0.gate_proj.weight", f"{name}.gate_up_proj")
        return name.startswith(prefixes) and any(
            stored[one].dtype in FLOATS for one in names if one in stored
        )

    return Methods(
        {name: method for name, method in methods.linears.items() if not is_float(name)},
        {name: method for name, method in methods.experts.items() if not is_float(name)},
    )
