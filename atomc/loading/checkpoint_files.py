"""Reads config.json and the headers of the weights of a checkpoint directory."""

import os
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple

import safetensors
import torch

from atomc.files.json_file import read_config, read_json
from atomc.files.json_types import JSONMapping
from atomc.loading.limits import MAX_TENSORS, Stored, check_headers, check_sizes
from atomc.loading.load_plan import FLOATS, first_names
from atomc.quantization.config import QuantizationConfig

INDEX = "model.safetensors.index.json"
MAX_LENGTH = 255  # of a file name on most systems


class Checkpoint(NamedTuple):
    """What the files of a checkpoint say of its model, before a weight is read.

    stored  its tensors by name; None: they are not read, and the model has random weights
    dtype   of the weights in the model
    quantization  of its layers, as stored or during loading; None: none are atomc's
    """

    path: Path
    config: JSONMapping
    stored: dict[str, Stored] | None
    dtype: torch.dtype
    quantization: QuantizationConfig | None


def load_config(path: str | Path) -> JSONMapping:
    """config.json of a checkpoint directory. Raises FileNotFoundError if it is missing, ValueError
    for sizes beyond the limits.
    """
    config = read_config(Path(path))
    if not isinstance(config.get("model_type"), str | None):
        raise ValueError(
            f"config.json: model_type is {config['model_type']!r:.40}, expected a text"
        )
    check_sizes(config)
    return config


def config_dtype(config: JSONMapping) -> torch.dtype | None:
    """The dtype in config.json (transformers 5: `dtype`, older: `torch_dtype`), of a model with
    images maybe in its text_config; None if it has none. Raises ValueError for a name that is not a
    floating-point dtype.
    """
    name = config["dtype"] if config.get("dtype") is not None else config.get("torch_dtype")
    text = config.get("text_config")
    if name is None:
        return config_dtype(text) if isinstance(text, dict) else None
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"config.json: dtype {name!r:.40} is not a dtype of torch, such as 'bfloat16'"
        )
    if not dtype.is_floating_point:
        raise ValueError(
            f"config.json: dtype {name!r} is not a floating-point dtype, such as 'bfloat16'"
        )
    return dtype


def stored_tensors(path: Path) -> dict[str, Stored]:
    """The tensors of a checkpoint by name, from the headers of its files; if there are several
    files, from those that the index names.
    """
    index = path / INDEX
    single = path / "model.safetensors"
    if single.is_file():
        check_headers([single])
        return read_header(single)
    if not index.is_file():
        file_names = ", ".join(sorted(file.name for file in path.iterdir())) or "nothing"
        raise FileNotFoundError(
            f"{path} has neither {single.name} nor {index.name}; it has {file_names}"
        )
    weight_map = _weight_map(index)
    shards = {}
    for file_name in sorted(set(weight_map.values())):
        shards[file_name] = shard = shard_path(path, file_name)
        if not shard.is_file():
            raise FileNotFoundError(
                f"{path} lacks {file_name}, which {index.name} names; download it again"
            )
    check_headers(shards.values())
    headers = {file_name: read_header(shard) for file_name, shard in shards.items()}
    absent = sorted(
        name for name, file_name in weight_map.items() if name not in headers[file_name]
    )
    if absent:
        raise ValueError(
            f"{index}: {first_names(absent)} not in the file it names ({weight_map[absent[0]]})"
        )
    return {name: headers[file_name][name] for name, file_name in weight_map.items()}


def _weight_map(index: Path) -> dict[str, str]:
    """Name of a tensor -> name of its file. Raises ValueError for another file."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise ValueError(f"{index} has no weight_map (name of tensor -> file); download it again")
    if len(weight_map) > MAX_TENSORS:
        raise ValueError(
            f"{index.name} names {len(weight_map)} tensors, expected at most {MAX_TENSORS}; "
            "download it again"
        )
    return weight_map


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file. Raises ValueError for a damaged file."""
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: Stored(file, part.get_dtype(), tuple(part.get_shape()), name)
                for name, part in slices.items()
            }
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file} is damaged or incomplete ({error}); download it again") from error


def stored_dtype(stored: dict[str, Stored]) -> torch.dtype:
    """The dtype of the first floating-point tensor; fp32 if there is none."""
    return next(
        (FLOATS[tensor.dtype] for tensor in stored.values() if tensor.dtype in FLOATS),
        torch.float32,
    )


def shard_path(folder: Path, name: str) -> Path:
    """The file of this name. Raises ValueError for a path or link outside of the folder."""
    written = PurePosixPath(name)
    if (
        not name.isprintable()
        or PureWindowsPath(name).drive
        or written.is_absolute()
        or ".." in written.parts
        or not written.parts
        or len(name) > MAX_LENGTH
    ):
        raise ValueError(
            f"{INDEX} names {_short(name)}, expected a file in the model's folder such as "
            "model-00001-of-00002.safetensors"
        )
    file = folder / written
    real = Path(os.path.realpath(file))
    if not any(real.is_relative_to(os.path.realpath(root)) for root in _roots(folder)):
        raise ValueError(
            f"{INDEX} names {_short(name)}, a link to {_short(str(real))}, which is not in the "
            "model's folder: move the file there"
        )
    return file


def _roots(folder: Path) -> list[Path]:
    """The allowed locations: the folder, or the blob store of the hub's cache."""
    absolute = Path(os.path.realpath(folder))
    blobs = [parent.parent / "blobs" for parent in absolute.parents if parent.name == "snapshots"]
    return [absolute, *blobs[:1]]


def _short(name: str) -> str:
    return repr(name) if len(name) <= 100 else f"{name[:100]!r}... ({len(name)} characters)"
