"""In the latent attention of DeepSeek, the product that brings queries to the latent space joins rotation and write.

    q_nope > quantizer > bmm -+
    q_pe ---------------------+- mla_rope_kv_write -> q, token    =>    bmm_rope_kv_write -> q, token
    kv_c, k_pe ---------------+

The quantizer is that of the product: fp8 in groups of 128 under one scale of the weight, or MXFP4.
"""

import inspect
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from atomc import ops
from atomc.ops.formats import FP8
from atomc.passes.fuse.mla_kv_write import example
from atomc.rewrite import Rewrite, tensor_example


def _with(function: Callable[..., Any], **given: Any) -> Callable[..., Any]:
    """The function with these arguments given, so that no site decides them."""

    def rest(**others: Any) -> Any:
        return function(**others, **given)

    kept = [p for name, p in inspect.signature(function).parameters.items() if name not in given]
    rest.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
    return rest


def _fp8_pattern(
    q_nope: Tensor, weight: Tensor, weight_scale: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, cos: Tensor,
    sin: Tensor, kv_cache: Tensor, slots: Tensor, scale: Tensor | None, style: str, dtype: torch.dtype, out: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    codes, scales = ops.quant_fp8_group(q_nope, 128, False, dtype)
    latent = ops.scaled_bmm_fp8(codes, weight, scales, weight_scale, out_dtype=out)
    q, token = ops.mla_rope_kv_write(latent, q_pe, kv_c, k_pe, cos, sin, kv_cache, slots, scale, style)
    return q, token


def _fp8_replacement(
    q_nope: Tensor, weight: Tensor, weight_scale: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, cos: Tensor,
    sin: Tensor, kv_cache: Tensor, slots: Tensor, scale: Tensor | None, style: str, dtype: torch.dtype, out: torch.dtype,
) -> Any:  # fmt: skip
    return ops.bmm_rope_kv_write(q_nope, weight, weight_scale, q_pe, kv_c, k_pe, cos, sin, kv_cache, slots, scale,
                                 scheme="fp8", rope_style=style, dtype=dtype)  # fmt: skip


def _mxfp4_pattern(
    q_nope: Tensor, weight: Tensor, weight_scale: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, cos: Tensor,
    sin: Tensor, kv_cache: Tensor, slots: Tensor, scale: Tensor | None, style: str, rounding: str, out: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    codes, scales = ops.quant_mxfp4(q_nope, rounding)
    latent = ops.bmm_mxfp4(codes, weight, scales, weight_scale, out_dtype=out)
    q, token = ops.mla_rope_kv_write(latent, q_pe, kv_c, k_pe, cos, sin, kv_cache, slots, scale, style)
    return q, token


def _mxfp4_replacement(
    q_nope: Tensor, weight: Tensor, weight_scale: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, cos: Tensor,
    sin: Tensor, kv_cache: Tensor, slots: Tensor, scale: Tensor | None, style: str, rounding: str, out: torch.dtype,
) -> Any:  # fmt: skip
    return ops.bmm_rope_kv_write(q_nope, weight, weight_scale, q_pe, kv_c, k_pe, cos, sin, kv_cache, slots, scale,
                                 scheme="mxfp4", rope_style=style, rounding=rounding)  # fmt: skip


def _is_the_input(out: torch.dtype, q_nope: Tensor, **_: object) -> str | None:
    return None if q_nope.dtype == out else f"a product in the dtype of `q_nope`, {q_nope.dtype}, this one is {out}"


def _example(out: torch.dtype, cache: torch.dtype, weight: dict[str, Any]) -> dict[str, Any]:
    given = {name: found.to(out) if isinstance(found, Tensor) and found.dtype == torch.bfloat16 else found
             for name, found in example(cache).items()}  # fmt: skip
    return {**given, "q_nope": tensor_example(5, 7, 64, dtype=out), **weight}


def _rewrites(out: torch.dtype, cache: torch.dtype) -> list[Rewrite]:
    """For products whose result is in `out`, and a cache of this dtype."""
    bound = {"out": out} if cache in FP8 else {"out": out, "scale": None}
    more: dict[str, Any] = {"guard": partial(_is_the_input, out)}
    mxfp4 = {"weight": tensor_example(7, 22, 32, dtype=torch.uint8),
             "weight_scale": tensor_example(7, 22, 2, dtype=torch.uint8), "rounding": "even"}  # fmt: skip
    found = [Rewrite("bmm_rope_kv_write", _with(_mxfp4_pattern, **bound), _with(_mxfp4_replacement, **bound),
                     lambda: _example(out, cache, mxfp4), variant=f"mxfp4, {out}, {cache}", attrs={"scheme": "mxfp4"},
                     needs={"bmm_mxfp4": {"out_dtype": out}}, **more)]  # fmt: skip
    for dtype in FP8:
        fp8 = {"weight": tensor_example(7, 22, 64, dtype=dtype), "weight_scale": torch.ones(1)}
        found.append(Rewrite(
            "bmm_rope_kv_write", _with(_fp8_pattern, dtype=dtype, **bound), _with(_fp8_replacement, dtype=dtype, **bound),
            partial(_example, out, cache, fp8), variant=f"{dtype}, {out}, {cache}", attrs={"scheme": "fp8"},
            needs={"scaled_bmm_fp8": {"out_dtype": out}}, **more,
        ))  # fmt: skip
    return found


_MODELS = (torch.bfloat16, torch.float16, torch.float32)
BMM_ROPE_KV_WRITE = [
    rewrite for out, cache in product(_MODELS, (None, *FP8)) for rewrite in _rewrites(out, out if cache is None else cache)
]
