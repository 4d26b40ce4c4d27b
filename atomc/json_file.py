"""Reads JSON files of checkpoints. Does not import torch, for processes that do not need it."""

import json
from pathlib import Path
from typing import Any


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
        raise ValueError(f"{file} contains a {type(value).__name__}, expected an object")
    return value
