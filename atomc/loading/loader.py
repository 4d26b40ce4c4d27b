"""Loads a checkpoint: builds the model on meta, checks names and shapes, reads the weights.

All checks use the headers of the files and run before the first weight is read.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn

from atomc.files.json_types import JSONLike
from atomc.loading.cache_scales import mark_fp8_state
from atomc.loading.checkpoint_files import (
    Checkpoint,
    config_dtype,
    load_config,
    stored_dtype,
    stored_tensors,
)
from atomc.loading.create_model import create_model
from atomc.loading.draft_checkpoint import check_draft_layers, draft_prefix, methods_as_stored
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
from atomc.parallel import sizes
from atomc.parallel.expert_placement import Placement
from atomc.parallel.process_group import PipelineStage, TensorParallel
from atomc.parallel.sharding import Sharding
from atomc.parallel.stages import ALL_NAMES, OwnNames, cut_stage
from atomc.quantization import apply
from atomc.quantization.apply import Methods
from atomc.quantization.config import (
    QuantizationConfig,
    Request,
    decide,
    unquantized_config,
)
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
    draft_layer: bool = False,
    mmap: bool = True,
    progress: bool = True,
    tp: TensorParallel | None = None,
    ep: bool = False,
    stage: PipelineStage | None = None,
    experts: TensorParallel | None = None,
    expert_placement: Placement | None = None,
) -> nn.Module:
    """The model in directory `path`, ready for inference: eval mode, no gradients.

    dtype         None: that of config.json, else that of the stored weights
    load_format   "auto" and "safetensors" read the weights; "dummy": small random weights, equal in
                  each load
    quantization  quantizes the weights during loading: a name in atomc.quantization.ONLINE, or
                  {"scheme": name, "ignore": [patterns of layers to skip]}. None: as stored. See
                  docs/quantization.md
    draft_layer   load the first draft layer too (atomc.models.mtp)
    mmap          weights are views of the mapped files if dtype and device allow it; False: files
                  are read into memory, which is faster from a network disk
    tp            divide the model over the processes of a group: this one reads its parts of the
                  weights (atomc.parallelize)
    ep            experts by expert, not each by its width
    stage         only the layers of this stage of a pipeline (atomc.parallel.stages)
    experts       divide only the experts, over the processes of a group that each have tokens of
                  their own; instead of tp
    expert_placement  which rank has which expert, with ep or experts; layers that it does not have
                  are divided into equal ranges of experts

    Raises FileNotFoundError or ValueError for a missing, damaged or inconsistent file, and
    ValueError for a model without draft layers if one is wanted, one that does not divide, and a
    placement of experts that it does not have.
    """
    path = Path(path)
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format {load_format!r} is not one of {LOAD_FORMATS}")
    config = load_config(path)
    divide = _division(config, tp, experts, ep=ep)
    architectures = architectures_of(config)
    checkpoint = _opened(path, config, dtype, dummy=load_format == "dummy", draft_layer=draft_layer)
    stored, dtype = checkpoint.stored, checkpoint.dtype
    is_whole = divide is None and stage is None

    if model_class(architectures) is not None:
        quant_config = decide(quantization, path, config)
        model = create_model(config, dtype, "meta", draft_layer=draft_layer)
    else:
        cls = adapter.hf_class(architectures, sorted(REGISTRY))
        quant_config = decide_for_stock(quantization, path, config)
        check_stock_size(cls, checkpoint, quant_config, device)
        if quant_config is None and is_whole:
            return ready(load_stock(cls, checkpoint, device))
        model = build_stock_on_meta(cls, checkpoint, quant_config)
    stage_names = ALL_NAMES if stage is None else cut_stage(model, stage)
    if divide is not None and expert_placement:
        divide = partial(divide, placement=stage_names.select(expert_placement))
    methods = _quantized_layers(model, quant_config, path)

    if stored is None:
        load_dummy(model, methods, device, divide, stage_names)
        return ready(model)
    if draft_layer:
        methods = methods_as_stored(methods, quant_config, stored, draft_prefix(config))
    try:
        plan = _plan(model, stored, quant_config, methods, path, dtype, stage_names)
    except ValueError as error:
        if is_whole or quant_config is not None or not isinstance(model, adapter.StockModel):
            raise
        log.warning("each rank reads all weights through transformers: %s", error)
        hf_class = type(model.hf_model)
        return ready(load_stock_and_cut(hf_class, checkpoint, device, divide, stage))
    _execute(plan, model, methods, divide, device, mmap, progress)
    return ready(model)


def _division(
    config: Mapping[str, JSONLike],
    tp: TensorParallel | None,
    experts: TensorParallel | None,
    *,
    ep: bool,
) -> Callable[..., Sharding] | None:
    """What divides a model over processes, given it and the names of layers to quantize; None: it
    is not divided. Raises ValueError for sizes that do not divide.
    """
    if experts is not None:
        sizes.check_experts(config, experts.size)
        return partial(Sharding.of_experts, place=experts)
    if tp is not None and tp.size > 1:
        sizes.check(config, tp.size, ep=ep)
        return partial(Sharding.of, place=tp, ep=ep)
    return None


def _opened(
    path: Path,
    config: Mapping[str, JSONLike],
    dtype: torch.dtype | None,
    *,
    dummy: bool,
    draft_layer: bool,
) -> Checkpoint:
    """The checkpoint in `path`. Raises ValueError if its tensors are not of this config, or if it
    has no draft layer and should have one.
    """
    stored = None if dummy else stored_tensors(path)
    if stored is not None:
        check_layers(config, len(stored))
    if draft_layer:
        check_draft_layers(config, stored, path)
    dtype = dtype or config_dtype(config) or stored_dtype(stored or {})
    return Checkpoint(path, config, stored, dtype)


def _execute(
    plan: LoadPlan,
    model: nn.Module,
    methods: Methods,
    divide: Callable[..., Sharding] | None,
    device: torch.device | str,
    mmap: bool,
    progress: bool,
) -> None:
    """Read the weights of a model on meta; divide it before, and read this rank's part of them."""
    if divide is None:
        return execute(plan, model, methods, device, mmap, progress)
    sharding = divide(model, quantized=methods.linears)
    plan = part_of_plan(plan, model, sharding.cut())
    check_parts(model, methods)
    execute(plan, model, methods, device, mmap, progress)
    sharding.connect()


