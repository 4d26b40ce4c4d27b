"""What a checkpoint says of a cache in fp8: the scales of keys and values, which stand beside a layer's state handle.

Quantizers give them the names `self_attn.k_scale`, `self_attn.k_proj.k_scale`, or `self_attn.kv_scale` for both. The
layer gets buffers `k_scale` and `v_scale`, [1] fp32; a value is its code times its scale.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

_NAME = re.compile(r"^(?P<layer>.+?)(\.(k|v|qkv)_proj)?\.(?P<kind>k|v|kv)_scale$")


class CacheScale(NamedTuple):
    """A stored scale: the layer that it is for, and the buffers that it fills."""

    layer: nn.Module
    buffers: tuple[str, ...]


def cache_scales(model: nn.Module, names: Iterable[str]) -> dict[str, CacheScale]:
    """Those of the stored names that are scales of a layer with a state handle."""
    layers = {path: module for path, module in model.named_modules() if "kv" in module._buffers}
    found = {name: _NAME.match(name) for name in names}
    return {name: CacheScale(layers[match["layer"]], tuple(f"{letter}_scale" for letter in match["kind"]))
            for name, match in found.items() if match and match["layer"] in layers}  # fmt: skip


def set_cache_scale(scale: CacheScale, name: str, stored: Tensor) -> None:
    """Let the layer have what was stored under this name. Raises ValueError for anything but one positive number."""
    if stored.numel() != 1 or not bool(stored.isfinite().all() and (stored > 0).all()):
        raise ValueError(f"{name} is {stored.flatten()[:4].tolist()}, expected one positive number for all keys or values")
    for buffer in scale.buffers:
        scale.layer.register_buffer(buffer, stored.to(torch.float32).reshape(1))


def mark_fp8_state(model: nn.Module) -> None:
    """Tell by their dtype that what the state handles stand for is kept in fp8."""
    for module in model.modules():
        if "kv" in module._buffers:
            module.register_buffer("kv", module.get_buffer("kv").to(torch.float8_e4m3fn), persistent=False)
