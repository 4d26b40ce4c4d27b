"""What a load does for transformers classes only: checks, and weights that transformers reads."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from atomc.files.json_types import JSONMapping
from atomc.loading.checkpoint_files import Checkpoint
from atomc.loading.limits import check_buffers, check_memory, check_stored
from atomc.parallel.division import Division
from atomc.quantization import checkpoints
from atomc.quantization.config import QuantizationConfig, Request, decide, stored_config
from atomc.stock import adapter
from atomc.weights.parameters import fill_randomly

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("atomc")


def decide_for_stock(wanted: Request, path: Path, config: JSONMapping) -> QuantizationConfig | None:
    """As decide(); None, with a line in the log, for a format that only transformers can load."""
    stored = stored_config(path, config)
    method = stored.get("quant_method") if stored else None
    if stored and wanted is None and method not in checkpoints.PARSERS:
        log.warning(
            "%s: weights of quant_method %r are loaded by transformers and run by its layers",
            path,
            method,
        )
        return None
    return decide(wanted, path, config)


def check_stock_size(
    cls: "type[PreTrainedModel]", checkpoint: Checkpoint, device: torch.device | str
) -> None:
    """Raise ValueError if a transformers model has more parameters than its checkpoint, too large
    tables, or if its random weights exceed the free memory.
    """
    path, config, stored, dtype, quantization = checkpoint
    model = adapter.empty_model(cls, config, dtype)
    check_buffers(model, cls.__name__)
    if stored is None and quantization is not None:
        return  # load_dummy counts the bytes of quantized weights
    if stored is None:
        wanted = sum(weight.nbytes for weight in model.parameters())
        check_memory(wanted, cls.__name__, device)
    else:
        quantized = stored_config(path, config) is not None
        check_stored(model, cls.__name__, stored, quantized=quantized)


def build_stock_on_meta(cls: "type[PreTrainedModel]", checkpoint: Checkpoint) -> adapter.StockModel:
    """A transformers model with the checkpoint's weights, or with random ones."""
    path, config, _, dtype, quantization = checkpoint
    if quantization is None and stored_config(path, config) is not None:
        raise ValueError(f"{path}: weights that transformers quantized do not divide over ranks")
    return adapter.build_on_meta(cls, config, dtype)


def load_stock(
    cls: "type[PreTrainedModel]", checkpoint: Checkpoint, device: torch.device | str, mmap: bool
) -> adapter.StockModel:
    """A transformers model with the weights of the checkpoint, loaded by transformers, or with
    random weights.
    """
    path, config, stored, dtype, _ = checkpoint
    if stored is not None:
        return adapter.load(cls, path, dtype, device, mmap=mmap)
    model = adapter.build(cls, config, dtype, device)
    fill_randomly(model, device)
    return model


def load_stock_and_cut(
    cls: "type[PreTrainedModel]",
    checkpoint: Checkpoint,
    device: torch.device | str,
    mmap: bool,
    division: Division,
) -> nn.Module:
    """This rank's part of a transformers model, all of which is read into host memory."""
    model = load_stock(cls, checkpoint, "cpu", mmap)
    division.cut_stage(model)
    if (sharding := division.shard(model)) is not None:
        sharding.cut()
        sharding.connect()
    return model.to(device)