def check_expert_placement(
    path: str | Path, placement: Placement, num_ranks: int, *, draft_layer: bool = False
) -> None:
    """Raise ValueError for a placement of other experts than those of the model in directory
    `path`, from its config.json alone.
    """
    config = load_config(Path(path))
    if draft_layer:
        check_draft_layers(config, None, Path(path))
    model = create_model(unquantized_config(config), device="meta", draft_layer=draft_layer)
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


def _quantized_layers(
    model: nn.Module, quant_config: QuantizationConfig | None, path: Path
) -> Methods:
    """The layers to quantize. A quantized cache sets the dtype of the state handles."""
    if quant_config is None:
        return Methods()
    for note in quant_config.notes:
        log.warning("%s: %s", path, note)
    if quant_config.kv_cache_dtype == "fp8":
        mark_fp8_state(model)
    return apply.methods_of(model, quant_config, _prefix(model))


def _plan(
    model: nn.Module,
    stored: dict[str, Stored],
    quant_config: QuantizationConfig | None,
    methods: Methods,
    path: Path,
    dtype: torch.dtype,
    stage_names: OwnNames,
) -> LoadPlan:
    """The plan for these tensors of a checkpoint, whose names in the model are its own. Logs the
    names that are not part of the model.
    """
    stored = stage_names.select(_model_names(model, stored, quant_config))
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
