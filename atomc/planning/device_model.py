"""The model of a plan: one device's shard of it, on the meta device."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from atomc.files.json_types import JSONMapping
from atomc.loading.checkpoint_files import config_dtype, load_config
from atomc.loading.create_model import create_model
from atomc.loading.draft_checkpoint import num_draft_layers
from atomc.loading.loader import check_parts, ready
from atomc.models.config import integer
from atomc.models.mtp import DraftModel
from atomc.parallel.division import Division
from atomc.parallel.process_group import PipelineStage, Place, TensorParallel
from atomc.parallel.sharding import Sharding
from atomc.platform import Platform
from atomc.quantization import apply
from atomc.quantization.apply import Methods
from atomc.quantization.config import QuantizationConfig, Request, decide, unquantized_config
from atomc.quantization.linear import LinearMethod, QuantizedLinear
from atomc.quantization.scheme import Fp8, Fp8Block, Scheme
from atomc.runtime.execution.draft import draft_models_of
from atomc.stock import adapter


@dataclass(frozen=True)
class Model:
    """One device's shard of a model on meta, with the configuration of the whole model.

    sharding  how its layers are divided; None: it is whole
    drafts    tokens that its draft layers propose per step; 0: it has none
    stage     of a pipeline, which has some of the layers; None: it has all
    data_ranks  parts of the devices that share the experts, each with tokens of its own
    """

    module: nn.Module
    config: JSONMapping
    quantization: QuantizationConfig | None
    dtype: torch.dtype
    sharding: Sharding | None
    parameters: int  # the number of weights, whatever their dtype
    drafts: int = 0
    stage: PipelineStage | None = None
    data_ranks: int = 1

    @property
    def devices(self) -> int:
        """Those that divide the layers of a stage, or only their experts."""
        return 1 if self.sharding is None else self.sharding.place.size

    @property
    def expert_ranks(self) -> int:
        """Those that each have some of the experts whole."""
        if self.sharding is None or not any(self.sharding.experts.values()):
            return 1
        return self.sharding.part_of_experts.parts

    @property
    def draft_layers(self) -> list[DraftModel]:
        return draft_models_of(self.module, self.drafts) if self.drafts else []


def build_model(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    quantization: Request = None,
    devices: int = 1,
    layers: int | None = None,
    platform: Platform | None = None,
    drafts: int = 0,
    stage: PipelineStage | None = None,
    ep: bool = False,
    data_ranks: int = 1,
) -> Model:
    """The model of a config.json on meta: one device's shard, quantized like its checkpoint or as
    requested; with draft layers, if they propose `drafts` tokens per step; of all layers, or
    those of a stage.

    ep          the devices have some of the experts each
    data_ranks  so many times the devices share only the experts, and send each other tokens

    Raises ValueError for a size that cannot be divided, and as loading the model does.
    """
    config = load_config(folder)
    if layers is not None:
        config = _first_layers(layers, config)
    quantized_by = decide(quantization, folder, config)
    if devices < 1:
        raise ValueError(f"{devices} devices: expected at least 1")
    tp, experts = (
        TensorParallel(0, ranks, "") if ranks > 1 else None for ranks in (devices, data_ranks)
    )
    division = Division(Place(tp, stage, experts), ep)
    division.check(config)
    dtype = dtype or config_dtype(config) or torch.float32
    draft_layers = min(drafts, num_draft_layers(config, None, folder)) if drafts else 0
    module = create_model(
        unquantized_config(config), dtype=dtype, device="meta", draft_layers=draft_layers
    )
    division.cut_stage(module)
    prefix = adapter.PREFIX if isinstance(module, adapter.StockModel) else ""
    methods = Methods() if quantized_by is None else apply.methods_of(module, quantized_by, prefix)
    if (sharding := division.shard(module, methods.linears)) is not None:
        sharding.cut()
        check_parts(module, methods)
    parameters = sum(x.numel() for x in module.parameters())  # before some are packed as codes
    if methods:
        _quantize(module, methods, dtype, platform)
    if sharding is not None and data_ranks > 1:
        sharding.connect_experts()  # the graph has what is sent
    return Model(
        ready(module), config, quantized_by, dtype, sharding, parameters, drafts, stage, data_ranks
    )


def _first_layers(layers: int, config: JSONMapping) -> JSONMapping:
    count = integer(config, "num_hidden_layers", layers)
    if not 1 <= layers <= count:
        raise ValueError(f"--layers {layers}: the model has {count}")
    first = {**config, "num_hidden_layers": layers}
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(kinds := config.get(name), list):
            first[name] = kinds[:layers]
    return first


def _quantize(
    module: nn.Module,
    methods: Methods,
    dtype: torch.dtype,
    platform: Platform | None,
) -> None:
    """Replace linear layers and experts by quantized ones on meta; siblings share a per-tensor
    scale, as after loading.
    """
    fnuz = platform is not None and platform.arch == "gfx942"

    def device_scheme(scheme: Scheme) -> Scheme:
        if fnuz and isinstance(scheme, Fp8 | Fp8Block):
            return replace(scheme, dtype=torch.float8_e4m3fnuz)
        return scheme

    for name, of_experts in methods.experts.items():
        converted = replace(of_experts, scheme=device_scheme(of_experts.scheme), format=None)
        apply.create_experts(module, name, converted, dtype, stacked=True)
    for group in apply.groups(methods.linears):
        shared: dict[str, nn.Parameter] = {}
        for name, method in group:
            scheme = device_scheme(method.scheme)
            old = apply.linear(module, name)
            layer = QuantizedLinear(
                old.in_features, old.out_features, old.bias, LinearMethod(scheme)
            )
            layer.method.create_weights(layer, dtype, "meta")
            for scale in ("weight_scale", "input_scale"):
                parameter = layer._parameters.get(scale)
                if parameter is not None and parameter.shape == (1,):
                    layer.register_parameter(
                        scale, shared.setdefault(f"{scale} {scheme}", parameter)
                    )
            apply.replace(module, name, layer)
