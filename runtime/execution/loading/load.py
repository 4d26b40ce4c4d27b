"""Loads the model of an EngineConfig, with its tokenizer and the settings of its config."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from atomc.parallel.division import Division
from atomc.parallel.expert_placement import Ranks, read_placement
from atomc.parallel.process_group import ALONE, Place
from atomc.runtime.config import EngineConfig
from atomc.runtime.execution.images.model import ImageModel
from atomc.runtime.execution.loading.hub import model_folder
from atomc.runtime.execution.views.user_module import check_forward
from atomc.runtime.text.detokenizer import load_tokenizer
from atomc.runtime.text.generation_config import eos_token_ids

if TYPE_CHECKING:  # optional
    from tokenizers import Tokenizer

# Without attention, the state of a sequence does not grow with its length.
MAX_LEN_WITHOUT_ATTENTION = 2**20


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to compile, and its settings. max_len: maximum sequence length in
    tokens.
    """

    module: nn.Module
    tokenizer: "Tokenizer | None"
    eos_ids: frozenset[int]
    vocab_size: int | None
    max_len: int


def load(
    config: EngineConfig,
    module: nn.Module | None = None,
    *,
    progress: bool = True,
    place: Place = ALONE,
) -> LoadedModel:
    """Loads the config's checkpoint, or the parts of it that belong to this rank, or uses `module`
    instead.

    Raises ValueError for inconsistent settings, FileNotFoundError for an incomplete checkpoint,
    ImportError if the tokenizer needs a library that is not installed.
    """
    from atomc.loading import loader
    from atomc.stock.adapter import wrap_stock

    if module is not None:
        if (
            config.model
            or config.dtype
            or config.device
            or config.quantization
            or config.load_format != "auto"
        ):
            raise ValueError(
                "model, dtype, device, quantization and load_format apply to checkpoints: "
                "leave them out for "
                "a module"
            )
        # Stock transformers models have a method that replaces their attention.
        is_stock = hasattr(module, "set_attn_implementation")
        if not is_stock and ImageModel.of(module) is None:
            check_forward(module)
        model = wrap_stock(module) if is_stock else module
        return _loaded_model(model, None, _eos_ids_of_module(model), config)
    folder = config_folder(config)
    model = loader.load(
        folder,
        dtype=None if config.dtype is None else getattr(torch, config.dtype),
        device=present_device(config.device),
        load_format=config.load_format,
        quantization=_quantization(config),
        draft_layers=config.speculative_tokens if config.speculative == "mtp" else 0,
        mmap=config.mmap,
        progress=progress,
        division=Division(place, config.ep, expert_placement(config)),
    )
    return _loaded_model(
        model,
        load_tokenizer(folder),
        eos_token_ids(folder, _config_value(model, "vocab_size")),
        config,
    )


def expert_placement(config: EngineConfig) -> dict[str, Ranks]:
    """What the file of config.expert_placement says; {} without one. Raises ValueError for other
    content, and OSError if the file cannot be read.
    """
    if config.expert_placement is None:
        return {}
    return read_placement(Path(config.expert_placement), config.expert_ranks)


def _quantization(config: EngineConfig) -> dict[str, Any] | str | None:
    if config.quantization and config.quantization_ignore:
        return {"scheme": config.quantization, "ignore": config.quantization_ignore}
    return config.quantization


def present_device(name: str | None) -> str:
    """The device of this name; without one, a GPU if there is one. Raises ValueError for a GPU that
    is not there.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        return "cuda" if num_gpus else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        gpus = ", ".join(f"cuda:{index}" for index in range(num_gpus)) or "no GPU"
        raise ValueError(f"device is {name!r}, but torch finds {gpus}: leave it out, or use 'cpu'")
    return name


def _loaded_model(
    module: nn.Module, tokenizer: "Tokenizer | None", eos_ids: frozenset[int], config: EngineConfig
) -> LoadedModel:
    max_len = _max_len(module, config.max_model_len)
    return LoadedModel(module, tokenizer, eos_ids, _config_value(module, "vocab_size"), max_len)


def _max_len(module: nn.Module, max_model_len: int | None) -> int:
    """The maximum sequence length: max_model_len, else the model's max_position_embeddings, else
    the limit of models without attention.
    """
    trained_len = _config_value(module, "max_position_embeddings")
    max_len = max_model_len if max_model_len is not None else trained_len
    if max_len is None and _is_without_attention(module):
        return MAX_LEN_WITHOUT_ATTENTION
    if max_len is None:
        raise ValueError("the model's config has no max_position_embeddings: set max_model_len")
    if trained_len is not None and max_len > trained_len:
        raise ValueError(
            f"max_model_len={max_len} exceeds the model's limit of {trained_len} tokens "
            "(max_position_embeddings in its config)"
        )
    return max_len


def _is_without_attention(module: nn.Module) -> bool:
    from atomc.stock.adapter import StockModel

    return isinstance(module, StockModel) and not any(
        hasattr(layer, "kv") for layer in module.modules()
    )


def config_folder(config: EngineConfig) -> Path:
    """The folder of config.model; of the demo model if it is None."""
    if config.model is not None:
        return model_folder(config.model)
    from atomc import demo

    return Path(demo.PATH)


def _config_value(module: nn.Module, name: str) -> int | None:
    """An integer in the module's config or its text_config; None if there is none."""
    config = getattr(module, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        if isinstance(getattr(part, name, None), int):
            return int(getattr(part, name))
    return None


def _eos_ids_of_module(module: nn.Module) -> frozenset[int]:
    inner = getattr(module, "hf_model", module)
    for config in (getattr(inner, "generation_config", None), getattr(inner, "config", None)):
        token_ids = getattr(config, "eos_token_id", None)
        if token_ids is not None:
            return frozenset([token_ids] if isinstance(token_ids, int) else token_ids)
    return frozenset()
