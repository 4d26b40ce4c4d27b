"""Resolves a model name: a local directory, or a model on the Hugging Face hub."""

import re
from pathlib import Path

from atomc.errors import first_line
from atomc.files.json_file import read_config

# Configs, tokenizers, chat templates, and safetensors weights; no files that can contain code or
# pickles.
FILES = ("*.json", "*.txt", "*.model", "*.jinja")
WEIGHTS = ("*.safetensors",)
NAME = re.compile(r"[\w.-]+/[\w.-]+")


def local_folder(name: str) -> Path | None:
    """The directory `name`; None for a name on the hub. Raises FileNotFoundError for a name that is
    neither.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.suffix == ".py" and folder.is_file():
        raise FileNotFoundError(
            f"{name} is a Python file, expected a directory or a name on the hub; `atomc explain "
            f"{name}:FUNCTION` takes a function that returns a module, LLM(module) the module"
        )
    if folder.exists() or not NAME.fullmatch(name):
        raise FileNotFoundError(
            f"{name} is neither a directory nor a name on the hub such as Qwen/Qwen3-0.6B"
        )
    return None


def model_folder(name: str, *, weights: bool = True) -> Path:
    """The directory `name`, or the local copy of the hub's model of this name, which is downloaded
    if missing.

    HF_HUB_OFFLINE=1 disables network access, HF_HOME sets the location of copies. Raises
    FileNotFoundError for a name that is neither, ValueError for a model that cannot be downloaded,
    ImportError without huggingface_hub, and as read_config for a folder whose config.json is
    missing or damaged.
    """
    folder = local_folder(name) or _downloaded(name, weights)
    read_config(folder)
    return folder


def _downloaded(name: str, weights: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
        from huggingface_hub.utils import logging
    except ImportError as error:
        raise ImportError(
            f"{name} is not a directory; to download it from the hub: pip install 'atomc[hf]'"
        ) from error
    logging.set_verbosity_error()
    try:
        return Path(snapshot_download(name, allow_patterns=[*FILES, *(WEIGHTS if weights else ())]))
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"{name} is not a directory and not in the local cache, and the hub cannot be reached "
            "(or HF_HUB_OFFLINE is set): pass a directory, or download it first"
        ) from error
    except HfHubHTTPError as error:
        raise ValueError(
            f"{name} is not a directory, and downloading it failed: "
            f"{first_line(error) or type(error).__name__}"
        ) from error
