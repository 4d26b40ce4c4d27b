"""Reads JSON files of checkpoints. Does not import torch, for processes that do not need it."""

import json
import math
from pathlib import Path
from typing import Any

from atomc.files.json_types import json_kind

# How transformers writes numbers that JSON does not have: {"__float__": "Infinity"}.
_FLOAT_TAG = "__float__"
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint directory. Raises FileNotFoundError, or as read_json."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a directory; expected one with config.json and *.safetensors"
        )
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no config.json; is it a complete checkpoint?")
    return read_json(file)


def read_json(file: Path) -> dict[str, Any]:
    """The object in the file, with numbers as transformers reads them: also Infinity, NaN and
    {"__float__": "Infinity"}. Raises ValueError for other content, and OSError if the file cannot
    be read.
    """
    if file.exists() and not file.is_file():  # reading a pipe would block
        raise ValueError(f"{file} is not a regular file, expected a JSON file; download it again")
    try:
        value = json.loads(file.read_text(encoding="utf-8"), object_hook=_untagged)
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}; download it again") from error
    except RecursionError as error:
        raise ValueError(
            f"{file} is nested too deeply for a JSON file of a checkpoint; download it again"
        ) from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} contains {json_kind(value)}, expected an object")
    return value


def _untagged(value: dict[str, Any]) -> Any:
    tag = value.get(_FLOAT_TAG)
    if len(value) == 1 and isinstance(tag, str):
        return _FLOATS.get(tag, value)
    return value
