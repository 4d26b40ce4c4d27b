"""The scales of keys and values in a checkpoint, for an fp8 cache.

Quantizers name them `self_attn.k_scale`, `self_attn.k_proj.k_scale`, or `self_attn.kv_scale` for
both. The layer gets buffers `k_scale` and `v_scale`, [1] fp32; a value is its code times its scale.
A latent cache has one scale, `kv_scale`: that of keys, which are whole rows of it.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

_NAME = re.compile(r"^(?P<layer>.+?)(\.(k|v|qkv)_proj)?\.(?P<kind>k|v|kv)_scale$")


class CacheScale(NamedTuple):
    """A stored scale: its layer, and the buffers that it sets."""

    layer: nn.Module
    buffers: tuple[str, ...]


def cache_scales(model: nn.Module, names: Iterable[str]) -> dict[str, CacheScale]:
    """Stored name -> scale, for the names that are scales of a layer with a state handle."""
    layers = {path: module for path, module in model.named_modules() if "kv" in module._buffers}
    matches = {name: _NAME.match(name) for name in names}
    return {
        name: CacheScale(layers[match["layer"]], _buffers(layers[match["layer"]], match["kind"]))
        for name, match in matches.items()
        if match and match["layer"] in layers
    }


def _buffers(layer: nn.Module, kind: str) -> tuple[str, ...]:
    """The scales of a layer that a stored one sets; kind: "k", "v" or "kv"."""
    of_latent = ("kv_scale",) if "k" in kind else ()
    if layer.get_buffer("kv").dim() == 2:  # ops.latent_state
        return of_latent
    of_heads = tuple(f"{letter}_scale" for letter in kind)
    # Keys and values that are expanded from a latent: the compiler decides which of them it caches.
    return of_heads + of_latent if hasattr(layer, "kv_b_proj") else of_heads


def set_cache_scale(scale: CacheScale, name: str, stored: Tensor) -> None:
    """Set the layer's buffers to the stored scale. Raises ValueError unless it is positive."""
    if stored.numel() != 1 or not bool(stored.isfinite().all() and (stored > 0).all()):
        raise ValueError(
            f"{name} is {stored.flatten()[:4].tolist()}, expected one positive number for all "
            "keys or values"
        )
    for buffer in scale.buffers:
        scale.layer.register_buffer(buffer, stored.to(torch.float32).reshape(1))


def mark_fp8_state(model: nn.Module) -> None:
    """Convert the state handles to fp8, which marks the cache as fp8."""
    for module in model.modules():
        if "kv" in module._buffers:
            module.register_buffer(
                "kv", module.get_buffer("kv").to(torch.float8_e4m3fn), persistent=False
            )
