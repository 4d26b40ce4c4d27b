"""Checks the types of the fields of a `quantization_config` before it is parsed."""

from collections.abc import Mapping

from atomc.files.json_types import JSONLike

OBJECT, NAMES, NUMBERS, TEXT = "an object", "a list of names", "a list of numbers", "a text"
EXPECTED = {
    "config_groups": OBJECT,
    "weights": OBJECT,
    "input_activations": OBJECT,
    "output_activations": OBJECT,
    "sparsity_config": OBJECT,
    "global_quant_config": OBJECT,
    "weight": OBJECT,
    "input_tensors": OBJECT,
    "ignore": NAMES,
    "ignored_layers": NAMES,
    "modules_to_not_convert": NAMES,
    "exclude": NAMES,
    "exclude_modules": NAMES,
    "quantization": OBJECT,
    "targets": NAMES,
    "weight_block_size": NUMBERS,
    "block_structure": NUMBERS,
    "quant_method": TEXT,
    "format": TEXT,
    "checkpoint_format": TEXT,
    "activation_scheme": TEXT,
}


def check_types(config: Mapping[str, JSONLike], where: str) -> None:
    """Raise ValueError for a field of the wrong type, also in nested objects; null is allowed."""
    for name, value in config.items():
        expected = OBJECT if where.endswith(".config_groups") else EXPECTED.get(name)
        if expected is not None and value is not None and not _is(value, expected):
            raise ValueError(f"{where}.{name} is {value!r:.60}, expected {expected}")
        if isinstance(value, Mapping):
            check_types(value, f"{where}.{name}")


def _is(value: JSONLike, expected: str) -> bool:
    match expected:
        case "an object":
            return isinstance(value, Mapping)
        case "a text":
            return isinstance(value, str)
        case "a list of names":
            return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    return isinstance(value, list | tuple) and all(isinstance(item, int) for item in value)
