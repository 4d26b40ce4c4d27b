"""The model of a plan: one device's shard of it, on the meta device."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from atomc import models
from atomc.json_types import JSONLike
from atomc.models import stock
from atomc.models.checkpoint_files import config_dtype, load_config
from atomc.models.config import integer
from atomc.models.draft_checkpoint import check_draft_layers
from atomc.models.loader import ready
from atomc.models.mtp import DraftModel
from atomc.platform import Platform
from atomc.quantization import apply
from atomc.quantization.config import QuantizationConfig, Request, decide
from atomc.quantization.linear import LinearMethod, QuantizedLinear
from atomc.quantization.scheme import Fp8, Fp8Block, Scheme
from atomc.runtime.draft import draft_model_of

# Sizes in a config.json that tensor parallelism divides.
SHARDED_SIZES = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "vocab_size",
)
ROW_SHARDED, VOCAB_SHARDED = ("rowwise",), ("embedding_rowwise", "colwise_gather_output")


@dataclass(frozen=True)
class Model:
    """One device's shard of a model on meta, with its configuration. drafts: tokens that its draft
    layer proposes per step; 0: it has none.
    """

    module: nn.Module
    config: Mapping[str, JSONLike]
    quantization: QuantizationConfig | None
    dtype: torch.dtype
    devices: int
    parameters: int  # the number of weights, whatever their dtype
    drafts: int = 0

    @property
    def draft(self) -> DraftModel | None:
        return draft_model_of(self.module) if self.drafts else None


def build_model(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    quantization: Request = None,
    devices: int = 1,
    layers: int | None = None,
    platform: Platform | None = None,
    drafts: int = 0,
) -> Model:
    """The model of a config.json on meta: one device's shard, quantized like its checkpoint or as
    requested; with its draft layer, if that proposes `drafts` tokens per step.

    Raises ValueError for a size that cannot be divided, and as loading the model does.
    """
    config = load_config(folder)
    if layers is not None:
        config = _first_layers(layers, config)
    chosen = decide(quantization, folder, config)
    if devices > 1:
        config = shard_config(config, devices)
    plain = {
        name: value
        for name, value in config.items()
        if name not in ("quantization_config", "compression_config")
    }
    dtype = dtype or config_dtype(config) or torch.float32
    if drafts:
        check_draft_layers(config, None, folder)
    module = models.build(plain, dtype=dtype, device="meta", draft_layer=drafts > 0)
    parameters = sum(x.numel() for x in module.parameters())  # before some are packed as codes
    if chosen is not None:
        prefix = stock.PREFIX if isinstance(module, stock.StockModel) else ""
        _quantize(module, apply.methods_of(module, chosen, prefix), dtype, platform)
    if devices > 1:
        sharding(module)
    return Model(ready(module), config, chosen, dtype, devices, parameters, drafts)


def _first_layers(layers: int, config: Mapping[str, JSONLike]) -> Mapping[str, JSONLike]:
    count = integer(config, "num_hidden_layers", layers)
    if not 1 <= layers <= count:
        raise ValueError(f"--layers {layers}: the model has {count}")
    first = {**config, "num_hidden_layers": layers}
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(kinds := config.get(name), list):
            first[name] = kinds[:layers]
    return first


def shard_config(config: Mapping[str, JSONLike], devices: int) -> Mapping[str, JSONLike]:
    """The config of one device's shard: heads, hidden units of MLPs and vocabulary are divided, the
    model width is not.

    Raises ValueError naming a size that cannot be divided.
    """
    if devices < 1:
        raise ValueError(f"{devices} devices: expected at least 1")
    absent = [name for name in ("num_attention_heads", "vocab_size") if name not in config]
    if absent:
        raise ValueError(
            f"cannot shard this model over {devices} devices: its config.json has no {absent[0]}"
        )
    heads = integer(config, "num_attention_heads")
    found = {**config, "num_key_value_heads": config.get("num_key_value_heads") or heads}
    for name in SHARDED_SIZES:
        size = found.get(name)
        if isinstance(size, int) and size % devices:
            raise ValueError(
                f"cannot shard this model over {devices} devices: {name} is {size}, not "
                f"a multiple of {devices}"
            )
        if isinstance(size, int):
            found[name] = size // devices
    found.setdefault(
        "head_dim", config.get("head_dim") or integer(config, "hidden_size", 0) // heads
    )
    return found


def _quantize(
    module: nn.Module,
    methods: apply.Methods,
    dtype: torch.dtype,
    platform: Platform | None,
) -> None:
    """Replace linear layers and experts by quantized ones on meta; siblings share a per-tensor
    scale, as after loading.
    """
    fnuz = platform is not None and platform.arch == "gfx942"

    def on_device(scheme: Scheme) -> Scheme:
        if fnuz and isinstance(scheme, Fp8 | Fp8Block):
            return replace(scheme, dtype=torch.float8_e4m3fnuz)
        return scheme

    for name, of_experts in methods.experts.items():
        converted = replace(of_experts, scheme=on_device(of_experts.scheme), format=None)
        apply.create_experts(module, name, converted, dtype, stacked=True)
    for group in apply.groups(methods.linears):
        shared: dict[str, nn.Parameter] = {}
        for name, method in group:
            scheme = on_device(method.scheme)
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


def sharding(module: nn.Module) -> dict[str, str]:
    """Name of a module -> how its parameters are sharded, from SHARD in the model's file or the
    plan of transformers.

    Raises ValueError for a model that has neither.
    """
    if isinstance(module, stock.StockModel):
        plan = getattr(module.config, "base_model_tp_plan", None) or {}
        found = {path.rpartition(".")[2]: how for path, how in plan.items()}
        found = {name: how for name, how in found.items() if how not in VOCAB_SHARDED}
        # Which the plan does not shard.
        found |= {"embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
    else:
        found = getattr(sys.modules[type(module).__module__], "SHARD", {})
    if not any(how in ROW_SHARDED for how in found.values()):
        raise ValueError(f"{type(module).__name__} does not define how it is sharded over devices")
    return dict(found)
