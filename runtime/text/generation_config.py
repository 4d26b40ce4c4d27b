"""Reads and validates generation_config.json.

Value ranges are those of SamplingParams. Raises ValueError with file, field, value and expectation.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atomc.files.json_file import read_json
from atomc.runtime.requests.sampling_params import MIN_TEMPERATURE, SamplingParams

FILE = "generation_config.json"
NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """The sampling parameters in generation_config.json; empty without the file."""
    config = _read(folder, FILE)
    return {name: _number(name, config[name]) for name in NUMBERS if config.get(name) is not None}


def do_sample(folder: Path) -> bool:
    """Whether generation_config.json sets do_sample; the default is greedy."""
    value = _read(folder, FILE).get("do_sample")
    if not isinstance(value, bool | None):
        raise ValueError(f"{FILE}: do_sample is {value!r}, it must be true or false")
    return bool(value)


def eos_token_ids(folder: Path, vocab_size: int | None) -> frozenset[int]:
    """The end-of-sequence tokens, from generation_config.json, else from config.json."""
    for file in (FILE, "config.json"):
        tokens = _read(folder, file).get("eos_token_id")
        if tokens is not None:
            return frozenset(
                _checked(file, tokens if isinstance(tokens, list) else [tokens], vocab_size)
            )
    return frozenset()


def _read(folder: Path, file: str) -> dict[str, Any]:
    return read_json(folder / file) if os.path.lexists(folder / file) else {}


def _number(name: str, value: Any) -> float:
    is_int = name == "top_k"
    if isinstance(value, bool) or not isinstance(value, int if is_int else int | float):
        raise ValueError(
            f"{FILE}: {name} is {value!r:.40}, it must be a{' whole' if is_int else ''} number"
        )
    if is_int and value == -1:  # vLLM's value for all tokens
        return 0
    if name == "temperature" and 0 < value < MIN_TEMPERATURE:  # some checkpoints' value for greedy
        return 0.0
    values: dict[str, Any] = {name: value}
    try:
        SamplingParams(**values)
    except ValueError as error:
        raise ValueError(f"{FILE}: {error}") from error
    return value if is_int else float(value)


def _checked(file: str, tokens: Sequence[Any], vocab_size: int | None) -> list[int]:
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ValueError(
                f"{file}: eos_token_id has {token!r:.40}, it must be a token id or a list of "
                "token ids"
            )
        if vocab_size is not None and token >= vocab_size:
            raise ValueError(
                f"{file}: eos_token_id has {token!r:.40}, it must be below {vocab_size}, the size "
                "of the vocabulary"
            )
    return list(tokens)
