"""A transformers model behind our forward: its attention layers get state handles and call ops.attention."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atomc import ops

log = logging.getLogger("atomc")


def hf_class(architectures: Sequence[str], ours: Sequence[str]) -> Any:
    """The transformers class of the first architecture it knows; `ours` are the names that need no transformers.

    Raises ValueError if there is none.
    """
    known = f"atomc has {', '.join(ours)}"
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"no model file for {', '.join(architectures)}: {known}; "
                         "for others install transformers (pip install 'atomc[hf]')") from error
    for name in architectures:
        cls: Any = getattr(transformers, name, None)
        if isinstance(cls, type) and hasattr(cls, "can_generate") and cls.can_generate():
            log.warning("%s has no model file in atomc; using the class of transformers %s", name,
                        transformers.__version__)
            return cls
    raise ValueError(f"no model for {', '.join(architectures)}: {known}, and transformers {transformers.__version__} "
                     "has no generating class of that name; is it spelled as in config.json?")


def build(
    cls: Any, config: dict[str, Any], dtype: torch.dtype | None, device: torch.device | str | None
) -> "StockModel":
    """cls with random weights, wrapped."""
    with torch.device(device or "cpu"):
        # Not .to(dtype) afterwards: that would round the rotary frequencies as well.
        return wrap_stock(cls._from_config(cls.config_class.from_dict(config), dtype=dtype or torch.float32))


def load(cls: Any, path: Path, dtype: torch.dtype | None, device: torch.device | str) -> "StockModel":
    """cls with the weights in `path`, wrapped. transformers reads and converts them.

    Raises ValueError if it did not find every weight.
    """
    model, info = cls.from_pretrained(path, dtype=dtype or "auto", local_files_only=True, output_loading_info=True)
    if info["missing_keys"]:
        names = sorted(info["missing_keys"])
        raise ValueError(f"{path}: {len(names)} tensors of {cls.__name__} are missing, such as {names[0]}; "
                         "is config.json of the same checkpoint?")
    return wrap_stock(model.to(device))


def wrap_stock(hf_model: Any) -> "StockModel":
    """hf_model behind our forward. Its attention implementation is changed in place, to one named "atom".

    Raises ValueError if its attention cannot be replaced.
    """
    from transformers import AttentionInterface

    name = type(hf_model).__name__
    AttentionInterface.register("atom", _attention)
    hf_model.set_attn_implementation("atom")
    layers = [module for module in hf_model.modules() if hasattr(module, "layer_idx") and hasattr(module, "head_dim")]
    if hf_model.config._attn_implementation != "atom" or not layers:
        raise ValueError(f"{name} does not let its attention be replaced (transformers' AttentionInterface), "
                         "so it cannot keep its keys and values in our cache")
    for module in layers:
        module.kv = ops.kv_state(_num_kv_heads(module), module.head_dim)
        module.kv = module.kv.to(hf_model.device, hf_model.dtype)
    return StockModel(hf_model)


def _num_kv_heads(module: Any) -> int:
    if hasattr(module, "k_proj"):
        return int(module.k_proj.out_features // module.head_dim)
    return int(getattr(module.config, "num_key_value_heads", None) or module.config.num_attention_heads)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, scaling: float,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    is_causal: bool | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls: query [B, N, T, H], key and value [B, K, T, H] -> [B, T, N, H]."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if causal and not hasattr(module, "kv"):
        raise ValueError(f"{type(module).__name__} has no state handle: wrap_stock saw no attention layer in it")
    out = ops.attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), getattr(module, "kv", None), None, s_aux,
        scale=scaling, causal=causal, window=sliding_window or 0, softcap=softcap or 0.0,
    )  # fmt: skip
    return out, None


class StockModel(nn.Module):
    """hf_model, called as our own models are. Parameter names have the prefix `hf_model.`."""

    def __init__(self, hf_model: Any):
        super().__init__()
        self.hf_model = hf_model
        self.config = hf_model.config

    def forward(self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor | None = None) -> Tensor:
        """input_ids and positions [T] i64 -> logits [T, V], or [R, V] of the tokens logits_rows [R] i64."""
        flat = input_ids.dim() == 1
        out = self.hf_model(
            input_ids=input_ids[None] if flat else input_ids,
            position_ids=positions[None] if flat else positions,
            use_cache=False,
            logits_to_keep=0 if logits_rows is None else logits_rows,
        )
        logits: Tensor = out.logits[0] if flat else out.logits
        return logits
