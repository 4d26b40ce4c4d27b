"""Loads a checkpoint: builds the model on meta, checks names and shapes, reads the weights.

All checks use the headers of the files and run before the first weight is read.
"""

import logging
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from atomc.files.json_types import JSONMapping
from atomc.loading.cache_scales import mark_fp8_state
from atomc.loading.checkpoint_files import (
    Checkpoint,
    config_dtype,
    load_config,
    stored_dtype,
    stored_tensors,
)
from atomc.loading.create_model import create_model
from atomc.loading.draft_checkpoint import methods_as_stored, num_draft_layers
from atomc.loading.dummy_weights import load_dummy
from atomc.loading.execute_plan import execute
from atomc.loading.limits import Stored, check_layers
from atomc.loading.load_parts import part_of_plan
from atomc.loading.load_plan import LoadPlan, first_names, plan_load
from atomc.loading.stock_checkpoint import (
    build_stock_on_meta,
    check_stock_size,
    decide_for_stock,
    load_stock,
    load_stock_and_cut,
)
from atomc.models import REGISTRY, architectures_of, model_class
from atomc.parallel.division import WHOLE, Division
from atomc.parallel.expert_placement import Placement
from atomc.parallel.process_group import ALONE, TensorParallel
from atomc.parallel.sharding import Sharding
from atomc.parallel.stages import OwnNames
from atomc.quantization import apply
from atomc.quantization.apply import Methods
from atomc.quantization.config import QuantizationConfig, Request, decide, unquantized_config
from atomc.quantization.experts_spec import is_experts, spec_of
from atomc.stock import adapter

log = logging.getLogger("atomc")

LOAD_FORMATS = ("auto", "safetensors", "dummy")


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    quantization: Request = None,
    draft_layers: int = 0,
    mmap: bool = True,
    progress: bool = True,
    division: Division = WHOLE,
) -> nn.Module:
    """The model in directory `path`, ready for inference: eval mode, no gradients.

    dtype         None: that of config.json, else that of the stored weights
    load_format   "auto" and "safetensors" read the weights; "dummy": small random weights, equal in
                  each load
    quantization  quantizes the weights during loading: a name in atomc.quantization.ONLINE, or
                  {"scheme": name, "ignore": [patterns of layers to skip]}. None: as stored. See
                  docs/quantization.md
    draft_layers  load so many of its first draft layers too, at most (atomc.models.mtp)
    mmap          weights are views of the mapped files if dtype and device allow it; False: files
                  are read into memory, which is faster from a network disk
    division      this process reads its part of the weights (atomc.parallelize)

    Raises FileNotFoundError or ValueError for a missing, damaged or inconsistent file, and
    ValueError for a model without draft layers if some are wanted, one that does not divide, and a
    placement of experts that it does not have.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format {load_format!r} is not one of {LOAD_FORMATS}")
    config = load_config(path)
    division.check(config)
    dummy = load_format == "dummy"
    checkpoint = _opened(Path(path), config, dtype, quantization, dummy=dummy)
    if draft_layers:
        draft_layers = min(draft_layers, num_draft_layers(config, checkpoint.stored, Path(path)))
    architectures = architectures_of(config)
    if model_class(architectures) is not None:
        model = create_model(config, checkpoint.dtype, "meta", draft_layers=draft_layers)
    else:
        cls = adapter.hf_class(architectures, sorted(REGISTRY))
        check_stock_size(cls, checkpoint, device)
        if checkpoint.quantization is None and division.place == ALONE:
            return ready(load_stock(cls, checkpoint, device, mmap))
        model = build_stock_on_meta(cls, checkpoint)
    stage_names = division.cut_stage(model)
    division = replace(division, placement=stage_names.select(division.placement))
    methods = _quantized_layers(model, checkpoint)
    if checkpoint.stored is None:
        load_dummy(model, methods, device, division, stage_names)
        return ready(model)
    if draft_layers:
        methods = methods_as_stored(methods, checkpoint)
    try:
        plan = _plan(model, checkpoint, methods, stage_names)
    except ValueError as error:
        is_stock = isinstance(model, adapter.StockModel)
        if division.place == ALONE or checkpoint.quantization is not None or not is_stock:
            raise
        log.warning("each rank reads all weights through transformers: %s", error)
        cls = type(model.hf_model)
        return ready(load_stock_and_cut(cls, checkpoint, device, mmap, division))
    _execute(plan, model, methods, division, device, mmap, progress)
    return ready(model)


def _opened(
    path: Path,
    config: JSONMapping,
    dtype: torch.dtype | None,
    quantization: Request,
    *,
    dummy: bool,
) -> Checkpoint:
    """The checkpoint in `path`. Raises ValueError if its tensors are not of this config."""
    stored = None if dummy else stored_tensors(path)
    if stored is not None:
        check_layers(config, len(stored))
    dtype = dtype or config_dtype(config) or stored_dtype(stored or {})
    is_stock = model_class(architectures_of(config)) is None
    quantized_by = (decide_for_stock if is_stock else decide)(quantization, path, config)
    return Checkpoint(path, config, stored, dtype, quantized_by)


def _execute(
    plan: LoadPlan,
    model: nn.Module,
    methods: Methods,
    division: Division,
    device: torch.device | str,
    mmap: bool,
    progress: bool,
) -> None:
    """Read the weights of a model on meta; divide it before, and read this rank's part of them."""
    if (sharding := division.shard(model, methods.linears)) is not None:
        plan = part_of_plan(plan, model, sharding.cut())
        check_parts(model, methods)
    execute(plan, model, methods, device, mmap, progress)
    if sharding is not None:
        sharding.connect()


