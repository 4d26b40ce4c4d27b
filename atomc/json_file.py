"""Reads JSON files of checkpoints. Does not import torch, for processes that do not need it."""

import json
from pathlib import Path
from typing import Any

from atomc.json_types import json_kind


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint directory. Raises FileNotFoundError if it is missing, else as
    read_json.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a directory; expected one with config.json and *.safetensors"
        )
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no config.json; is it a complete checkpoint?")
    return read_json(file)


def read_json(file: Path) -> dict[str, Any]:
    """The object in the file. Raises ValueError for other content, and OSError if the file cannot
    be read.
    """
    if file.exists() and not file.is_file():  # reading a pipe would block
        raise ValueError(f"{file} is not a regular file, expected a JSON file; download it again")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}; download it again") from error
    except RecursionError as error:
        raise ValueError(
            f"{file} is nested too deeply for a JSON file of a checkpoint; download it again"
        ) from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} contains {json_kind(value)}, expected an object")
    return value
