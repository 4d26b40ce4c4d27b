"""Wraps a transformers model: its attention layers get state handles and call ops.attention, its
experts call ops.moe_experts.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from atomc import ops
from atomc.files.json_types import JSONMapping
from atomc.quantization.config import unquantized_config
from atomc.stock.delta_net import DELTA_NETS
from atomc.stock.delta_net import LAYER_TYPE as LINEAR
from atomc.stock.experts import experts_of, read_settings, register_experts
from atomc.stock.implementations import Implementations, keep_all_rows
from atomc.stock.indexer import enter_indexers, is_indexer
from atomc.stock.mamba import MIXERS, is_mixer
from atomc.stock.model import PREFIX, StockModel
from atomc.stock.short_conv import LAYER_TYPE as SHORT_CONV
from atomc.stock.short_conv import SHORT_CONVS
from atomc.stock.vision import StockVisionModel, enter_encoder, has_encoder
from atomc.torch_compat.exceptions import is_failure, out_of_memory
from atomc.weights.registry import parameter_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Names that other modules import from here, besides those defined below.
__all__ = ["PREFIX", "StockModel"]

log = logging.getLogger("atomc")

# Values of config.layer_types that ops.attention supports without a mask.
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# With indexers that ops.index_topk can express; the second is the name in transformers 5.17.
INDEXED = frozenset({"indexed_attention", "deepseek_sparse_attention"})
STATELESS = frozenset({"mlp", "moe"})
HYBRID = "hybrid"  # attention beside or before a layer of kind linear_attention


def hf_class(architectures: Sequence[str], ours: Sequence[str]) -> "type[PreTrainedModel]":
    """The transformers class of the first architecture that transformers has.

    ours  the architectures with a model file in atomc, for the error

    Raises ValueError if transformers has none of them.
    """
    supported = f"atomc has {', '.join(ours)}"
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            f"no model file for {', '.join(architectures)}: {supported}; "
            "for others install transformers (pip install 'atomc[hf]')"
        ) from error
    for name in architectures:
        cls: type[PreTrainedModel] | None = getattr(transformers, name, None)
        if isinstance(cls, type) and hasattr(cls, "can_generate") and cls.can_generate():
            if name not in ours:
                log.warning(
                    "%s has no model file in atomc; using the class of transformers %s",
                    name,
                    transformers.__version__,
                )
            return cls
    raise ValueError(
        f"no model for {', '.join(architectures)}: {supported}, and transformers "
        f"{transformers.__version__} "
        "has no generating class of that name; is it spelled as in config.json?"
    )


def build(
    cls: "type[PreTrainedModel]",
    config: JSONMapping,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> "StockModel":
    """A model of this class with random weights, wrapped."""
    with torch.device(device or "cpu"), convert_to_value_error(cls):
        # Not .to(dtype) afterwards, which would also round the rotary frequencies.
        model = cls._from_config(cls.config_class.from_dict(config), dtype=dtype or torch.float32)
    return wrap_stock(model)


def empty_model(cls: "type[PreTrainedModel]", config: JSONMapping, dtype: torch.dtype) -> nn.Module:
    """A model of this class on meta without initialization, to read its sizes; takes less than a
    second for the largest models.
    """
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        model = _new(cls, config, dtype)
    with convert_to_value_error(cls):
        model.tie_weights()  # which no_init_weights skips
    return model  # type: ignore[no-any-return]


@contextmanager
def convert_to_value_error(cls: type) -> Iterator[None]:
    """Convert exceptions of transformers to ValueError: its classes raise any type for unexpected
    config values.

    Use it only around calls to transformers, so that errors of atomc keep their type.
    """
    try:
        yield
    except (OSError, ImportError):
        raise
    except BaseException as error:  # transformers validates no config, and its libraries can panic
        if out_of_memory(error) or not is_failure(error):
            raise
        raise ValueError(
            f"config.json: transformers cannot build a {cls.__name__} from it: "
            f"{type(error).__name__}: "
            f"{' '.join(str(error).split())}"
        ) from error


def build_on_meta(
    cls: "type[PreTrainedModel]", config: JSONMapping, dtype: torch.dtype
) -> "StockModel":
    """A model of this class without weights: its parameters are on meta."""

    def moved_to_meta(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return parameter_of(parameter.to("meta"))

    hook = register_module_parameter_registration_hook(moved_to_meta)  # type: ignore[arg-type]
    try:
        model = _new(cls, config, dtype)
    finally:
        hook.remove()
    return wrap_stock(model)


def _new(
    cls: "type[PreTrainedModel]", config: JSONMapping, dtype: torch.dtype
) -> "PreTrainedModel":
    with convert_to_value_error(cls):
        return cls._from_config(cls.config_class.from_dict(unquantized_config(config)), dtype=dtype)


def load(
    cls: "type[PreTrainedModel]",
    path: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    mmap: bool = True,
) -> "StockModel":
    """A model of this class with the weights in `path`, read and converted by transformers,
    wrapped. mmap: False reads the files instead of mapping them.

    Raises ValueError for a missing weight, and for a shape that contradicts config.json.
    """
    with convert_to_value_error(cls), _hide_load_report():
        # Mismatched sizes are reported below, with the sizes.
        model, info = cls.from_pretrained(
            path,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            disable_mmap=None if mmap else True,  # None: as the file system suggests
        )
    if info["mismatched_keys"]:
        name, *shapes = min(info["mismatched_keys"])
        stored, expected = (list(shape) for shape in shapes)
        raise ValueError(
            f"{path}: {len(info['mismatched_keys'])} tensors of {cls.__name__} have another "
            "shape, such as "
            f"{name}: {stored}, expected {expected}; is config.json of the same checkpoint?"
        )
    if info["missing_keys"]:
        names = sorted(info["missing_keys"])
        raise ValueError(
            f"{path}: {len(names)} tensors of {cls.__name__} are missing, such as {names[0]}; "
            "is config.json of the same checkpoint?"
        )
    if info["unexpected_keys"]:
        names = sorted(info["unexpected_keys"])
        log.warning(
            "%s: %d tensors are not part of %s, such as %s",
            path,
            len(names),
            cls.__name__,
            names[0],
        )
    return wrap_stock(model.to(device))


@contextmanager
def _hide_load_report() -> Iterator[None]:
    """A context in which transformers does not log its table of missing and mismatched weights."""
    from transformers.utils import logging as hf_logging

    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)


def wrap_stock(hf_model: "PreTrainedModel") -> "StockModel":
    """Wrap hf_model. Its attention implementation is set to "atom", in place, and that of its
    experts as well if ops.moe_experts can express them; `own` of the result has those before.

    Raises ValueError if a layer has a state or a mask that ops.attention does not support.
    """
    from transformers import AttentionInterface

    indexed = enter_indexers(hf_model)
    layers = _enter_layers(hf_model, indexed=indexed)
    implementations = Implementations.of(hf_model)
    AttentionInterface.register("atom", _attention)
    hf_model.set_attn_implementation("atom")
    if hf_model.config._attn_implementation != "atom":
        raise ValueError(
            f"{type(hf_model).__name__} does not support a custom attention (AttentionInterface of "
            "transformers)"
        )
    _set_experts(hf_model)
    keep_all_rows(hf_model)
    for module in layers:
        _give_state(module, hf_model)
    if has_encoder(hf_model):
        enter_encoder(hf_model)
        return StockVisionModel(hf_model, implementations, indexed=indexed)
    return StockModel(hf_model, implementations, indexed=indexed)


def _enter_layers(hf_model: "PreTrainedModel", *, indexed: bool) -> list[nn.Module]:
    """Replace the forwards of layers with a recurrent state by ours, in place, and return the
    attention layers. Raises ValueError for a kind of layers without one, and if no layer has a
    state.
    """
    name = type(hf_model).__name__
    layer_types = list(getattr(hf_model.config.get_text_config(), "layer_types", None) or ())
    kinds = set(layer_types) - LAYER_TYPES - STATELESS
    if indexed:
        kinds -= INDEXED
    num_linear = DELTA_NETS.enter(hf_model) + MIXERS.enter(hf_model)
    if num_linear == layer_types.count(LINEAR) + layer_types.count(HYBRID):
        kinds -= {LINEAR, HYBRID}
    num_convs = SHORT_CONVS.enter(hf_model)
    if num_convs == layer_types.count(SHORT_CONV):
        kinds -= {SHORT_CONV}
    if kinds or (getattr(hf_model, "_is_stateful", False) and not num_linear):
        raise ValueError(
            f"{name} has layers of kind {', '.join(sorted(kinds)) or 'recurrent'}, "
            f"only {' and '.join(sorted(LAYER_TYPES))} are supported, {LINEAR} by a gated "
            f"delta net or a Mamba-2 mixer, and {SHORT_CONV} by a short convolution"
        )
    layers = _attention_layers(hf_model)
    if not (layers or num_linear or num_convs):
        raise ValueError(
            f"{name} has no attention layer with a layer_idx and a head_dim, "
            "so there are no keys and values to cache"
        )
    return layers


def _attention_layers(hf_model: "PreTrainedModel") -> list[nn.Module]:
    return [
        module
        for module in hf_model.modules()
        if hasattr(module, "layer_idx")
        and _head_dim(module)
        and not (is_indexer(module) or is_mixer(module))
    ]


def _give_state(attention: nn.Module, hf_model: "PreTrainedModel") -> None:
    """Give the layer the handle of its keys and values. Raises ValueError for a size below 1."""
    heads, width = _num_kv_heads(attention), _head_dim(attention)
    if heads < 1 or width < 1:
        raise ValueError(
            f"{type(hf_model).__name__} has {heads} heads of {width} columns for keys and values, "
            "expected at least 1"
        )
    attention.kv = ops.kv_state(heads, width)  # registers a buffer, which a copy of it would not
    attention.kv = attention.kv.to(hf_model.device, hf_model.dtype)


def _set_experts(hf_model: "PreTrainedModel") -> None:
    """Have its experts call ops.moe_experts, in place, if the op can express all of them."""
    try:
        settings = [read_settings(module) for module in experts_of(hf_model)]
    except ValueError:  # then its experts run as transformers implements them
        return
    if settings:
        register_experts()
        hf_model.set_experts_implementation("atom")


def _head_dim(attention: nn.Module) -> int:
    """The width of a key; 0 for a module that is not an attention layer."""
    # qk_head_dim: latent attention (DeepSeek-V2), whose values have another width.
    names = ("head_dim", "head_size", "qk_head_dim")
    return int(next(filter(None, (getattr(attention, name, None) for name in names)), 0))


def _num_kv_heads(attention: nn.Module) -> int:
    projected = getattr(getattr(attention, "k_proj", None), "out_features", None)
    if projected is not None:  # Moshi's projections are not nn.Linear
        return int(projected // _head_dim(attention))
    # num_key_value_groups is more reliable than the config: JetMoe passes repeated keys.
    num_heads = getattr(attention, "num_heads", None)
    groups = getattr(attention, "num_key_value_groups", None)
    if num_heads and groups:
        return int(num_heads // groups)
    config: PretrainedConfig = attention.config
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers: query [B, N, T, H], key [B, K, T, H] and value
    [B, K, T, V] -> [B, T, N, V].

    indices   positions of the keys that an indexer chose, [B, T, K] i32; no mask is read then
    """
    if indices is not None:
        attention_mask = ops.chosen_mask(indices)
    kv = getattr(module, "kv", None)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    expected = None if kv is None else tuple(kv.shape[1:])
    fits = expected == (key.shape[1], key.shape[3]) and value.shape[1] == key.shape[1]
    if causal and not fits:
        raise ValueError(
            f"{type(module).__name__}: keys {list(key.shape)} and values {list(value.shape)} "
            "do not match "
            f"its state handle with (heads, width) {expected}"
        )
    out = ops.attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        kv,
        attention_mask,
        s_aux,
        scale=scaling,
        causal=causal,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
    )
    return out, None