def check_expert_placement(
    path: str | Path, placement: Placement, num_ranks: int, *, draft_layers: int = 0
) -> None:
    """Raise ValueError for a placement of other experts than those of the model in directory
    `path`, with so many of its draft layers at most, from its config.json alone.
    """
    config = load_config(Path(path))
    if draft_layers:
        draft_layers = min(draft_layers, num_draft_layers(config, None, Path(path)))
    model = create_model(unquantized_config(config), device="meta", draft_layers=draft_layers)
    Sharding.of_experts(model, TensorParallel(0, num_ranks, ""), placement=placement)


def check_parts(model: nn.Module, methods: Methods) -> None:
    """Raise ValueError for a layer whose part cannot be quantized during loading."""
    for name, method in methods.linears.items():
        layer = model.get_submodule(name)
        if isinstance(layer, nn.Linear):
            reason = method.scheme.refuses(layer.out_features, layer.in_features)
            if reason is not None:
                raise ValueError(f"{name}, divided over ranks: {reason}")
    for name, of_experts in methods.experts.items():
        layer = model.get_submodule(name)
        if is_experts(layer) and (reason := of_experts.refuses(spec_of(layer))):
            raise ValueError(f"{name}, divided over ranks: {reason}")


def _prefix(model: nn.Module) -> str:
    """The prefix of parameter names that names in a checkpoint do not have."""
    return adapter.PREFIX if isinstance(model, adapter.StockModel) else ""


def _quantized_layers(model: nn.Module, checkpoint: Checkpoint) -> Methods:
    """The layers to quantize. A quantized cache sets the dtype of the state handles."""
    quant_config = checkpoint.quantization
    if quant_config is None:
        return Methods()
    for note in quant_config.notes:
        log.warning("%s: %s", checkpoint.path, note)
    if quant_config.kv_cache_dtype == "fp8":
        mark_fp8_state(model)
    return apply.methods_of(model, quant_config, _prefix(model))


def _plan(
    model: nn.Module, checkpoint: Checkpoint, methods: Methods, stage_names: OwnNames
) -> LoadPlan:
    """The plan for the tensors of a checkpoint that are of this stage. Logs the names that are not
    part of the model.
    """
    path, _, all_stored, dtype, quant_config = checkpoint
    stored = stage_names.select(_model_names(model, all_stored or {}, quant_config))
    online = quant_config is not None and quant_config.online
    if not online:
        try:
            shapes = {name: tensor.shape for name, tensor in stored.items()}
            apply.create_weights(model, methods, dtype, shapes)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        apply.drop_optional(model, stored)
    plan = plan_load(model, stored, path, dtype, methods if online else None)
    if plan.skipped:
        log.info(
            "%s: skipped %s, which are not part of %s",
            path,
            first_names(plan.skipped),
            type(model).__name__,
        )
    return plan


def _model_names(
    model: nn.Module, stored: dict[str, Stored], quant_config: QuantizationConfig | None
) -> dict[str, Stored]:
    """The tensors by their names in the model."""
    rename, prefix = quant_config.rename if quant_config else {}, _prefix(model)
    blocks = {name.rpartition(".")[2] for name, _ in model.named_modules()}

    def model_name(name: str) -> str:
        if "block_sparse_moe" not in blocks:  # Mixtral's name of it in transformers 4
            name = name.replace(".block_sparse_moe.", ".mlp.")
        if "language_model" not in blocks:  # the text model of a checkpoint with images
            name = name.replace("model.language_model.", "model.")
        owner, dot, leaf = name.rpartition(".")
        return prefix + owner + dot + rename.get(leaf, leaf)

    return {model_name(name): tensor for name, tensor in stored.items()}


def ready(model: nn.Module) -> nn.Module:
    """The model in eval mode and without gradients."""
    return model.requires_grad_(False).eval()
